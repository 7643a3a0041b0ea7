"""``attention=``: decode steps by torch_mesh's kernel."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from routes import Computed, by_token, given_routes, recorded_routes
from tiny_models import TINY_MODELS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import torch_mesh
from torch_mesh.errors import UnsupportedModelError
from torch_mesh.hf import attention

# Grouped heads, multi-head latent attention, sliding windows, some layers of linear attention, a scale of its own.
FAMILIES = [
    "AriaExperts",
    "Cohere2MoeExperts",
    "DeepseekV3Experts",
    "Gemma4TextExperts",
    "MiniMaxM2Experts",
    "Mistral4Experts",
    "MixtralExperts",
    "Qwen3NextExperts",
    "SolarOpenExperts",
]
MIXTRAL = "MixtralExperts"


class Calls(TorchDispatchMode):
    """Counts the calls of torch_mesh's attention."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.torch_mesh.attention.default
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _steps(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of the last three tokens, one step each."""
    first = ids.size(1) - 3
    cache, logits = None, []
    for begin, end in [(0, first)] + [(at, at + 1) for at in range(first, ids.size(1))]:
        seen = None if mask is None else mask[:, :end]
        out = model(input_ids=ids[:, begin:end], attention_mask=seen, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[:, -1].float())
    return torch.stack(logits[1:], 1)


@torch.no_grad()
def _packed_attention(queries: list[int], keys: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Attention of sequences side by side with one mask, as continuous batching calls it.

    Returns the result of ``attention="mesh"``, which is compared with torch's in float64, that of each sequence alone,
    and how often torch_mesh's kernel ran.
    """
    module = torch.nn.Module()
    groups, dtype = 2, torch.bfloat16
    module.num_key_value_groups = groups
    vars(module)[attention._TAKEN] = True
    forward = attention._around(sdpa_attention_forward)
    tokens, heads, width = sum(queries), 2 * groups, 16
    query = torch.randn(1, heads, tokens, width, dtype=dtype)
    key, value = torch.randn(2, 1, 2, sum(keys), width, dtype=dtype)
    ends = [torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32) for counts in (queries, keys)]
    mask = torch.full((1, 1, tokens, sum(keys)), torch.finfo(dtype).min, dtype=dtype)
    apart = []
    for (first, end), (first_key, end_key) in zip(*(itertools.pairwise(end.tolist()) for end in ends), strict=True):
        block = mask[:, :, first:end, first_key:end_key]
        block.triu_(1 + (end_key - first_key) - (end - first))
        if end > first:
            of_keys = slice(first_key, end_key)
            alone = (query[:, :, first:end], key[:, :, of_keys], value[:, :, of_keys], block)
            apart.append(forward(module, *alone, dropout=0.0, scaling=0.3)[0])
    named = {"cu_seq_lens_q": ends[0], "cu_seq_lens_k": ends[1], "dropout": 0.0, "scaling": 0.3, "is_causal": False}
    with Calls() as calls:
        together, _ = forward(module, query, key, value, mask, **named)
    visible = torch.where(mask == 0, 0.0, -torch.inf).double()
    exact, _ = sdpa_attention_forward(module, query.double(), key.double(), value.double(), visible, scaling=0.3)
    # Rounding of the result, and of probabilities where torch computes them: each at most 2**-9 of the largest value.
    assert (together - exact).abs().max() <= 2**-7 * value.abs().max()
    return together, torch.cat(apart, 1), calls.count


@pytest.mark.parametrize(
    ("queries", "keys", "computed"),
    [
        ([1, 1, 1], [9, 1, 40], 3),
        ([5, 1, 30, 0, 1], [5, 17, 30, 0, 64], 3),  # with a prompt, which torch computes, and a sequence without tokens
        ([3, 20], [50, 20], 1),  # a chunk of a prompt
        ([20, 17], [20, 17], 0),
    ],
)
def test_packed_sequences_are_computed_one_by_one(queries: list[int], keys: list[int], computed: int) -> None:
    together, apart, calls = _packed_attention(queries, keys)
    assert calls == computed
    assert torch.equal(together, apart)


@pytest.mark.parametrize(("queries", "keys"), [([40], [40]), ([1], [40])])
def test_one_packed_sequence_is_computed_as_usual(queries: list[int], keys: list[int]) -> None:
    together, apart, calls = _packed_attention(queries, keys)
    assert calls == (queries == [1]) and torch.equal(together, apart)


@pytest.mark.parametrize("name", FAMILIES)
def test_decodes_as_torch_does(name: str) -> None:
    model = TINY_MODELS[name].build()
    ids = torch.randint(3, 100, (2, 12))
    computed = Computed.by(model, lambda model: _steps(model, ids))
    torch_mesh.patch(model, attention="mesh")
    with Calls() as calls:
        computed.assert_same(model)
    assert calls.count > 0 and calls.count % 3 == 0  # equally often in each of three steps, never for the prompt


def test_heads_of_other_sizes_are_left_to_torch() -> None:
    model = TINY_MODELS["Qwen3MoeExperts"].build()
    assert model.model.layers[0].self_attn.head_dim == 18
    ids = torch.randint(3, 100, (2, 12))
    expected = _steps(torch_mesh.patch(model), ids)
    torch_mesh.unpatch(model)
    with Calls() as calls:
        assert torch.equal(_steps(torch_mesh.patch(model, attention="mesh"), ids), expected)
    assert calls.count == 0


@pytest.mark.parametrize("name", ["GptOssExperts", "DeepseekV4Experts"])
def test_models_that_do_not_support_sdpa_are_refused(name: str) -> None:
    model = TINY_MODELS[name].build()
    with pytest.raises(UnsupportedModelError, match="replaces attn_implementation='sdpa'.* uses eager"):
        torch_mesh.patch(model, attention="mesh")
    assert "Mesh" not in repr(model), "a refused patch leaves the model as it was"


def test_padding_is_masked() -> None:
    model = TINY_MODELS[MIXTRAL].build()
    for module in model.modules():
        if hasattr(module, "top_k"):  # every token takes all experts, so rounding cannot change the choice
            module.top_k = model.config.num_local_experts
    ids = torch.randint(3, 100, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    torch_mesh.patch(model, attention="mesh", dense="bf16")
    value = _steps(model, ids, mask)
    alone = _steps(model, ids[1:, 5:])
    assert by_token(value[1:], alone).max() < 0.02
    seeing = _steps(model, ids, torch.ones_like(mask))
    assert (seeing[1:] - alone).norm() > 0.1 * alone.norm()


def _uses_kernel(model: PreTrainedModel) -> bool:
    with Calls() as calls:
        _steps(model, torch.randint(3, 100, (1, 8)))
    return calls.count > 0


def test_auto_follows_dense_and_unpatch_restores_the_implementation() -> None:
    model = TINY_MODELS[MIXTRAL].build()
    assert not _uses_kernel(torch_mesh.patch(model, dense="none"))
    torch_mesh.unpatch(model)
    assert _uses_kernel(torch_mesh.patch(model, dense="bf16"))
    torch_mesh.unpatch(model)
    assert not _uses_kernel(model)
    assert not _uses_kernel(torch_mesh.patch(model, dense="bf16", attention="model"))


def test_auto_keeps_an_implementation_that_was_chosen() -> None:
    model = TINY_MODELS[MIXTRAL].build()
    model.set_attn_implementation("eager")
    assert not _uses_kernel(torch_mesh.patch(model, dense="bf16"))


def test_another_model_of_the_same_config_is_left_alone() -> None:
    model = TINY_MODELS[MIXTRAL].build()
    other = type(model)(model.config).bfloat16().eval()
    torch_mesh.patch(model, attention="mesh")
    assert _uses_kernel(model) and not _uses_kernel(other)


@pytest.fixture
def own_sdpa() -> Iterator[list[int]]:
    """Registers a function as "sdpa". The list has the numbers of tokens that it was called with."""
    registered, calls = AttentionInterface()["sdpa"], []

    def own(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(query.shape[2])
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("sdpa", own)
    yield calls
    AttentionInterface.register("sdpa", registered)


def test_a_registered_sdpa_function_stays_in_use_for_other_models(own_sdpa: list[int]) -> None:
    model = TINY_MODELS[MIXTRAL].build()
    other = type(model)(model.config).bfloat16().eval()
    torch_mesh.patch(model, attention="mesh")
    assert _uses_kernel(model)
    layers = len(model.model.layers)
    assert own_sdpa == [5] * layers, "a prompt is its own in a patched model, too"
    own_sdpa.clear()
    assert not _uses_kernel(other)
    assert own_sdpa == [5] * layers + [1] * 3 * layers
    own_sdpa.clear()
    assert not _uses_kernel(torch_mesh.unpatch(model))
    assert own_sdpa == [5] * layers + [1] * 3 * layers


def test_auto_keeps_a_registered_sdpa_function(own_sdpa: list[int]) -> None:
    model = torch_mesh.patch(TINY_MODELS[MIXTRAL].build(), dense="bf16")
    assert not _uses_kernel(model) and len(own_sdpa) == 4 * len(model.model.layers)


@pytest.mark.parametrize("name", ["DeepseekV32Experts", "GlmMoeDsaExperts", "AXK2Experts"])
def test_sparse_attention_stays_sparse(name: str) -> None:
    """These families choose keys by an indexer. They pass the choice as a mask only to implementations whose names they
    know."""
    model = TINY_MODELS[name].build()
    ids = torch.randint(3, 100, (2, 32))
    for module in model.modules():
        for attribute in ("index_topk", "topk", "index_top_k"):
            if isinstance(vars(module).get(attribute), int):
                setattr(module, attribute, 4)
    torch_mesh.patch(model, attention="model")
    with recorded_routes(model) as routes:
        expected = _steps(model, ids)
    torch_mesh.unpatch(model)
    torch_mesh.patch(model, attention="mesh")
    with given_routes(model, routes):
        value = _steps(model, ids)
    errors = by_token(value, expected)  # rounding may change an indexer's choice, too
    assert errors.min() < 0.02 and errors.median() < 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "shared"), [(8, 2), (4, 4)])
@torch.no_grad()
def test_several_tokens_after_a_cache_do_not_repeat_keys_per_head(
    heads: int, shared: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = torch.nn.Module()
    module.num_key_value_groups = heads // shared
    vars(module)[attention._TAKEN] = True
    tokens, keys = 20, 90
    query = torch.randn(2, heads, tokens, 16, dtype=dtype)
    key, value = torch.randn(2, 2, shared, keys, 16, dtype=dtype)
    visible = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)[None, None]
    expected, _ = sdpa_attention_forward(module, query, key, value, visible, scaling=0.3)
    key_heads = []
    theirs = torch.nn.functional.scaled_dot_product_attention

    def recorded(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        key_heads.append(key.shape[1])
        return theirs(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    computed, _ = attention._around(sdpa_attention_forward)(module, query, key, value, visible, scaling=0.3)
    assert key_heads == [shared] and torch.equal(computed, expected)


@pytest.mark.parametrize("tokens", [1, 40])
def test_torch_computes_attention_in_training(tokens: int) -> None:
    model = torch_mesh.patch(TINY_MODELS[MIXTRAL].build(), attention="mesh")
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[0, : tokens // 2] = 0
    with Calls() as calls:
        out = model(input_ids=torch.randint(3, 100, (2, tokens)), attention_mask=mask)
        out.logits.sum().backward()
    assert calls.count == 0
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_from_pretrained_takes_attention_and_save_pretrained_does_not_write_it(tmp_path: Path) -> None:
    TINY_MODELS[MIXTRAL].build().save_pretrained(tmp_path / "source")
    config = torch_mesh.MeshConfig(resident=1.0, attention="mesh")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", quantization_config=config)
    assert _uses_kernel(model)
    model.save_pretrained(tmp_path / "saved")
    assert "attention" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert not _uses_kernel(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))


def test_an_unknown_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="attention='flash' is unknown; it is one of 'auto', 'model', 'mesh'"):
        torch_mesh.MeshConfig(attention="flash")
