"""generate() with a static cache, compiled as one graph."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

import torch_mesh

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _patched_model() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # otherwise every prompt ends in the same token
                parameter.normal_(0, parameter.size(-1) ** -0.5 * 2)
    return torch_mesh.patch(model, resident=0.4, weights="int8", io="threads")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_tokens_equal_eager_without_graph_breaks(backend: str) -> None:
    model = _patched_model()
    prompt = {"input_ids": torch.randint(3, 96, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    settings = {"cache_implementation": "static", "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = model.generate(**prompt, **settings, disable_compile=True)
    assert not counters["stats"], "the run to compare with was compiled, too"
    before = torch_mesh.stats(model)

    compile_config = CompileConfig(fullgraph=True, backend=backend)
    compile_config._compile_all_devices = True  # otherwise transformers compiles on accelerators only
    out = model.generate(**prompt, **settings, compile_config=compile_config)

    assert torch.equal(out, expected)
    assert len(out[0, 7:].unique()) > 1
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    after = torch_mesh.stats(model)
    assert after.hits > before.hits and after.cold_misses > before.cold_misses
    torch_mesh.unpatch(model, lossy=True)
