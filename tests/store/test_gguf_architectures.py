"""GGUF files: what the metadata and tensors of each architecture become in a config and a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import gguf_files
import mutations
import numpy as np
import pytest
import torch
import transformers
from gguf_files import Written
from safetensors.torch import load_file

from torch_mesh.errors import MeshError, StoreError, UnsupportedModelError
from torch_mesh.store import gguf_model
from torch_mesh.store.checkpoint import meta_model, read_config
from torch_mesh.store.convert import convert
from torch_mesh.store.gguf import Counted, read_gguf
from torch_mesh.store.gguf_families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore:The experts of:UserWarning", "ignore:.*weights='auto':UserWarning")


@pytest.mark.parametrize("architecture", gguf_files.ARCHITECTURES)
def test_answers_end_at_each_token_that_the_file_states(
    architecture: str, written: Callable[..., Written], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    further = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    gemma = [1, 106, 50] if architecture == "gemma4" else []
    one = read_config(written(architecture).path).eos_token_id
    assert one == ([2, *gemma] if gemma else 2)
    gguf_files.rewrite(written(architecture).path, path, architecture, metadata=further)
    assert read_config(path).eos_token_id == [2, 5, *gemma]
    if architecture != "llama":  # transformers takes it for a dense model
        assert transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).eos_token_id == [2, 5, *gemma]


def test_answers_of_gpt_oss_end_at_a_tool_call(written: Callable[..., Written]) -> None:
    part = read_gguf(written("gpt-oss").path)
    metadata = {**part.metadata, "tokenizer.ggml.tokens": Counted(201088), "tokenizer.ggml.eos_token_id": 200002}
    table = gguf_model.config_table(metadata, list(part.header.tensors))
    assert table["eos_token_id"] == [200002, 199999, 200012]


@pytest.mark.skipif(not gguf_files.READS_QWEN35MOE, reason="this transformers does not read qwen35moe")
def test_qwen3_5_scales_positions_as_the_file_says(written: Callable[..., Written], tmp_path: Path) -> None:
    path = written("qwen35moe").path
    scaling = {"type": "yarn", "factor": 4, "original_context_length": 64}
    metadata = {f"qwen35moe.rope.scaling.{key}": value for key, value in scaling.items()}
    gguf_files.rewrite(path, tmp_path / "m.gguf", "qwen35moe", metadata=metadata)
    expected = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    for config in (
        read_config(tmp_path / "m.gguf"),
        transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf"),
    ):
        assert config.rope_parameters == read_config(path).rope_parameters | expected
    gguf_files.rewrite(path, tmp_path / "m.gguf", "qwen35moe", metadata={"qwen35moe.rope.scaling.type": "longrope"})
    with pytest.raises(UnsupportedModelError, match="positions scaled by 'longrope'"):
        read_config(tmp_path / "m.gguf")


def test_the_window_of_gpt_oss_is_the_files(written: Callable[..., Written]) -> None:
    assert read_config(written("gpt-oss").path).sliding_window == 32


def test_transformers_reads_no_architectures_that_we_do_not() -> None:
    """Fails when transformers supports another one, which torch_mesh should then read too."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    tables = {name for name, keys in GGUF_TO_TRANSFORMERS_MAPPING["config"].items() if "expert_count" in keys}
    assert tables == set(gguf_model.READ_BY_TABLES.values())
    ours = {name for name, read in GGUF_CONFIG_ARCHS.items() if read is gguf_model.config_table}
    assert ours == {*gguf_model.READ_BY_TABLES, *FAMILIES} - {
        "llama"
    }  # otherwise transformers reads the config of one itself
    assert set(GGUF_CONFIG_ARCHS) - ours <= {"qwen35", "qwen35moe", "lfm2"}


def test_projections_of_linear_attention_may_be_one_tensor(written: Callable[..., Written], tmp_path: Path) -> None:
    made = written("qwen3next", "Q8_0")
    whole = made.model.state_dict()["model.layers.0.linear_attn.in_proj_qkvz.weight"].numpy()
    parts = r"blk\.0\.attn_(qkv|gate)\.weight"
    older = {"blk.0.ssm_in.weight": whole}
    gguf_files.rewrite(made.path, tmp_path / "older.gguf", "qwen3next", drop=parts, extra=older)
    assert torch.equal(
        *(
            _stored(path, tmp_path)["model.layers.0.linear_attn.in_proj_qkvz.weight"]
            for path in (made.path, tmp_path / "older.gguf")
        )
    )
    # The right number of values, in tensors of wrong shapes for the parameter.
    tensors = [made.tensors[f"blk.0.attn_{part}.weight"] for part in ("qkv", "gate")]
    moved = np.split(np.concatenate(tensors), [len(tensors[0]) + 1])
    wrong = {f"blk.0.attn_{part}.weight": rows for part, rows in zip(("qkv", "gate"), moved, strict=True)}
    gguf_files.rewrite(made.path, tmp_path / "wrong.gguf", "qwen3next", drop=parts, extra=wrong)
    with pytest.raises(StoreError, match=r"'blk.0.attn_qkv.weight' \[257, 128\] makes no .*in_proj_qkvz"):
        _stored(tmp_path / "wrong.gguf", tmp_path)


def test_gates_of_shared_experts_are_rows_or_matrices(written: Callable[..., Written], tmp_path: Path) -> None:
    """llama.cpp's converter writes [1, hidden] today, and wrote [hidden]."""
    made = written("qwen2moe", "Q8_0")
    rows = {name: value[None] for name, value in made.tensors.items() if "gate_inp_shexp" in name}
    gguf_files.rewrite(made.path, tmp_path / "matrix.gguf", "qwen2moe", drop=r".*gate_inp_shexp\.weight", extra=rows)
    gate = "model.layers.0.mlp.shared_expert_gate.weight"
    for path in (made.path, tmp_path / "matrix.gguf"):
        assert torch.equal(_stored(path, tmp_path)[gate], made.model.state_dict()[gate])


def _stored(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that a conversion writes besides the experts."""
    convert(path, folder / path.stem, "int8")
    return {
        name: value
        for file in sorted((folder / path.stem).glob("model*.safetensors"))
        for name, value in load_file(file).items()
    }


def test_frequencies_are_divided_by_the_files_factors(tmp_path: Path) -> None:
    divisors = np.linspace(1, 9, 16, dtype=np.float32)
    name = "rope_freqs.weight"
    made = gguf_files.write(tmp_path / "m.gguf", "llama", extra={name: divisors})
    rotary = meta_model(read_config(made.path)).model.rotary_emb
    with torch.device("cpu"):
        divided, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"](rotary.config)
    usual = rotary.config.rope_parameters["rope_theta"] ** -(torch.arange(0, 32, 2) / 32)
    assert torch.allclose(divided * torch.from_numpy(divisors), usual)
    for number in (-1.0, np.nan, np.inf):
        wrong = np.where(divisors == 9, np.float32(number), divisors)
        gguf_files.write(tmp_path / "wrong.gguf", "llama", extra={name: wrong})
        with pytest.raises(StoreError, match=f"'{name}' holds what frequencies cannot be divided by"):
            read_config(tmp_path / "wrong.gguf")
    gguf_files.write(tmp_path / "large.gguf", "llama", extra={name: np.ones(5000, np.float32)})
    with pytest.raises(StoreError, match=r"F32 \[5000\]; it must be F32 \[n\] with at most 4096"):
        read_config(tmp_path / "large.gguf")
    gguf_files.write(tmp_path / "twice.gguf", "deepseek2", extra={name: divisors})
    with pytest.raises(UnsupportedModelError, match=f"with {name} beside other scaling"):
        read_config(tmp_path / "twice.gguf")
    gguf_files.write(tmp_path / "gemma.gguf", "gemma4", extra={name: np.ones(32, np.float32) * 2})
    with pytest.raises(UnsupportedModelError, match="are not ones and then 1e30"):
        read_config(tmp_path / "gemma.gguf")


def test_maverick_has_no_norm_of_queries_and_keys(written: Callable[..., Written]) -> None:
    """llama.cpp's files do not state it."""
    part = read_gguf(written("llama4").path)
    for experts, normed in ((16, True), (128, False)):
        metadata = {**part.metadata, "llama4.expert_count": experts}
        assert gguf_model.config_table(metadata, list(part.header.tensors))["use_qk_norm"] == normed


@pytest.mark.parametrize("architecture", ["qwen3next", "llama4", "gemma4", "qwen35moe"])
@pytest.mark.parametrize("value", [7, pytest.param("x", marks=pytest.mark.thorough)])
def test_a_wrong_value_of_any_key_is_a_typed_error_or_a_model(
    architecture: str, value: object, written: Callable[..., Written], tmp_path: Path
) -> None:
    if architecture not in gguf_files.ARCHITECTURES:
        pytest.skip("this transformers does not read qwen35moe")
    path = written(architecture).path
    for key in [key for key in read_gguf(path).metadata if key.startswith(f"{architecture}.")]:
        gguf_files.rewrite(path, tmp_path / "m.gguf", architecture, metadata={key: value})
        with mutations.limits(60, 1 << 30), contextlib.suppress(MeshError):
            gguf_files.read_whole(tmp_path / "m.gguf", tokenizer=False)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("deepseek2", "expert_gating_func", 1),  # softmax, beside normalized weights
        ("deepseek2", "attention.temperature_scale", 1),
        ("llama4", "attention.sliding_window", 0),
        ("gemma4", "rope.dimension_count_swa", 16),
        ("gemma4", "rope.scaling.type", "yarn"),
    ],
)
def test_variants_of_a_family_are_refused(
    architecture: str, key: str, value: object, written: Callable[..., Written], tmp_path: Path
) -> None:
    changed = {f"{architecture}.{key}": value}
    gguf_files.rewrite(written(architecture).path, tmp_path / "m.gguf", architecture, metadata=changed)
    with pytest.raises(UnsupportedModelError, match=f"'{architecture}'.*Take the model's safetensors"):
        read_config(tmp_path / "m.gguf")


def test_a_softmax_router_that_does_not_normalize_is_deepseek_v2(written: Callable[..., Written]) -> None:
    part = read_gguf(written("deepseek2").path)
    changed = {"expert_gating_func": 1, "expert_weights_norm": False, "attention.temperature_scale": 0.0}
    metadata = part.metadata | {f"deepseek2.{key}": value for key, value in changed.items()}
    names = list(part.header.tensors)
    assert gguf_model.config_table(metadata, names)["model_type"] == "deepseek_v2"
    del metadata["deepseek2.expert_gating_func"], metadata["deepseek2.expert_weights_norm"]  # as in older files
    without_bias = [name for name in names if "exp_probs_b" not in name]
    assert gguf_model.config_table(metadata, without_bias)["model_type"] == "deepseek_v2"


def test_a_router_with_a_bias_is_deepseek_v3(written: Callable[..., Written]) -> None:
    """Files of GLM-4.7-Flash may lack the key that says so."""
    part = read_gguf(written("deepseek2").path)
    metadata = {key: value for key, value in part.metadata.items() if key != "deepseek2.expert_gating_func"}
    assert gguf_model.config_table(metadata, list(part.header.tensors))["model_type"] == "deepseek_v3"


@pytest.mark.parametrize(
    ("architecture", "key", "field", "default"),
    [
        ("deepseek2", "expert_weights_norm", "norm_topk_prob", False),
        ("deepseek2", "expert_weights_scale", "routed_scaling_factor", 1.0),
        ("glm4moe", "expert_weights_norm", "norm_topk_prob", False),
        ("glm4moe", "leading_dense_block_count", "first_k_dense_replace", 0),
        ("granitemoe", "attention.scale", "attention_multiplier", 32**-0.5),
        ("minimax-m2", "attention.head_count_kv", "num_key_value_heads", 4),
        ("llama4", "attention.key_length", "head_dim", 32),
        ("llama", "rope.freq_base", "rope_theta", 10000.0),
        ("minimax-m2", "rope.freq_base", "rope_theta", 10000.0),
    ],
)
def test_an_absent_key_has_the_default_of_llama_cpp(
    architecture: str, key: str, field: str, default: object, written: Callable[..., Written]
) -> None:
    """llama.cpp's converter leaves out what is false, 0 or not in config.json."""
    part = read_gguf(written(architecture).path)
    metadata = {name: value for name, value in part.metadata.items() if name != f"{architecture}.{key}"}
    assert gguf_model.config_table(metadata, list(part.header.tensors))[field] == default


def test_routers_of_glm_have_the_files_groups(written: Callable[..., Written]) -> None:
    part = read_gguf(written("glm4moe").path)
    metadata = {**part.metadata, "glm4moe.expert_group_count": 2, "glm4moe.expert_group_used_count": 1}
    table = gguf_model.config_table(metadata, list(part.header.tensors))
    assert (table["n_group"], table["topk_group"]) == (2, 1)


@pytest.mark.parametrize("architecture", ["qwen3next", "qwen35moe"])
def test_layers_of_linear_attention_are_those_that_the_file_names(
    architecture: str, written: Callable[..., Written]
) -> None:
    if architecture not in gguf_files.ARCHITECTURES:
        pytest.skip("this transformers does not read qwen35moe")
    part = read_gguf(written(architecture).path)
    named = {"block_count": 4, "nextn_predict_layers": 1, "attention.recurrent_layers": [False, True, True, False]}
    metadata = part.metadata | {f"{architecture}.{key}": value for key, value in named.items()}
    table = gguf_model.config_table(metadata, list(part.header.tensors))
    assert table["layer_types"] == ["full_attention", "linear_attention", "linear_attention"]
