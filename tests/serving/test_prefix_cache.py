"""Keys of prompts on disk: answers after a hit are the same as without the cache, even with damaged files."""

from __future__ import annotations

import copy
import errno
import functools
import pickle
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from pairs import each_once_quick
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import torch_mesh
from torch_mesh.errors import UnsupportedModelError
from torch_mesh.hf import cache_state
from torch_mesh.hf.generation_compat import CACHE_NAME
from torch_mesh.hf.kv_cache import install_caches, record_past
from torch_mesh.serving.kept_keys import KeptKeys
from torch_mesh.serving.model_identity import ModelIdentity
from torch_mesh.serving.prefix_cache import BLOCK, PrefixCache
from torch_mesh.store import prefix_blocks

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = 97
MARK = 3  # the token that ends messages
WINDOW = 100
PLENTY = 2**30
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


def _full() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **_EXPERTS, num_experts=4))


def _with_windows() -> PreTrainedModel:
    return GptOssForCausalLM(GptOssConfig(**_SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2))


def _with_latents() -> PreTrainedModel:
    sizes = _SIZES | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 16}
    sizes |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **_EXPERTS, n_routed_experts=4))


def _with_linear_attention() -> PreTrainedModel:
    heads = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    heads |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = Qwen3NextConfig(**_SIZES, **_EXPERTS, **heads, num_experts=4, layer_types=kinds)
    return Qwen3NextForCausalLM(config)


Make = Callable[[], PreTrainedModel]
MAKES = (_full, _with_windows, _with_latents, _with_linear_attention)
MODELS = pytest.mark.parametrize("make", MAKES)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "torch_mesh" / "prefixes"


def _model(make: Make) -> PreTrainedModel:
    """A model in float64, so that rounding decides no answer."""
    model = make().double().eval()
    model.set_experts_implementation("eager")  # other implementations lack float64
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 1.0 if "embed" in name or "lm_head" in name else 0.3)
    return model


@pytest.fixture
def opened() -> Iterator[Callable[..., KeptKeys]]:
    """Opens the prefix cache of a model as a new process would."""
    caches = []

    def open_keys(model: PreTrainedModel, memory: int = 0, limit: int = PLENTY) -> KeptKeys:
        caches.append(PrefixCache(model, limit, [MARK]))
        return KeptKeys(model, memory, prefixes=caches[-1])

    yield open_keys
    for each in caches:
        each.close()


def _ask(generate: Callable[..., Tensor], tokens: Tensor, new: int = 8, **more: Any) -> Tensor:
    config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    mask = torch.ones(1, len(tokens), dtype=torch.long)
    answer = generate(input_ids=tokens[None], attention_mask=mask, generation_config=config, **more)[0]
    return answer


def _some(rng: np.random.Generator, count: int) -> Tensor:
    return torch.from_numpy(rng.integers(MARK + 1, VOCABULARY, count))


def _files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.glob("*/*") if not path.name.startswith("."))


def _empty(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    for layer in filter(cache_state.is_window, cache.layers):
        record_past(layer)
    return cache


def _layers(given: DynamicCache) -> dict[str, Tensor]:
    return cache_state.rows(given, False) | cache_state.rows(given, True) | cache_state.states(given)


@pytest.mark.parametrize(("make", "ends_block"), each_once_quick(MAKES, [False, True]))
def test_another_process_uses_the_keys_of_an_earlier_one(
    make: Make, ends_block: bool, opened: Callable[..., KeptKeys], rng: np.random.Generator
) -> None:
    model = _model(make)
    first = opened(model)
    # The answer adds 8 tokens. Unless these end a block, the first prompt ends well within the same block.
    tokens = _some(rng, 3 * BLOCK + (BLOCK - 8 if ends_block else int(rng.integers(1, BLOCK - 24))))
    answer = _ask(first.generate, tokens)
    assert torch.equal(answer, _ask(model.generate, tokens))
    first.prefixes.flush()
    second = opened(model)
    known = len(answer) - 1  # the last token has no keys yet
    for more in (_some(rng, 5), _some(rng, 80)):
        prompt = torch.cat([answer, more])
        before = second.counts.prefixes.tokens
        assert torch.equal(_ask(second.generate, prompt), _ask(model.generate, prompt))
        assert second.counts.prefixes.tokens - before == known
        second.prefixes.flush()
        known += ends_block  # a complete block serves every prompt that has it, and now includes the last token
    assert second.counts.prefixes.hits == 2
    assert second.counts.prefixes.read_bytes > 0 and first.counts.prefixes.written_bytes > 0


@MODELS
def test_another_conversation_reuses_the_keys_of_the_same_tools(
    make: Make, opened: Callable[..., KeptKeys], rng: np.random.Generator
) -> None:
    model = _model(make)
    tools = torch.cat([_some(rng, 5 * BLOCK + 20), torch.tensor([MARK])])
    first = opened(model)
    _ask(first.generate, torch.cat([tools, _some(rng, 30)]))
    first.prefixes.flush()
    second = opened(model)
    prompt = torch.cat([tools, _some(rng, 100)])
    assert torch.equal(_ask(second.generate, prompt), _ask(model.generate, prompt))
    assert second.counts.prefixes.tokens == 5 * BLOCK


def test_states_are_kept_where_prompts_diverge(opened: Callable[..., KeptKeys], rng: np.random.Generator) -> None:
    model = _model(_with_linear_attention)
    kept = opened(model)
    same = _some(rng, 4 * BLOCK + 9)
    reused = []
    for _ in range(3):
        prompt = torch.cat([same, _some(rng, 2 * BLOCK)])
        before = kept.counts.prefixes.tokens
        assert torch.equal(_ask(kept.generate, prompt), _ask(model.generate, prompt))
        reused.append(kept.counts.prefixes.tokens - before)
        kept.prefixes.flush()
    assert reused == [0, 0, 4 * BLOCK]


@MODELS
def test_a_restored_cache_equals_the_saved_one(
    make: Make, opened: Callable[..., KeptKeys], rng: np.random.Generator
) -> None:
    model = _model(make)
    prefixes = opened(model).prefixes
    assert prefixes is not None
    tokens = _some(rng, 2 * BLOCK + 30)
    given = _empty(model)
    with torch.no_grad():
        model(input_ids=tokens[None], **{CACHE_NAME: given}, use_cache=True)
    prefixes.save(tokens, given, {})
    prefixes.flush()
    restored = _empty(model)
    assert prefixes.restore(torch.cat([tokens, tokens]), restored) == len(tokens)
    expected, found = _layers(given), _layers(restored)
    assert expected.keys() == found.keys() and expected
    for name, tensor in expected.items():
        rows = found[name].shape[-2]
        assert rows == WINDOW - 1 if make is _with_windows and name[0] in "02" else rows == tensor.shape[-2]
        assert torch.equal(found[name], tensor[..., -rows:, :])
    assert cache_state.length(restored) == len(tokens)
    with torch.no_grad():  # bit-identical to the cache that stayed in memory
        outputs = [
            model(input_ids=tokens[None, :9], **{CACHE_NAME: each}, use_cache=True) for each in (given, restored)
        ]
    assert torch.equal(outputs[0].logits, outputs[1].logits)


def test_after_close_nothing_is_kept_and_flush_returns(
    opened: Callable[..., KeptKeys], rng: np.random.Generator, cache: Path
) -> None:
    model = _model(_full)
    prefixes = opened(model).prefixes
    assert prefixes is not None
    saved = []
    for count in (2 * BLOCK, 3 * BLOCK):
        tokens, given = _some(rng, count), _empty(model)
        with torch.no_grad():
            model(input_ids=tokens[None], **{CACHE_NAME: given}, use_cache=True)
        prefixes.save(tokens, given, {})
        prefixes.flush()
        saved.append(len(_files(cache)))
        prefixes.close()
    assert saved[0] == saved[1] > 0


@pytest.mark.parametrize("changed", [{"dense": "int8"}, {"dense": "none"}, {"speculation": "lookup"}])
def test_another_arithmetic_of_dense_layers_is_another_model(folder: Path, changed: dict[str, str]) -> None:
    digests = [
        ModelIdentity(
            AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=torch_mesh.MeshConfig(resident=0.3, **fields)
            )
        ).digest()
        for fields in ({}, {}, changed)
    ]
    assert digests[0] == digests[1] != digests[2]


@MODELS
def test_logits_after_a_hit_differ_by_rounding_alone(
    make: Make, opened: Callable[..., KeptKeys], rng: np.random.Generator
) -> None:
    model = _model(make)
    prefixes = opened(model).prefixes
    assert prefixes is not None
    tokens = _some(rng, 4 * BLOCK)
    cut = int(rng.integers(BLOCK, 3 * BLOCK))
    given, restored = (_empty(model) for _ in range(2))
    with torch.no_grad():
        model(input_ids=tokens[None, :cut], **{CACHE_NAME: given}, use_cache=True)
        prefixes.save(tokens[:cut], given, {})
        prefixes.flush()
        assert prefixes.restore(tokens, restored) == cut
        after = model(input_ids=tokens[None, cut:], **{CACHE_NAME: restored}, use_cache=True).logits
        whole = model(input_ids=tokens[None]).logits[:, cut:]
    bound = 1e-3 if make is _with_linear_attention else 1e-4  # parts of some models are in float32
    assert (after - whole).abs().max() <= bound * whole.abs().max()


@pytest.mark.parametrize(("damage", "make"), each_once_quick(["flipped", "short", "empty", "gone", "swapped"], MAKES))
def test_damaged_files_are_computed_again(
    make: Make, damage: str, opened: Callable[..., KeptKeys], rng: np.random.Generator, cache: Path
) -> None:
    model = _model(make)
    tokens = _some(rng, 4 * BLOCK + 5)
    kept = opened(model)
    expected = _ask(kept.generate, tokens)
    kept.prefixes.flush()
    paths = _files(cache)
    hurt = [path for path in paths if rng.random() < 0.3] or paths[:1]
    for path in hurt:
        data = bytearray(path.read_bytes())
        if damage == "flipped":
            data[int(rng.integers(len(data)))] ^= 1
        elif damage == "short":
            del data[int(rng.integers(1, len(data))) :]
        elif damage == "empty":
            data.clear()
        elif damage == "swapped":
            data = bytearray(paths[paths.index(path) - 1].read_bytes())
        path.write_bytes(data)
        if damage == "gone":
            path.unlink()
    again = opened(model)
    assert torch.equal(_ask(again.generate, tokens), expected)
    again.prefixes.flush()
    last = opened(model)
    assert torch.equal(_ask(last.generate, tokens), expected)
    assert last.counts.prefixes.tokens >= again.counts.prefixes.tokens


def test_a_full_disk_is_no_error(
    opened: Callable[..., KeptKeys], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    model = _model(_full)
    kept = opened(model)
    tokens = _some(rng, 2 * BLOCK)

    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(prefix_blocks, "new_file", full)
        expected = _ask(kept.generate, tokens)
        kept.prefixes.flush()
    assert _files(cache) == [] and kept.counts.prefixes.written_bytes == 0
    assert torch.equal(_ask(kept.generate, tokens), expected)  # later the disk has room again
    kept.prefixes.flush()
    assert _files(cache)


def test_the_cache_stays_within_a_small_limit(
    opened: Callable[..., KeptKeys], rng: np.random.Generator, cache: Path
) -> None:
    model = _model(_full)
    one = opened(model)
    _ask(one.generate, _some(rng, 4 * BLOCK))
    one.prefixes.flush()
    limit = sum(path.stat().st_size for path in _files(cache))
    kept = opened(model, limit=limit)
    for _ in range(4):
        tokens = _some(rng, 4 * BLOCK)
        assert torch.equal(_ask(kept.generate, tokens), _ask(model.generate, tokens))
        kept.prefixes.flush()
        assert 0 < sum(path.stat().st_size for path in _files(cache)) <= limit


def test_keys_in_memory_take_precedence_over_the_disk(
    opened: Callable[..., KeptKeys], rng: np.random.Generator
) -> None:
    model = _model(_full)
    kept = opened(model, memory=PLENTY)
    answer = _ask(kept.generate, _some(rng, 2 * BLOCK))
    kept.prefixes.flush()
    prompt = torch.cat([answer, _some(rng, 5)])
    assert torch.equal(_ask(kept.generate, prompt), _ask(model.generate, prompt))
    assert kept.counts.reused_tokens == len(answer) - 1 and kept.counts.prefixes.hits == 0
    kept.conversations.clear()
    assert torch.equal(_ask(kept.generate, prompt), _ask(model.generate, prompt))
    assert kept.counts.prefixes.hits == 1


def test_linear_attention_states_are_reused_in_memory_too(
    opened: Callable[..., KeptKeys], rng: np.random.Generator
) -> None:
    model = _model(_with_linear_attention)
    kept = KeptKeys(model, PLENTY)
    answer = _ask(kept.generate, _some(rng, 30))
    prompt = torch.cat([answer, _some(rng, 5)])
    other = torch.cat([answer[:20], _some(rng, 5)])  # a state cannot be rewound to there
    for tokens, reused in ((other, 0), (prompt, len(answer) - 1)):
        before = kept.counts.reused_tokens
        assert torch.equal(_ask(kept.generate, tokens), _ask(model.generate, tokens))
        assert kept.counts.reused_tokens - before == reused


def test_a_forward_that_fails_keeps_no_state(opened: Callable[..., KeptKeys], rng: np.random.Generator) -> None:
    model = _model(_with_linear_attention)
    kept = opened(model, memory=PLENTY)
    tokens = _some(rng, 2 * BLOCK)
    steps = []

    def fail(*_: Any) -> None:
        steps.append(1)
        if len(steps) == 3:
            raise RuntimeError("a disk fails")

    hook = model.model.layers[2].register_forward_pre_hook(
        fail
    )  # the earlier layers have stored this step's keys already
    with pytest.raises(RuntimeError, match="a disk fails"):
        _ask(kept.generate, tokens)
    hook.remove()
    kept.prefixes.flush()
    assert not kept.conversations
    assert torch.equal(_ask(kept.generate, tokens), _ask(model.generate, tokens))


def _changed_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1


def _changed_config(model: Any) -> None:
    model.config.rms_norm_eps *= 2


def _cast(model: Any) -> None:
    model.bfloat16()


def _adapted(model: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config)


@pytest.mark.parametrize("change", [_changed_weight, _changed_config, _cast, _adapted])
def test_keys_of_another_model_are_not_used(
    change: Callable[[Any], None], opened: Callable[..., KeptKeys], rng: np.random.Generator
) -> None:
    model = _model(_full)
    tokens = _some(rng, 2 * BLOCK)
    kept = opened(model)
    _ask(kept.generate, tokens)
    kept.prefixes.flush()
    other = copy.deepcopy(model)
    change(other)
    changed = opened(other)
    assert torch.equal(_ask(changed.generate, tokens), _ask(other.generate, tokens))
    assert changed.counts.prefixes.hits == 0
    _ask(opened(copy.deepcopy(model)).generate, tokens)
    again = opened(copy.deepcopy(model))
    _ask(again.generate, tokens)
    assert again.counts.prefixes.hits == 1


def test_a_changed_weight_invalidates_the_keys(opened: Callable[..., KeptKeys], rng: np.random.Generator) -> None:
    model = _model(_full)
    kept = opened(model)
    tokens = _some(rng, 2 * BLOCK)
    _ask(kept.generate, tokens)
    kept.prefixes.flush()
    _changed_weight(model)
    assert torch.equal(_ask(kept.generate, tokens), _ask(model.generate, tokens))
    assert kept.counts.prefixes.hits == 0


def test_keys_that_depend_on_later_tokens_are_refused() -> None:
    model = _model(_full)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="leave the prefix cache out"):
        PrefixCache(model, PLENTY)


def test_cache_prefixes_of_a_program(rng: np.random.Generator) -> None:
    model = _model(_full)
    install_caches(model)
    tokens = _some(rng, 2 * BLOCK + 7)[None]
    mask = torch.ones_like(tokens)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    expected = model.generate(tokens, **options)
    for hits in (0, 1):
        with torch_mesh.cache_prefixes(model, "100MB") as prefixes:
            assert torch.equal(model.generate(tokens, **options), expected)
            assert prefixes.counts.hits == hits
            alone = copy.deepcopy(model)
    assert torch.equal(alone.generate(tokens, **options), expected)
    assert torch.equal(model.generate(tokens, **options), expected) and prefixes.counts.hits == 1


def test_a_model_with_cached_prefixes_is_pickled_without_them(tmp_path: Path, rng: np.random.Generator) -> None:
    model = _model(_full)
    tokens = _some(rng, 2 * BLOCK)[None]
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, **options)
    with torch_mesh.cache_prefixes(model, "100MB") as prefixes:
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        for other in (loaded, copy.deepcopy(model)):
            assert other.generate.__self__ is other and other.generate.__func__ is type(model).generate
            assert torch.equal(other.generate(tokens, **options), expected)
        prefixes.flush()
        assert prefixes.counts.written_bytes == 0


def _doubled(model: PreTrainedModel, *inputs: Any, **options: Any) -> list[Any]:
    return [type(model).generate(model, *inputs, **options)] * 2


def test_a_generate_of_the_model_itself_is_used_and_restored(rng: np.random.Generator) -> None:
    model = _model(_full)
    tokens = _some(rng, 2 * BLOCK)[None]
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    own = vars(model)["generate"] = functools.partial(_doubled, model)
    with torch_mesh.cache_prefixes(model, "100MB"):
        assert len(model.generate(tokens, **options)) == len(model.generate(tokens.expand(2, -1), **options)) == 2
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other.generate.func is _doubled and other.generate.args[0] is other
        with torch_mesh.cache_prefixes(model, "100MB"):  # in place of the first
            assert len(model.generate(tokens, **options)) == 2
    assert vars(model)["generate"] is own
    with torch_mesh.cache_prefixes(model, "100MB") as prefixes:
        later = vars(model)["generate"] = functools.partial(_doubled, model)
        prefixes.close()
    assert vars(model)["generate"] is later


def test_cached_prefixes_take_the_arguments_of_generate(rng: np.random.Generator) -> None:
    model = _model(_full)
    tokens, config = _some(rng, 2 * BLOCK)[None], copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=3, do_sample=False, pad_token_id=0)
    banned: list[int] = []

    def ban(_: Tensor, scores: Tensor) -> Tensor:
        banned.append(int(scores.argmax()))
        return scores.index_fill(1, scores.argmax(1), -torch.inf)

    expected = type(model).generate(model, tokens, config, [ban])
    with torch_mesh.cache_prefixes(model) as prefixes:
        assert torch.equal(model.generate(tokens, config, [ban]), expected) and len(banned) == 6
        prefixes.flush()
        assert prefixes.counts.written_bytes > 0
        with pytest.raises(TypeError, match="multiple values"):
            model.generate(tokens, inputs=tokens)


def test_calls_without_cached_prefixes_run_at_the_same_time(rng: np.random.Generator) -> None:
    model = _model(_full)
    tokens = _some(rng, 2 * BLOCK)[None].expand(2, -1)
    meeting = threading.Barrier(2, timeout=60)

    def meet(_: Tensor, scores: Tensor) -> Tensor:
        meeting.wait()
        return scores

    with torch_mesh.cache_prefixes(model), ThreadPoolExecutor(2) as threads:
        options: dict[str, Any] = {"max_new_tokens": 1, "pad_token_id": 0, "logits_processor": [meet]}
        for answer in [threads.submit(model.generate, tokens, **options) for _ in range(2)]:
            answer.result()


def test_cache_prefixes_passes_unsupported_calls_on(rng: np.random.Generator) -> None:
    model = _model(_full)
    tokens = _some(rng, 2 * BLOCK)[None]
    with torch_mesh.cache_prefixes(model) as prefixes:
        for options in (
            {"input_ids": tokens.expand(2, -1)},
            {"input_ids": tokens, "num_beams": 2},
            {"input_ids": tokens, "assistant_early_exit": 1},  # calls generate from within
            {"inputs": tokens, "cache_implementation": "static"},
            {"inputs_embeds": model.get_input_embeddings()(tokens)},
            {"input_ids": tokens, "return_dict_in_generate": True, "output_logits": True},
        ):
            given: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, **options}
            found, expected = model.generate(**given), type(model).generate(model, **given)
            if isinstance(found, Tensor):
                assert torch.equal(found, expected)
            else:
                assert torch.equal(found.sequences, expected.sequences) and len(found.logits) == 3
        prefixes.flush()
    with pytest.raises(UnsupportedModelError, match="get_base_model"):
        torch_mesh.cache_prefixes(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="size"):
        torch_mesh.cache_prefixes(model, "much")


def test_a_server_gives_the_same_answers_after_a_restart(
    folder: Path, serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("openai")
    system = "Thou shalt answer in verses, as the prophets of old have done, and call tools. " * 12
    turns: list[dict[str, str]] = [{"role": "system", "content": system}]
    answers = []
    for start in range(3):
        given = {"prefix_cache": "1GiB"} if start else {}
        server = serving(folder, torch_mesh.MeshConfig(resident=0.3), 0, log_level="error", **given)
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        pairs = []
        for question in ("Who art thou?", "And whence comest thou?"):
            messages = [*turns, {"role": "user", "content": question}]
            found = client.chat.completions.create(model=server.model, messages=messages, max_tokens=12, temperature=0)
            pairs.append((found.choices[0].message.content, found.usage.prompt_tokens_details.cached_tokens))
            if given:
                server.kept.prefixes.flush()
        answers.append(pairs)
        counts = urllib.request.urlopen(f"{server.address}/metrics").read().decode()
        server.stop()
    without, first, second = ([text for text, _ in pairs] for pairs in answers)
    # Rows computed together round differently, which may decide a near tie.
    assert [text[:8] for text in without] == [text[:8] for text in first] == [text[:8] for text in second]
    assert first[1] == second[1]
    assert answers[0][0][1] == answers[0][1][1] == 0 == answers[1][0][1]
    assert answers[1][1][1] > 100  # the second question has the same prefix
    assert answers[2][0][1] > 100 and "torch_mesh_prefix_hits_total 2.0" in counts
    assert "torch_mesh_prefix_read_bytes_total" in counts


def test_a_server_that_cannot_start_leaves_no_thread(
    folder: Path, serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> NoReturn:
        raise OSError("no application")

    monkeypatch.setattr("torch_mesh.serving.app.build_app", fail)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no application"):
        serving(folder, torch_mesh.MeshConfig(resident=0.3), prefix_cache="1GiB")
    for thread in set(threading.enumerate()) - before:
        thread.join(60 if thread.name.startswith("torch-mesh") else 0)
        assert not (thread.name.startswith("torch-mesh") and thread.is_alive())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": True}, "--compile"),
        ({"continuous_batching": True}, "--continuous-batching"),
        ({"prefix_cache": "some"}, "Or give off"),
    ],
)
def test_options_that_exclude_the_prefix_cache_are_refused(
    folder: Path, serving: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        serving(folder, torch_mesh.MeshConfig(resident=0.3), **{"prefix_cache": "1GiB", **options})
