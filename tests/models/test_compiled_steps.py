"""``torch_mesh.compile``: compiled decode steps, and how often they are compiled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from near_ties import assert_same_tokens
from tiny_models import TINY_MODELS
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer

import torch_mesh
from torch_mesh import MeshConfig, UnsupportedModelError
from torch_mesh.hf.compile import SteadySlidingLayer

QWEN, OSS = "Qwen3MoeExperts", "GptOssExperts"

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _tokens(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(
        ids, **{"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0} | options
    )


def _plain(eager: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    """The eager reference with its logits. A static cache has more keys, so sums may be rounded differently."""
    return _tokens(eager, ids, **options, return_dict_in_generate=True, output_logits=True)


def _both(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model, eager and with compiled steps. Its weights are large enough that generated tokens differ.

    Every token takes all experts, so that rounding cannot change the choice.
    """
    model = TINY_MODELS[name].build()
    model.config.num_experts_per_tok = model.config.num_local_experts
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = model.config.num_local_experts
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.size(-1) ** -0.5 * 2)
    compiled = torch_mesh.patch(copy.deepcopy(model), resident=0.5)
    return torch_mesh.patch(model, resident=0.5), torch_mesh.compile(compiled, backend="eager", fullgraph=True)


@pytest.mark.parametrize("name", [pytest.param(QWEN, marks=pytest.mark.slow), OSS])
def test_prompts_of_any_length_share_one_graph(name: str) -> None:
    eager, compiled = _both(name)
    for length, options in [(5, {}), (7, {}), (30, {}), (14, {}), (7, {"do_sample": True, "top_k": 5})]:
        ids = torch.randint(3, 100, (1, length))
        plain = _plain(eager, ids, **options)
        assert _graphs() == (0 if length == 5 else 1), "the run to compare with was compiled, too"
        tokens = _tokens(compiled, ids, **options)
        assert _graphs() == 1 and not counters["graph_break"]
        if not options:  # a near tie of drawn tokens would not show in the logits
            assert_same_tokens(tokens, plain)
    assert len(tokens[0, 7:].unique()) > 1


@pytest.mark.parametrize("name", [pytest.param(QWEN, marks=pytest.mark.slow), OSS])
def test_a_batch_with_padding_is_a_graph_of_its_own(name: str) -> None:
    eager, compiled = _both(name)
    ids, mask = torch.randint(3, 100, (3, 20)), torch.ones(3, 20, dtype=torch.long)
    mask[1, :6] = 0
    mask[2, :19] = 0
    plain = _plain(eager, ids, attention_mask=mask)
    for _ in range(2):
        assert_same_tokens(_tokens(compiled, ids, attention_mask=mask), plain)
        assert _graphs() == 1


def test_a_longer_cache_compiles_once_more_and_its_graph_is_kept() -> None:
    _, compiled = _both(QWEN)
    for length, graphs in [(7, 1), (127, 2), (7, 2), (100, 2)]:
        _tokens(compiled, torch.randint(3, 100, (1, length)), max_new_tokens=4, min_new_tokens=4)
        assert _graphs() == graphs


def test_other_decoding_options_run_uncompiled() -> None:
    eager, compiled = _both(QWEN)
    ids = torch.randint(3, 100, (1, 6))
    for options in (
        {"num_beams": 2},
        {"use_cache": False},
        {"cache_implementation": "dynamic"},
        {"disable_compile": True},
        {"prefill_chunk_size": 4},
        {"prompt_lookup_num_tokens": 2},
    ):
        assert torch.equal(_tokens(compiled, ids, **options), _tokens(eager, ids, **options))
        assert _graphs() == 0
    cache = StaticCache(config=compiled.config, max_cache_len=40)
    plain = _plain(eager, ids)
    assert_same_tokens(_tokens(compiled, ids, past_key_values=cache), plain)
    assert_same_tokens(_tokens(eager, ids, assistant_model=compiled), plain)
    assert_same_tokens(_tokens(compiled, ids, assistant_model=eager), plain)
    assert _graphs() == 0
    with pytest.raises(TypeError, match="unexpected keyword"):
        torch_mesh.compile(compiled, speed=2)


def test_a_static_cache_and_options_that_are_asked_for_compile_too() -> None:
    eager, compiled = _both(QWEN)
    ids = torch.randint(3, 100, (1, 6))
    plain, own = _plain(eager, ids), CompileConfig(backend="eager", mode="default")
    for graphs, options in ((1, {"cache_implementation": "static"}), (2, {"compile_config": own})):
        for _ in range(2):
            assert_same_tokens(_tokens(compiled, ids, **options), plain)
            assert _graphs() == graphs
    assert vars(own) == vars(CompileConfig(backend="eager", mode="default"))


def test_options_of_the_backend_take_the_place_of_a_mode() -> None:
    model = torch_mesh.compile(TINY_MODELS[QWEN].build(), options={"trace.enabled": False})
    torch.compile(model, **vars(model)["_compiled_steps_config"].to_dict())  # raises for both


def test_compilation_is_not_saved_and_ends_with_unpatch(tmp_path: Path) -> None:
    _, compiled = _both(QWEN)
    ids = torch.randint(3, 100, (1, 6))
    expected = _tokens(compiled, ids)
    compiled.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=MeshConfig(resident=0.5), dtype=torch.bfloat16
    )
    assert again.generation_config.cache_implementation is None
    assert torch.equal(_tokens(torch_mesh.compile(again, backend="eager"), ids), expected)
    graphs = _graphs()
    torch_mesh.unpatch(compiled)
    _tokens(compiled, ids)
    assert _graphs() == graphs and not any("compile" in name or "cache" in name for name in vars(compiled))


def test_a_copy_runs_its_own_weights() -> None:
    eager, compiled = _both(QWEN)
    ids = torch.randint(3, 100, (1, 6))
    before = _tokens(compiled, ids)
    copied = copy.deepcopy(compiled)
    with torch.no_grad():
        for model in (eager, copied):
            model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    # With a static cache sums have another order, which matters where two logits are nearly equal.
    expected = _tokens(torch_mesh.compile(eager, backend="eager"), ids)
    assert torch.equal(_tokens(copied, ids), expected) and not torch.equal(expected, before)
    assert torch.equal(_tokens(compiled, ids), before)


def test_a_model_may_be_compiled_before_it_is_patched() -> None:
    model = torch_mesh.compile(TINY_MODELS[QWEN].build(), backend="eager")
    torch_mesh.patch(model, resident=0.5)
    _tokens(model, torch.randint(3, 100, (1, 6)))
    assert _graphs() == 1
    torch_mesh.unpatch(model)
    assert not any("compile" in name for name in vars(model))


def test_flash_attention_gets_no_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """generate drops a mask without padding before it chooses the cache. Flash attention would then read all of a
    static cache."""
    _, compiled = _both(QWEN)
    monkeypatch.setattr("torch_mesh.hf.compile.is_flash_attention_requested", lambda config: True)
    _tokens(compiled, torch.randint(3, 100, (1, 6)))
    assert _graphs() == 0


def test_a_model_without_generate_is_not_compiled() -> None:
    with pytest.raises(UnsupportedModelError, match="has no generate"):
        torch_mesh.compile(TINY_MODELS[QWEN].build().model)


@pytest.mark.parametrize("prompt", [1, 5, 16, 21])
def test_a_sliding_window_keeps_the_tokens_that_transformers_keeps(prompt: int) -> None:
    theirs, ours = StaticSlidingWindowLayer(64, sliding_window=16), SteadySlidingLayer(16)
    for tokens in (prompt, *[1] * 20, 3, 1):
        states = torch.randn(2, 2, 3, tokens, 8).unbind()
        assert ours.get_mask_sizes(tokens) == theirs.get_mask_sizes(tokens)
        for value, expected in zip(ours.update(*states), theirs.update(*states), strict=True):
            assert torch.equal(value, expected)
        assert int(ours.get_seq_length()) == theirs.get_seq_length()
    ours.reset()
    assert int(ours.get_seq_length()) == 0 and not ours.keys.any()


def test_cropping_a_sliding_window_rewinds_it() -> None:
    cropped, rewound = SteadySlidingLayer(16, 4), SteadySlidingLayer(16, 4)
    for tokens in (30, 4):
        states = torch.randn(2, 2, 3, tokens, 8).unbind()
        for layer in (cropped, rewound):
            layer.update(*states)
    cropped.crop(-3)
    rewound.rewind(3)
    states = torch.randn(2, 2, 3, 1, 8).unbind()
    for value, expected in zip(cropped.update(*states), rewound.update(*states), strict=True):
        assert torch.equal(value[:, :, -16:], expected[:, :, -16:])
    assert int(cropped.get_seq_length()) == int(rewound.get_seq_length()) == 32
    for tokens in (-5, 3):
        with pytest.raises(ValueError, match="give -2 to 0"):
            cropped.crop(tokens)
    assert int(cropped.get_seq_length()) == 32


def test_a_sliding_window_is_cropped_again_only_while_it_is_whole() -> None:
    layer, expected = SteadySlidingLayer(16, 4), torch.empty(2, 3, 0, 8)

    def add(tokens: int) -> None:
        nonlocal expected
        keys, values = torch.randn(2, 2, 3, tokens, 8).unbind()
        expected = torch.cat([expected, keys], dim=-2)
        assert torch.equal(layer.update(keys, values)[0][:, :, -16:], expected[:, :, -16:])

    def crop(tokens: int, further: int) -> None:
        nonlocal expected
        layer.crop(-tokens)
        expected = expected[:, :, : expected.shape[-2] - tokens]
        with pytest.raises(ValueError, match=f"give {-further} to 0"):
            layer.crop(-further - 1)

    for tokens, dropped, further in ((34, 4, 0), (1, 0, 1), (1, 2, 0), (3, 1, 2), (9, 3, 1)):
        add(tokens)
        crop(dropped, further)
    add(1)
    layer.reset()
    layer.update(*torch.randn(2, 2, 3, 22, 8).unbind())
    layer.crop(-3)
    with pytest.raises(ValueError, match="give -1 to 0"):  # the first two tokens are lost
        layer.crop(-2)


def test_drafts_on_a_returned_cache_longer_than_its_window_are_refused() -> None:
    """transformers crops the cache by rejected drafts, and looks at ``is_croppable`` once."""
    _, compiled = _both(OSS)
    ids = torch.randint(3, 100, (1, 6))
    first = _tokens(compiled, ids, max_new_tokens=40, return_dict_in_generate=True)
    assert any(isinstance(layer, SteadySlidingLayer) for layer in first.past_key_values.layers)
    with pytest.raises(ValueError, match=r"(?i)assisted"):
        _tokens(compiled, first.sequences, past_key_values=first.past_key_values, prompt_lookup_num_tokens=3)
