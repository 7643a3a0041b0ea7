"""Rejected drafts are removed from caches: windows, states of linear attention, static caches."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import pickle
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from drafted import (
    NEXT,
    OSS,
    PROMPTS,
    QWEN,
    Always,
    KeptTokens,
    Streamed,
    always,
    check_tokens,
    generate,
    generate_plainly,
    knowing,
    patched,
    random_inputs,
    rows_are_exact,
    spread_model,
)
from pairs import each_once_quick
from torch._dynamo.utils import counters
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

import torch_mesh
from torch_mesh.serving.kept_keys import KeptKeys
from torch_mesh.speculation import linear_attention
from torch_mesh.speculation.decoding import Speculation
from torch_mesh.speculation.drafter import Drafter
from torch_mesh.speculation.rewinding import Rewinding
from torch_mesh.statistics.speculated import DraftedCounters

LINEAR = [
    NEXT,
    "Qwen3_5MoeExperts",
    "NemotronHExperts",
    "JambaExperts",
    "GraniteMoeHybridExperts",
    "KimiLinearExperts",
    "Lfm2MoeExperts",
    "BailingHybridExperts",
]


class _Gone(Streamed):
    """A client that disconnects while a draft is verified."""

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.parts) == 20:
            raise ConnectionResetError


@pytest.mark.parametrize("static", [False, True])
def test_an_interrupted_text_leaves_a_cache_of_its_tokens(
    original: PreTrainedModel, tokenizer: Any, static: bool
) -> None:
    model, streamed = patched(original), _Gone()
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    kind = functools.partial(StaticCache, max_cache_len=400) if static else DynamicCache
    plain, cache = generate_plainly(model, inputs, past_key_values=kind(config=model.config)), kind(config=model.config)
    how = {"custom_generate": knowing(plain.sequences, 7), "streamer": streamed, "past_key_values": cache}
    with pytest.raises(ConnectionResetError):
        generate(model, inputs, **how)
    tokens = torch.tensor([[token for part in streamed.parts for token in part]])
    assert int(cache.get_seq_length()) == tokens.shape[1] - 1 == inputs["input_ids"].shape[1] + 18
    rest = generate(model, {"input_ids": tokens}, past_key_values=cache, max_new_tokens=60 - 19)
    check_tokens(model, inputs, plain, rest)


@pytest.mark.parametrize(("length", "drafted"), each_once_quick([40, 13, 5], [15, 3]))
def test_rejected_drafts_are_removed_from_sliding_windows(length: int, drafted: int) -> None:
    """The tiny gpt-oss has a window of 16 tokens."""
    model = torch_mesh.patch(spread_model(OSS), resident=0.5)
    inputs = random_inputs(length)
    plain = generate_plainly(model, inputs, eos_token_id=None)
    cache = DynamicCache(config=model.config)
    speculation = knowing(plain.sequences, drafted)
    found = generate(model, inputs, eos_token_id=None, custom_generate=speculation, past_key_values=cache)
    check_tokens(model, inputs, plain, found)
    assert sum(speculation._controller.accepted) > 0
    windows = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    assert windows and all(not layer.record_past and layer.keys.shape[-2] == 15 for layer in windows)


def _same_states(found: Any, plain: Any) -> None:
    """Check that the states are equal up to rounding.

    Where rounding changes a bf16 input of the experts, a state moves by 0.001 of its norm. A token too many or too few
    moves it by its whole norm.
    """
    for one, other in zip(_states(found), _states(plain), strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def _states(cache: Any) -> list[torch.Tensor]:
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    both = (states for layer in layers for states in (layer.conv_states, layer.recurrent_states))
    return [state for states in both for state in states.values() if state is not None]


# For each kind of mixer, one case in the quick tests whose drafts are accepted in part.
_MIXERS = (NEXT, "NemotronHExperts", "KimiLinearExperts", "Lfm2MoeExperts", "BailingHybridExperts")
_LENGTHS = [
    pytest.param(name, *lengths, marks=[] if name in _MIXERS and lengths == (20, 7) else [pytest.mark.thorough])
    for name in LINEAR
    for lengths in ((2, 3), (20, 7), (20, 15))
]


@pytest.mark.parametrize(("name", "length", "drafted"), _LENGTHS)
def test_rejected_drafts_are_removed_from_linear_attention_states(name: str, length: int, drafted: int) -> None:
    """The final state is that of plain decoding, up to rounding: in fp32 torch's products of several rows have other
    bits."""
    model = torch_mesh.patch(spread_model(name), resident=0.5)
    inputs = random_inputs(length)
    plain = generate_plainly(model, inputs, eos_token_id=None)
    speculation, cache = knowing(plain.sequences, drafted), DynamicCache(config=model.config)
    found = generate(model, inputs, eos_token_id=None, custom_generate=speculation, past_key_values=cache)
    check_tokens(model, inputs, plain, found)
    accepted = speculation._controller.accepted
    assert sum(accepted) > 0 and min(accepted) < drafted, "nothing was taken back"
    assert _states(cache) and cache.get_seq_length() == plain.past_key_values.get_seq_length()
    if torch.equal(found, plain.sequences):
        _same_states(cache, plain.past_key_values)


def test_unpatch_restores_the_classes_of_mixers() -> None:
    model = torch_mesh.patch(spread_model(NEXT), resident=0.5)
    before = [type(module) for module in model.modules()]
    inputs = random_inputs(20)
    expected = generate(model, inputs, eos_token_id=None)
    generate(model, inputs, eos_token_id=None, custom_generate=knowing(expected, 7))
    mixers = [module for module in model.modules() if isinstance(module, linear_attention.SteppedMixer)]
    assert len(mixers) == 2 and {type(mixer).__name__ for mixer in mixers} == {"Qwen3NextGatedDeltaNet"}
    assert torch.equal(generate(model, inputs, eos_token_id=None), expected)
    for made in (copy.deepcopy(mixers[0]), pickle.loads(pickle.dumps(mixers[0]))):
        assert type(made) is type(mixers[0]).__bases__[1] and made.layer_idx == mixers[0].layer_idx
    torch_mesh.unpatch(model, lossy=True)
    assert not any(isinstance(module, linear_attention.SteppedMixer) for module in model.modules())
    assert len(before) == len(list(model.modules()))


def test_concurrent_texts_have_separate_states() -> None:
    """Both use the same mixers, and one may begin or end while the other computes."""
    model = torch_mesh.patch(spread_model(NEXT), resident=0.5)
    prompts = [random_inputs(20), random_inputs(9)]
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = [model.generate(**inputs, **options) for inputs in prompts]
    with ThreadPoolExecutor() as threads:
        found = threads.map(
            lambda inputs, answer: model.generate(**inputs, **options, custom_generate=knowing(answer, 7)),
            prompts,
            plain,
        )
        for answer, tokens, inputs in zip(plain, found, prompts, strict=True):
            assert torch.equal(answer, tokens) or not rows_are_exact(model, inputs["input_ids"])


@pytest.mark.parametrize("failing", [0, -1])
def test_a_failed_forward_leaves_the_states_before_it(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_mesh.patch(spread_model(NEXT), resident=0.5)
    inputs = random_inputs(20)
    plain = generate_plainly(model, inputs, eos_token_id=None)
    experts = [module for module in model.modules() if hasattr(module, "_mesh_pool")][failing]
    forward, seen = type(experts).forward, KeptTokens()

    def fails(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if self is experts and len(x) == 8 and seen.count > 25:
            raise torch_mesh.ReadError("the disk is gone")
        return forward(self, x, *rest)

    cache = DynamicCache(config=model.config)
    with monkeypatch.context() as broken, pytest.raises(torch_mesh.ReadError):
        broken.setattr(type(experts), "forward", fails)
        generate(
            model,
            inputs,
            eos_token_id=None,
            custom_generate=knowing(plain.sequences, 7),
            past_key_values=cache,
            stopping_criteria=StoppingCriteriaList([seen]),
        )
    tokens = {"input_ids": plain.sequences[:, : seen.count]}
    rest = generate(
        model, tokens, past_key_values=cache, eos_token_id=None, max_new_tokens=plain.sequences.shape[1] - seen.count
    )
    check_tokens(model, inputs, plain, rest)


def test_states_that_cannot_be_copied_leave_the_cache_of_the_tokens_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_mesh.patch(spread_model(NEXT), resident=0.5)
    inputs = random_inputs(20)
    plain = generate_plainly(model, inputs, eos_token_id=None)
    cache, seen, copied = DynamicCache(config=model.config), KeptTokens(), linear_attention._copied
    last = cache.layers[-1]
    assert isinstance(last, LinearAttentionLayer) and any(isinstance(layer, DynamicLayer) for layer in cache.layers)

    def fails(layer: Any) -> Any:
        if layer is last:
            raise MemoryError("no memory for states")
        return copied(layer)

    with monkeypatch.context() as broken, pytest.raises(MemoryError, match="no memory for states"):
        broken.setattr(linear_attention, "_copied", fails)
        speculation, criteria = knowing(plain.sequences, 7), StoppingCriteriaList([seen])
        how = {"custom_generate": speculation, "past_key_values": cache, "stopping_criteria": criteria}
        generate(model, inputs, eos_token_id=None, **how)
    assert int(cache.get_seq_length()) == seen.count - 1
    tokens, left = {"input_ids": plain.sequences[:, : seen.count]}, plain.sequences.shape[1] - seen.count
    check_tokens(
        model, inputs, plain, generate(model, tokens, past_key_values=cache, eos_token_id=None, max_new_tokens=left)
    )


@pytest.mark.parametrize("drafted", [3, 15])
def test_rejected_drafts_are_removed_from_a_cache_of_linear_attention_alone(drafted: int) -> None:
    """Such a cache does not count its tokens."""
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    model = Mamba2ForCausalLM(Mamba2Config(vocab_size=100, num_hidden_layers=2, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.size(-1) ** -0.5 * 2)
    inputs = random_inputs(20)
    plain = generate_plainly(model, inputs, eos_token_id=None)
    speculation = knowing(plain.sequences, drafted)
    assert torch.equal(generate(model, inputs, eos_token_id=None, custom_generate=speculation), plain.sequences)
    accepted = speculation._controller.accepted
    assert sum(accepted) > 0 and min(accepted) < drafted, "nothing was taken back"


class _Breaks(LogitsProcessor):
    """Raises at a given length."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.at:
            raise ZeroDivisionError("a processor that breaks")
        return scores


@pytest.mark.parametrize("drafted", [pytest.param(0, marks=pytest.mark.thorough), 7])
@pytest.mark.parametrize("name", [NEXT, QWEN])
def test_a_failing_logits_processor_leaves_a_cache_of_the_tokens_so_far(name: str, drafted: int) -> None:
    """The cache is that of plain decoding: its keys and states include the last token."""
    model = torch_mesh.patch(spread_model(name), resident=0.5)
    inputs = random_inputs(20)
    answer = generate(model, inputs, eos_token_id=None)
    for at in range(28, 36):  # after a prompt of 20 tokens
        caches = []
        for how in ({}, {"custom_generate": knowing(answer, drafted)}):
            cache = DynamicCache(config=model.config)
            options = {"past_key_values": cache, "logits_processor": LogitsProcessorList([_Breaks(at)])}
            with pytest.raises(ZeroDivisionError):
                generate(model, inputs, eos_token_id=None, **options, **how)
            caches.append(cache)
        plain, found = caches
        assert found.get_seq_length() == plain.get_seq_length() == at
        _same_states(found, plain)


def test_rejected_drafts_are_removed_from_a_cache_that_records_states() -> None:
    """transformers' own assisted decoding leaves such caches, in which convolution states grow with each token."""
    model = torch_mesh.patch(spread_model(NEXT), resident=0.5)
    inputs = random_inputs(20)
    plain = generate_plainly(model, inputs, eos_token_id=None)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    speculation = knowing(plain.sequences, 7)
    found = generate(model, inputs, eos_token_id=None, custom_generate=speculation, past_key_values=cache)
    check_tokens(model, inputs, plain, found)
    accepted = speculation._controller.accepted
    assert sum(accepted) > 0 and min(accepted) < 7, "nothing was taken back"
    assert all(layer.record_past for layer in cache.layers if isinstance(layer, LinearAttentionLayer))


def test_kept_keys_of_a_server_survive_rejected_drafts() -> None:
    """For a layer with a window the server keeps more keys than the window, so that it can go back to where two
    requests differ."""
    original = spread_model(OSS)
    model = torch_mesh.patch(copy.deepcopy(original), resident=0.5)
    speculating = torch_mesh.patch(original, resident=0.5, speculation="lookup")
    config = GenerationConfig(max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=None)
    kept, plainly = KeptKeys(speculating, limit=1 << 30), KeptKeys(model, limit=1 << 30)
    prompt = random_inputs(40)["input_ids"]
    for turn in range(2):
        expected = plainly.generate(input_ids=prompt, generation_config=config)
        speculating._mesh_speculation = knowing(expected, 7)
        found = kept.generate(input_ids=prompt, generation_config=config)
        both = min(found.shape[1], expected.shape[1])
        same = int((found[:, :both] == expected[:, :both]).int().cumprod(1).sum())
        if same < both:  # rounding may decide between two nearly equal logits
            with torch.no_grad():
                two = model(input_ids=expected[:, :same]).logits[0, -1].topk(2).values
            assert two[0] - two[1] <= two[0].abs() / 16
        else:
            assert found.shape == expected.shape
        windows = [
            layer for layer in kept.conversations[-1].cache.layers if isinstance(layer, DynamicSlidingWindowLayer)
        ]
        assert windows and (turn > 0 or all(layer.keys.shape[-2] == found.shape[1] - 1 for layer in windows))
        assert turn == 0 or kept.counts.reused_tokens == prompt.shape[1] - 14
        others = random_inputs(14)["input_ids"]
        others[:, 0] = found[:, -9] ^ 1  # the texts differ from here
        prompt = torch.cat([found[:, :-9], others], dim=1)
    assert torch_mesh.stats(speculating).speculation.accepted > 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.thorough
@pytest.mark.parametrize("name", [QWEN, OSS])
def test_compiled_steps_stay_compiled(name: str) -> None:
    """There is one graph for each number of drafted tokens."""
    model = torch_mesh.compile(torch_mesh.patch(spread_model(name), resident=0.5), backend="eager", fullgraph=True)
    seen = {0}
    for length, drafted in [(5, 3), (20, 3), (30, 7), (12, 7), (21, 15), (9, 3)]:
        inputs = random_inputs(length)
        plain = generate_plainly(model, inputs, eos_token_id=None)
        speculation = knowing(plain.sequences, drafted)
        check_tokens(model, inputs, plain, generate(model, inputs, eos_token_id=None, custom_generate=speculation))
        assert sum(speculation._controller.accepted) > 0
        seen.add(drafted)
        assert counters["stats"]["unique_graphs"] == len(seen) and not counters["graph_break"]


@pytest.mark.usefixtures("fresh_dynamo")
def test_forwards_that_compile_for_a_longer_cache_are_not_timed() -> None:
    """The first layer of gpt-oss has a sliding window, whose length is constant."""
    model = torch_mesh.compile(torch_mesh.patch(spread_model(OSS), resident=0.5), backend="eager")
    speculation = Speculation(Always(3), lambda tokens: _Constant())
    before: dict[int, DraftedCounters] = {}
    for length in (20, 120):  # with 60 new tokens, caches of 128 and 256 tokens
        generate(model, random_inputs(length), eos_token_id=None, custom_generate=speculation)
        counted = dict(torch_mesh.stats(model).speculation.lengths)
        assert counted[3].forwards > before.get(3, DraftedCounters()).forwards + 1
        for drafted, now in counted.items():
            old = before.get(drafted, DraftedCounters())
            assert now.timed - old.timed == max(now.forwards - old.forwards - 1, 0)
        before = counted


class _Constant(Drafter):
    def extend(self, tokens: Iterable[int]) -> None:
        pass

    def draft(self, length: int) -> list[int]:
        return [3] * length


def test_rejected_drafts_are_removed_from_a_static_cache(original: PreTrainedModel, tokenizer: Any) -> None:
    model = patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    plain = generate(model, inputs, cache_implementation="static")
    assert torch.equal(plain, generate(model, inputs, cache_implementation="static", custom_generate=always(15)))
    cache = StaticCache(
        config=model.config, max_cache_len=inputs["input_ids"].shape[1] + 59
    )  # exactly as long as needed
    assert torch.equal(plain, generate(model, inputs, past_key_values=cache, custom_generate=always(15)))
    assert int(cache.get_seq_length()) == plain.shape[1] - 1


@pytest.mark.parametrize("by_itself", [False, True])
def test_new_tokens_after_a_padded_cache_speculate(by_itself: bool) -> None:
    """As in transformers, the inputs are the tokens that the cache lacks, with a mask for all tokens."""
    model = spread_model(QWEN)
    plain = torch_mesh.patch(copy.deepcopy(model), resident=0.5, attention="mesh")
    speculating = torch_mesh.patch(model, resident=0.5, attention="mesh", speculation="lookup" if by_itself else "off")
    how = {} if by_itself else {"custom_generate": torch_mesh.speculate()}
    ids, mask = torch.randint(3, 100, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    answers = []
    for each, options in ((plain, {}), (speculating, how)):
        cache = DynamicCache(config=each.config)
        with torch.no_grad():
            each(input_ids=ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache)
        inputs = {"input_ids": ids[:, 8:], "attention_mask": mask, "past_key_values": cache}
        answers.append(generate(each, inputs, eos_token_id=None, max_new_tokens=30, **options))
    assert torch.equal(*answers)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_failed_forward_leaves_no_drafted_tokens(
    original: PreTrainedModel, tokenizer: Any, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the last experts fail, every layer already has the drafted tokens. Then all layers are rewound."""
    model = patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    answer = generate(model, inputs)
    keys: Any = (
        DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=400)
    )
    last = [module for module in model.modules() if hasattr(module, "_mesh_pool")][-1]
    forward, rows = type(last).forward, []

    def fails(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if self is last:
            rows.append(len(x))
            if rows[-1] == 8 and len(rows) > 3:
                raise torch_mesh.ReadError("the disk is gone")
        return forward(self, x, *rest)

    monkeypatch.setattr(type(last), "forward", fails)
    seen = KeptTokens()
    with pytest.raises(torch_mesh.ReadError):
        generate(
            model,
            inputs,
            custom_generate=knowing(answer, 7),
            past_key_values=keys,
            stopping_criteria=StoppingCriteriaList([seen]),
        )
    assert {int(layer.get_seq_length()) for layer in keys.layers} == {seen.count - 1}


def test_rewinding_works_without_cache_classes_of_newer_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BaseQuantizedLayer", "DummyLayer"):
        monkeypatch.delattr(f"transformers.cache_utils.{name}", raising=False)
    source = importlib.util.find_spec("torch_mesh.speculation.rewinding")
    assert source is not None and source.loader is not None
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    assert module.rewind_unsupported_reason(torch.nn.Module(), DynamicCache()) == ""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0)
    module.Rewinding(torch.nn.Module(), cache).go_back(1)
    assert cache.get_seq_length() == 1


@pytest.mark.parametrize("window", [16, 64])
@pytest.mark.parametrize("keeps_past", [False, True])
def test_an_interrupted_update_leaves_the_rows_before_it(
    window: int, keeps_past: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ``torch.cat`` of a forward is interrupted in turn: some tensors of a layer then have new rows, and a window
    counts tokens that it does not hold. One window is shorter than the prompt, and one longer."""
    draw = torch.Generator().manual_seed(seed)
    cat, text = torch.cat, [torch.randn(1, 2, tokens, 4, generator=draw) for tokens in (20, 4, 3)]

    def update(cache: DynamicCache, new: torch.Tensor) -> list[torch.Tensor]:
        found: list[Any] = []
        for index, layer in enumerate(cache.layers):
            found += cache.update(new, new + 1, index)
            if isinstance(layer, DynamicIndexedLayer):
                found.append(layer.update_indexer(new[:, 0]))
        return found

    def prepared() -> tuple[DynamicCache, Rewinding]:
        cache = DynamicCache()
        cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(window), DynamicIndexedLayer()]
        if keeps_past:
            cache.activate_past_recording()
        update(cache, text[0])
        rewinding = Rewinding(torch.nn.Module(), cache)
        update(cache, text[1])
        rewinding.rewind(1)
        return cache, rewinding

    plain, _ = prepared()
    lengths = [layer.get_seq_length() for layer in plain.layers]
    expected = update(plain, text[2])
    for at in itertools.count():
        cache, rewinding = prepared()
        left = itertools.count(-at)

        def interrupted(*args: Any, left: Iterator[int] = left, **kwargs: Any) -> torch.Tensor:
            result = cat(*args, **kwargs)
            if next(left) == 0:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patch:
            patch.setattr(torch, "cat", interrupted)
            try:
                update(cache, text[2])
            except KeyboardInterrupt:
                pass
            else:
                break
        rewinding.go_back(23)
        assert [layer.get_seq_length() for layer in cache.layers] == lengths == [23] * 3
        assert all(map(torch.equal, update(cache, text[2]), expected))
    assert at == 7  # keys and values of three layers, and the keys of an indexer
