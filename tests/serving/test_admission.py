"""Admission: the predicted memory of a sequence is what it takes, and requests that are said to fit are accepted."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
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
from torch_mesh import MeshConfig
from torch_mesh.hf.generation_compat import CACHE_NAME
from torch_mesh.serving import admission
from torch_mesh.serving.admission import Admission, find_needs
from torch_mesh.serving.errors import RequestTooLongError, StoppingError
from torch_mesh.serving.kept_keys import KeptKeys
from torch_mesh.serving.service import Service

POSITIONS = 300
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}


def _qwen3() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, num_hidden_layers=2, num_experts=4)).bfloat16()


def _gpt_oss() -> PreTrainedModel:
    sizes = {name: value for name, value in _SIZES.items() if name != "moe_intermediate_size"}
    return GptOssForCausalLM(
        GptOssConfig(**sizes, num_hidden_layers=2, sliding_window=16, num_local_experts=4)
    ).bfloat16()


def _deepseek() -> PreTrainedModel:
    heads = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 16, "qk_nope_head_dim": 12, "v_head_dim": 20}
    sizes = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"}
    config = DeepseekV3Config(
        **sizes, **heads, num_key_value_heads=4, num_hidden_layers=2, n_routed_experts=4, n_group=1, topk_group=1
    )
    return DeepseekV3ForCausalLM(config).bfloat16()


def _qwen3_next() -> PreTrainedModel:
    linear = {f"linear_{which}_head_dim": 16 for which in ("key", "value")} | {
        f"linear_num_{which}_heads": 2 for which in ("key", "value")
    }
    layer_types = ["linear_attention", "full_attention"]
    config = Qwen3NextConfig(**_SIZES, **linear, num_hidden_layers=2, num_experts=4, layer_types=layer_types)
    return Qwen3NextForCausalLM(config).bfloat16()


def _held(cache: DynamicCache) -> int:
    return sum(sum(admission._sizes(layer)) for layer in cache.layers)


@pytest.mark.parametrize(
    "make", [_qwen3, _gpt_oss, *(pytest.param(make, marks=pytest.mark.slow) for make in (_deepseek, _qwen3_next))]
)
def test_the_predicted_memory_of_a_sequence_is_what_it_takes(
    make: Callable[[], PreTrainedModel], rng: np.random.Generator
) -> None:
    model = make().eval()
    computed = []
    hook = model.register_forward_hook(lambda _, __, output: computed.append(output.logits))
    needs = find_needs(model, keeps_windows=False)
    hook.remove()
    assert all(isinstance(logits, FakeTensor) for logits in computed)  # computed on fake tensors, without experts
    for _ in range(2):
        tokens = int(rng.integers(20, 70))
        with torch.no_grad():
            made = model(input_ids=torch.from_numpy(rng.integers(1, 97, (1, tokens))), use_cache=True)
        # In the cache a window is one token shorter than in the config, and has an extra number.
        slack = sum(layer.per_token + 8 for layer in needs.layers if layer.window is not None)
        assert _held(made.past_key_values) <= needs.cache(tokens) <= _held(made.past_key_values) + slack
    assert needs.positions == POSITIONS


def test_layers_that_keep_tokens_outside_their_window_count_them() -> None:
    model = _gpt_oss()
    kept, given_up = (find_needs(model, keeps_windows=keeps) for keeps in (True, False))
    assert kept.cache(16) == given_up.cache(16) and kept.cache(100) > given_up.cache(100)


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the number of bytes that are left for keys and values."""
    return lambda free: monkeypatch.setattr(admission, "left_bytes", lambda: admission.RESERVE_BYTES + free)


@pytest.mark.parametrize("make", [_qwen3, _gpt_oss])
def test_sizes_that_an_error_suggests_are_accepted(
    make: Callable[[], PreTrainedModel], short_of_memory: Callable[[int], None], rng: np.random.Generator
) -> None:
    model = make()
    door = Admission(model, find_needs(model, keeps_windows=True))
    prompt, new = (int(each) for each in rng.integers(50, 150, 2))
    needed = door.needs.peak(prompt, prompt, prompt + new)
    short_of_memory(needed)
    door.check(prompt, new, known=0, held=0)
    short_of_memory(needed - 1)
    door.check(prompt, new, known=0, held=1)
    with pytest.raises(RequestTooLongError, match=f"{prompt} tokens and {new} to generate.*--resident") as error:
        door.check(prompt, new, known=0, held=0)
    fits = int(re.findall(r"at most (\d+) new tokens", str(error.value))[0])
    assert error.value.room == fits
    door.check(prompt, fits, known=0, held=0)
    with pytest.raises(RequestTooLongError):
        door.check(prompt, fits + 1, known=0, held=0)
    known = prompt // 2  # only the other half is computed
    short_of_memory(door.needs.peak(prompt - known, prompt, prompt + new))
    door.check(prompt, new, known=known, held=0)
    with pytest.raises(RequestTooLongError):
        door.check(prompt, new, known=known - 1, held=0)
    short_of_memory(door.needs.peak(prompt, prompt, prompt) - 1)
    with pytest.raises(RequestTooLongError, match="A prompt of ") as error:
        door.check(prompt, 1, known=0, held=0)
    fits = int(re.findall(r"prompt of (\d+) tokens", str(error.value))[0])
    assert 0 < fits < prompt
    door.check(fits, 1, known=0, held=0)
    door.check(prompt, 1, known=prompt - fits // 2, held=needed)


def test_compiled_steps_count_all_of_their_static_cache(short_of_memory: Callable[[int], None]) -> None:
    model = torch_mesh.compile(_qwen3())
    door = Admission(model, find_needs(model, keeps_windows=False))
    for prompt, length in ((100, 128), (140, 256), (5, 256)):  # no shorter than the longest so far
        needed = door.needs.peak(prompt, prompt, length)
        short_of_memory(needed)
        door.check(prompt, 1, known=0, held=0)
        short_of_memory(needed - 1)
        with pytest.raises(RequestTooLongError):
            door.check(prompt, 1, known=0, held=0)
        ids = torch.ones(1, prompt, dtype=torch.long)
        made = model.generate(ids, max_new_tokens=1, return_dict_in_generate=True)  # compiles nothing
        assert made[CACHE_NAME].layers[0].keys.shape[-2] == length


def test_positions_are_limited_by_the_model(short_of_memory: Callable[[int], None]) -> None:
    model = _qwen3()
    door = Admission(model, find_needs(model, keeps_windows=True))
    short_of_memory(2**40)
    door.check(POSITIONS - 5, 5, known=0, held=0)
    with pytest.raises(RequestTooLongError, match="at most 5 new tokens"):
        door.check(POSITIONS - 5, 6, known=0, held=0)
    with pytest.raises(RequestTooLongError, match="shorten the prompt"):
        door.check(POSITIONS, 1, known=0, held=0)


def test_kept_conversations_are_dropped_before_a_request_is_refused(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    model = _qwen3().eval()
    kept = KeptKeys(model, 2**30, Admission(model, find_needs(model, keeps_windows=True)))
    config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)

    def ask(tokens: torch.Tensor) -> torch.Tensor:
        kept.check(tokens, 3)
        return kept.generate(input_ids=tokens[None], generation_config=config)[0]

    # The memory of conversations is free only after they are dropped.
    total = 0
    monkeypatch.setattr(
        admission,
        "left_bytes",
        lambda: admission.RESERVE_BYTES + total - sum(each.nbytes for each in kept.conversations),
    )
    prompts = [torch.from_numpy(rng.integers(2, 97, 60)) for _ in range(3)]
    for token, prompt in enumerate(prompts, start=2):
        prompt[0] = token  # no prompt of this test shares a prefix with another
    needed = kept.admission.needs.peak(60, 60, 63)
    total = needed
    ask(prompts[0])
    total += kept.conversations[0].nbytes
    for tokens in prompts:
        assert torch.equal(ask(tokens), model.generate(input_ids=tokens[None], generation_config=config)[0])
    assert [each.tokens[:60].tolist() for each in kept.conversations] == [each.tolist() for each in prompts[1:]]
    total = needed
    with pytest.raises(RequestTooLongError):
        ask(torch.cat([torch.ones(1, dtype=torch.long), torch.from_numpy(rng.integers(1, 97, 249))]))
    assert len(kept.conversations) == 2  # nothing is dropped for a request that would not fit anyway
    total = needed
    longer = GenerationConfig(max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=None)
    short = kept.generate(may_shorten=True, input_ids=prompts[0][None], generation_config=longer)
    assert short.shape[-1] == 60 + longer.max_new_tokens == 63
    total = needed - 1
    with pytest.raises(RequestTooLongError):  # memory has shrunk since the request was admitted
        kept.generate(input_ids=torch.ones(1, 60, dtype=torch.long), generation_config=config)
    assert not kept.conversations and kept.counts.kept_bytes == 0
    total = needed
    ask(prompts[0])


def test_scoring_a_prompt_evicts_conversations_and_counts_its_logits(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    model = _qwen3().eval()
    kept = KeptKeys(model, 2**30, Admission(model, find_needs(model, keeps_windows=True)))
    service = Service("a", model, None, SimpleNamespace(kept=kept))  # type: ignore[arg-type]
    config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    inputs = {"input_ids": torch.from_numpy(rng.integers(2, 97, (1, 60)))}
    # Beside the keys: logits in bf16, as floats, and their log-probabilities.
    needed = kept.admission.needs.peak(60, 60, 60) + 59 * 97 * (2 + 4 + 4)
    total = 2**30
    monkeypatch.setattr(
        admission,
        "left_bytes",
        lambda: admission.RESERVE_BYTES + total - sum(each.nbytes for each in kept.conversations),
    )
    for _ in range(2):
        kept.generate(input_ids=torch.from_numpy(rng.integers(2, 97, (1, 60))), generation_config=config)
    alone, after_one = needed, needed + kept.conversations[1].nbytes
    for total, left in ((after_one, 1), (alone, 0)):
        service.check_score(inputs)
        assert len(service.score(inputs, 1)) == 60
        assert len(kept.conversations) == left and kept.counts.kept_bytes == total - needed
    total = needed - 1
    for refused in (lambda: service.check_score(inputs), lambda: service.score(inputs, 1)):
        with pytest.raises(RequestTooLongError):
            refused()


@pytest.mark.parametrize("batching", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_server_refuses_requests_that_do_not_fit_as_openai_does(
    batching: bool, serving: Callable[..., Any], folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("openai")
    server = serving(folder, MeshConfig(resident=0.25), continuous_batching=batching)
    ask = {"model": server.model, "prompt": "In the beginning", "temperature": 0}
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:

        def refused(**more: Any) -> str:
            with pytest.raises(openai.BadRequestError) as error:
                client.completions.create(**ask | more)
            assert error.value.code == "context_length_exceeded" and error.value.type == "invalid_request_error"
            return str(error.value.body["message"])

        if batching:  # the number of blocks is what fits when the first request comes
            # A logged error has frames, through which pytest would keep the model alive.
            monkeypatch.setattr(logging.getLogger("ContinuousBatchingLogger"), "disabled", True)
            left = admission.RESERVE_BYTES
            monkeypatch.setattr("torch_mesh.serving.batches.left_bytes", lambda: left)
            with pytest.raises(openai.InternalServerError, match="--cb-max-batch-tokens") as error:
                client.completions.create(**ask, max_tokens=3)
            assert error.value.status_code == 503
            left += 500 << 20
        else:
            assert client.completions.create(**ask, max_tokens=3).usage.completion_tokens == 3
            needs = server.kept.admission.needs
            monkeypatch.setattr(admission, "left_bytes", lambda: admission.RESERVE_BYTES + needs.peak(9, 9, 500))
            assert "--resident" in refused(max_tokens=1500)
            long = {"model": server.model, "prompt": [5] * 498, "temperature": 0}
            with monkeypatch.context() as short:
                short.setattr(admission, "left_bytes", lambda: admission.RESERVE_BYTES + needs.peak(498, 498, 500))
                assert client.completions.create(**long).usage.completion_tokens <= 2  # and without a limit
            with pytest.raises(openai.BadRequestError, match="1 to generate.*shorten it") as error:
                client.completions.create(**long | {"prompt": [5] * 900})
            assert error.value.param == "prompt"
            with pytest.raises(openai.BadRequestError, match="1 to generate.*shorten it") as error:
                client.completions.create(**long | {"prompt": [5] * 900}, max_tokens=1)
            assert error.value.param == "prompt"
            with pytest.raises(openai.BadRequestError, match="1,500 to generate") as error:
                client.completions.create(**ask, extra_body={"generation_config": '{"max_new_tokens": 1500}'})
            assert error.value.param == "generation_config"
            assert "bytes of memory" in refused(max_tokens=1500, stream=True)
            chat = [{"role": "user", "content": "In the beginning"}]
            for field in ("max_tokens", "max_completion_tokens"):
                with pytest.raises(openai.BadRequestError, match="new tokens") as error:
                    client.chat.completions.create(model=server.model, messages=chat, **{field: 1500})
                assert error.value.param == field
            with pytest.raises(openai.BadRequestError, match="new tokens") as error:
                client.responses.create(model=server.model, input="In the beginning", max_output_tokens=1500)
            assert error.value.param == "max_output_tokens"
        configs = {
            '{"max_new_tokens": 2.5}': "1 or more",
            '{"max_new_tokens": 2, "renormalize_logits": "maybe"}': "True or False",
            '{"max_new_tokens": 2, "top_k": -1}': "0 or more",
        }
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"max_tokens": 0}, "1 or more"),
            ({"max_tokens": -5, "stream": True}, "0 or more"),
            ({"max_tokens": 2, "top_p": 7}, "from 0 to 1"),
            *(({"extra_body": {"generation_config": config}}, allowed) for config, allowed in configs.items()),
        ]
        for more, allowed in wrong:
            with pytest.raises(openai.BadRequestError, match=allowed) as error:
                client.completions.create(**ask | more)
            assert error.value.code == "invalid_value"
        assert "(max_position_embeddings)" in refused(max_tokens=3000)
        assert "shorten the prompt" in refused(prompt="begin " * 2500, max_tokens=1, stream=True)
        assert client.completions.create(**ask, max_tokens=3).usage.completion_tokens == 3
        if batching:
            cache = server.engine.manager.batch_processor.cache
            tensors = [cache.cache_tensor] if hasattr(cache, "cache_tensor") else [*cache.key_cache, *cache.value_cache]
            assert sum(tensor.numel() for tensor in tensors) < 500 << 20
    server.stop()


def test_continuous_batching_goes_on_after_requests_that_exceed_its_blocks(
    serving: Callable[..., Any], folder: Any
) -> None:
    openai = pytest.importorskip("openai")
    server = serving(folder, MeshConfig(resident=0.25), continuous_batching=True, cb_num_blocks=2)
    ask = {"model": server.model, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for more in ({"prompt": "a", "max_tokens": 600}, {"prompt": "begin " * 600, "max_tokens": 1, "stream": True}):
            with pytest.raises(openai.BadRequestError, match="--cb-num-blocks"):
                client.completions.create(**ask | more)
        assert client.completions.create(**ask, prompt="a", max_tokens=3).usage.completion_tokens == 3
        assert client.completions.create(**ask, prompt=[5] * 500).usage.completion_tokens <= 12  # without a limit
        # Masks have an element per pair of batch tokens, and are filled whenever batching starts.
        assert server.engine.manager.batch_processor.max_batch_tokens <= 8192
        server.engine.manager.stop()  # as when the server ends
        with pytest.raises(openai.InternalServerError) as error:
            client.completions.create(**ask, prompt="a", max_tokens=3)
        assert error.value.status_code == 503 and "has ended" in error.value.response.text
    server.stop()


def test_waiting_for_blocks_ends_when_batching_has_ended() -> None:
    pytest.importorskip("fastapi")
    from torch_mesh.serving.batches import BatchesEndedError, tokens_in_blocks

    def end() -> None:
        raise AssertionError("there is nothing to end")

    batching: Any = SimpleNamespace(
        batch_processor=None, background_thread_status=SimpleNamespace(fatal_error=None), is_running=lambda: False
    )
    with pytest.raises(BatchesEndedError, match="has ended"):
        tokens_in_blocks(batching, lambda: False, end)
    batching.is_running = lambda: True
    with pytest.raises(StoppingError):
        tokens_in_blocks(batching, lambda: True, end)
    batching.batch_processor = SimpleNamespace(cache=SimpleNamespace(num_blocks=3))
    for config in ({"page_size": 16, "block_size": None}, {"block_size": 16}):  # transformers 5.23, and 5.17
        batching.continuous_batching_config = SimpleNamespace(**config)
        assert tokens_in_blocks(batching, lambda: False, end) == 48
