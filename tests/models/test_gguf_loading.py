"""from_pretrained of GGUF files, and of stores converted from them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
import torch
from pairs import every_other_quick
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig, StoreError, UnsupportedModelError, merge
from torch_mesh.modules.dense import MeshLinear, PlainLinear
from torch_mesh.modules.experts import patched_modules
from torch_mesh.patching import checkpoint_source
from torch_mesh.planning.formats import dense_choices
from torch_mesh.planning.sizes import find_sizes, locate
from torch_mesh.store.checkpoint import find_checkpoint_experts, meta_model, read_config
from torch_mesh.store.convert import convert
from torch_mesh.store.dense_codes import is_codes_file
from torch_mesh.store.gguf_model import blocks_of_rest
from torch_mesh.store.inspect import describe
from torch_mesh.store.manifest import is_store, open_store
from torch_mesh.store.verify import verify

IDS = torch.tensor([[5, 9, 17, 33, 2, 64, 5, 71, 90]])


@pytest.fixture(autouse=True)
def _in_cache(cache: Path) -> None:
    """Conversions go to the test's cache."""


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


def _open(
    path: Path, weights: str = "bf16", store: str | None = None, dense: str = "auto", **given: Any
) -> PreTrainedModel:
    config = MeshConfig(resident=0.5, weights=weights, store=store, dense=dense)
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **given)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, quantization_config=config, **given)


@pytest.mark.parametrize("parts", [0, 3])
def test_a_name_in_capitals_is_a_gguf_file(parts: int, tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps.weight": "Q8_0"}, parts=parts)
    logits = {dtype: _logits(_open(made.path, "auto", **_dtype_of(dtype))) for dtype in (None, torch.float32)}
    for path in tmp_path.glob("*.gguf"):
        path.rename(path.with_name(path.name.upper()))
    path = made.path.with_name(made.path.name.upper())
    if not parts:  # transformers reads only the first part
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
        assert _difference(logits[torch.float32], _logits(plain)) <= 0.02
    for dtype, expected in logits.items():
        assert torch.equal(_logits(_open(path, "auto", **_dtype_of(dtype))), expected)
    convert(path, tmp_path / "store", "auto")
    assert torch.equal(_logits(_open(tmp_path / "store", "auto", dtype=torch.float32)), logits[torch.float32])


def _dtype_of(dtype: torch.dtype | None) -> dict[str, Any]:
    return {} if dtype is None else {"dtype": dtype}


# Noise of 1 % in the input of each product, as rounding gives it, changes logits by 2 to 4 %. Gemma4's change by 4 %,
# or by 11 % where it changes a choice of experts. Wrong codes change them by 100 %.
ROUNDED = 0.2


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(expected).all()
    return ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()


@pytest.mark.parametrize("architecture", gguf_files.EACH_ARCHITECTURE)
def test_logits_are_those_of_the_model(architecture: str, tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", architecture, {"_exps.weight": "Q4_1", "attn_(q|qkv)": "F16"})
    logits = _logits(made.model)
    if architecture == "llama":  # transformers takes it for a dense model
        with pytest.raises(UnsupportedModelError, match="takes it for llama: convert it"):
            _open(made.path, dtype=torch.float32)
        with pytest.warns(UserWarning, match="are rounded to bf16"):
            convert(made.path, tmp_path / "converted", "bf16")
        made = gguf_files.Written(tmp_path / "converted", made.model, made.tensors)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _open(made.path, dtype=torch.float32)
    assert architecture == "llama" or any("are rounded to bf16" in str(each.message) for each in caught)
    assert len(list(patched_modules(model))) == 2
    assert _difference(_logits(model), logits) <= 0.005
    if made.path.is_file():
        convert(made.path, tmp_path / "store", "bf16")
        assert torch.equal(_logits(_open(tmp_path / "store", dtype=torch.float32)), _logits(model))
    if architecture in gguf_files.READ_BY_TRANSFORMERS:
        own = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="model.gguf", config=made.model.config, dtype=torch.float32
        )
        assert _difference(_logits(model), _logits(own)) <= 0.005
    patched = _logits(torch_mesh.patch(made.model, weights="bf16", resident=0.5))
    # These architectures store functions of some fp32 weights, whose inverse is not exact.
    of_functions = architecture in ("qwen35moe", "qwen3next", "llama4")
    assert _difference(_logits(model), patched) <= (1e-5 if of_functions else 0)


def test_auto_names_its_choice_and_bf16_is_the_dtype(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps.weight": "TQ2_0"}, **sizes)
    with pytest.warns(UserWarning, match="converts TQ2_0 experts to int8 in groups of 32"):
        model = _open(made.path, weights="auto")
    assert model.dtype == torch.bfloat16 and model.config.quantization_config.weights == "int8"
    assert _difference(_logits(model), _logits(made.model)) <= ROUNDED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_experts_are_read_from_the_file_itself(dtype: torch.dtype, tmp_path: Path, cache: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps.weight": "BF16"})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "weights='auto'|.* rounded")
        model = _open(made.path, "auto", dtype=dtype)
    assert model.config.quantization_config.weights == "bf16"
    assert not list(cache.glob("stores/*/mesh_manifest.json"))
    stored = _open(convert(made.path, tmp_path / "store", "bf16").store.folder, "auto", dtype=dtype)
    assert torch.equal(_logits(model), _logits(stored))
    model.save_pretrained(tmp_path / "saved")
    assert not is_store(tmp_path / "saved")


def test_stores_of_bf16_experts_are_in_bf12(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps.weight": "BF16"})
    convert(made.path, tmp_path / "converted", "auto")
    assert find_sizes(made.path, MeshConfig(store=str(tmp_path / "planned"))).weights == "bf12"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "weights='auto'|.* rounded")  # nothing is rounded
        models = [_open(made.path, "auto"), _open(made.path, "auto", store=str(tmp_path / "store"))]
    for folder, model in zip(("converted", "store"), models, strict=True):
        assert open_store(tmp_path / folder).manifest.weights == "bf12"
        assert torch.equal(_logits(model), _logits(_open(tmp_path / folder, "auto")))


K_SIZES = {"hidden_size": 256, "moe_intermediate_size": 256}
MIXED = {"blk.0.ffn_down_exps": "Q6_K", "_exps.weight": "Q4_K"}


@pytest.mark.parametrize(
    "kind",
    every_other_quick(
        ["Q4_0", "Q8_0", "MXFP4", "Q5_1", "IQ3_S", "Q6_K", "IQ2_XXS", "Q4_K", "mixed", "IQ1_S", "IQ4_XS", "IQ1_M"], 0
    ),
)
def test_experts_are_read_from_the_file_itself(kind: str, tmp_path: Path, cache: Path) -> None:
    types = MIXED if kind == "mixed" else {"_exps.weight": kind}
    made = gguf_files.write(
        tmp_path / "model.gguf",
        "gpt-oss" if kind == "MXFP4" else "qwen3moe",
        types,
        **({} if kind in ("Q4_0", "Q8_0", "MXFP4") else K_SIZES),
    )
    model = _open(made.path, weights="auto")
    assert not list(cache.glob("stores/*/mesh_manifest.json"))
    stored = _open(made.path, weights="auto", store=str(tmp_path / "store"))
    assert torch.equal(_logits(model), _logits(stored))
    assert _difference(_logits(model), _logits(made.model)) <= ROUNDED
    assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape[1] > IDS.shape[1]


# Queries and the head have a kernel for their type. Keys, values and outputs have none.
DENSE = {"_exps": "Q8_0", "attn_output": "F16", "output": "Q6_K", "attn_(k|v)": "TQ2_0", "attn": "Q4_K"}
DENSE_SIZES = {"hidden_size": 256, "num_attention_heads": 8}


def _linears(model: PreTrainedModel) -> dict[str, str]:
    return {path: module._mesh_format for path, module in model.named_modules() if isinstance(module, MeshLinear)}


def test_linear_layers_keep_the_codes_of_the_file(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", DENSE, **DENSE_SIZES)
    model = _open(made.path, "auto", dense="codes")
    queries = {f"model.layers.{layer}.self_attn.q_proj": "q4_k" for layer in range(2)}
    assert _linears(model) == queries | {"lm_head": "q6_k"}
    assert "weights=q6_k" in repr(model) and isinstance(model.model.layers[0].self_attn.o_proj, PlainLinear)
    for path, name in (("lm_head", "output"), ("model.layers.1.self_attn.q_proj", "blk.1.attn_q")):
        weight = torch.ops.torch_mesh.unpack_linear(
            model.get_submodule(path)._mesh_packed, 256, *_about(model.get_submodule(path))
        )
        assert torch.equal(weight, torch.from_numpy(made.tensors[f"{name}.weight"].copy()))
    expected = made.model.state_dict()
    assert all(torch.equal(model.state_dict()[name], expected[name].bfloat16()) for name in ("lm_head.weight",))
    assert _difference(_logits(model), _logits(made.model)) <= ROUNDED
    held = sum(module._mesh_packed.nbytes for module in model.modules() if isinstance(module, MeshLinear))
    plain = [each for name, each in model.named_parameters() if type(each) is torch.nn.Parameter]
    sizes = find_sizes(made.path, MeshConfig(dense="codes"))
    assert sizes.dense_bytes == held + sum(each.nbytes for each in plain) and sizes.dense_format == "q4_k"
    assert [choice.dense for choice in dense_choices(locate(made.path), MeshConfig(), None, None)] == [
        "codes",
        "int8",
        "int4",
    ]
    # The same values may be loaded into a layer of codes. Other values have no codes.
    model.load_state_dict({"lm_head.weight": expected["lm_head.weight"].bfloat16()}, strict=False)
    with pytest.raises(RuntimeError, match="Other values than those of q6_k"):
        model.load_state_dict({"lm_head.weight": expected["lm_head.weight"].bfloat16() + 1}, strict=False)
    model.save_pretrained(tmp_path / "saved")
    saved = _open(tmp_path / "saved", "auto")
    assert not _linears(saved) and torch.equal(saved.lm_head.weight, expected["lm_head.weight"].bfloat16())
    torch_mesh.unpatch(model, lossy=True)
    assert torch.equal(model.lm_head.weight, expected["lm_head.weight"].bfloat16())


def _about(linear: MeshLinear) -> tuple[int, str, int]:
    return linear._mesh_shape[0], linear._mesh_format, linear._mesh_group_size


@pytest.mark.parametrize("architecture", gguf_files.EACH_ARCHITECTURE)
def test_rows_that_the_gguf_converter_moves_keep_their_codes(architecture: str, tmp_path: Path) -> None:
    types = {"_exps.weight": "Q8_0", "ssm_(alpha|beta|conv1d)": "F16", "weight": "Q5_0"}
    made = gguf_files.write(tmp_path / "model.gguf", architecture, types)
    if architecture == "llama":  # transformers takes it for a dense model
        experts = find_checkpoint_experts(made.path, meta := meta_model(read_config(made.path)))
        found = blocks_of_rest(made.path, experts.weights, experts.names, meta)
        packed = {name: (each.read(), each.format) for name, each in found.items()}
        values = {
            name: gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType.Q5_0) for name, (rows, _) in packed.items()
        }
    else:
        model = _open(made.path, "auto", dense="codes", dtype=torch.float32)
        values = {f"{path}.weight": model.get_submodule(path).unpacked_weight().numpy() for path in _linears(model)}
        columns_moved = {"qwen35moe": "out_proj", "deepseek2": "kv_b_proj"}.get(architecture, "none")
        others = [path for path, module in model.named_modules() if type(module) in (torch.nn.Linear, PlainLinear)]
        gates = ("gate", "router.proj", "gate.wg", "in_proj_a", "in_proj_b", "in_proj_ba", columns_moved)
        assert all(path.endswith(gates) for path in others), others
    expected = made.model.state_dict()
    assert any("q_proj" in name or "q_b_proj" in name for name in values)
    for name, value in values.items():
        assert np.array_equal(value, expected[name].numpy()), name


def test_dense_codes_needs_a_gguf_file_with_codes(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps": "TQ2_0", "output": "Q8_0"}, **K_SIZES)
    model = _open(made.path, "auto", dense="codes")  # works even if experts are converted
    assert _linears(model)["lm_head"] == "int8_fp16"
    made.model.save_pretrained(tmp_path / "raw")
    store = convert(tmp_path / "raw", tmp_path / "store", "bf16").store
    for open_it in (
        lambda: _open(store.folder, "auto", dense="codes"),
        lambda: find_sizes(store.folder, MeshConfig(dense="codes")),
        lambda: torch_mesh.patch(made.model, dense="codes", weights="bf16"),
    ):
        with pytest.raises(UnsupportedModelError, match="This model has none in a type"):
            open_it()
    gguf_files.write(tmp_path / "floats.gguf", "qwen3moe", {"_exps": "Q8_0"})
    with pytest.raises(UnsupportedModelError, match="This model has none in a type"):
        _open(tmp_path / "floats.gguf", "auto", dense="codes")
    choices = dense_choices(locate(tmp_path / "floats.gguf"), MeshConfig(), None, None)
    assert [choice.dense for choice in choices] == ["int8", "int4"]


def test_a_store_keeps_the_codes_of_linear_layers(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", DENSE, **DENSE_SIZES)
    store = convert(made.path, tmp_path / "store", "int8", max_file_bytes=1 << 15).store
    files = [file.name for file in store.manifest.other_files if is_codes_file(file.name)]
    assert len(files) == 3 and not list(verify(store))
    raw, stored = (_open(path, "int8", dense="codes") for path in (made.path, store.folder))
    assert _linears(stored) == _linears(raw) and torch.equal(_logits(stored), _logits(raw))
    sizes = [find_sizes(path, MeshConfig(dense="codes", weights="int8")) for path in (made.path, store.folder)]
    assert sizes[0].dense_bytes == sizes[1].dense_bytes and sizes[1].dense_format == "q4_k"
    choices = dense_choices(locate(store.folder), MeshConfig(), None, None)
    assert [choice.dense for choice in choices] == ["codes", "int8", "int4"]
    held = {"q4_k": 0, "q6_k": 0}
    for linear in map(stored.get_submodule, _linears(stored)):
        held[linear._mesh_format] += linear._mesh_packed.nbytes
    assert describe(store.folder)["dense_codes"] == held
    # Opened without the codes, the store gives the same model as the file.
    assert torch.equal(_logits(_open(store.folder, "int8")), _logits(_open(made.path, "int8")))
    # Codes are checked when they are read.
    path = store.folder / files[-1]
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert [damage.file for damage in verify(store)] == [str(path)]
    assert not _linears(_open(store.folder, "int8"))
    with pytest.raises(StoreError, match=f"{files[-1]}: was changed since the conversion"):
        _open(store.folder, "int8", dense="codes")
    path.write_bytes(path.read_bytes().replace(b'\\"version\\": 1', b'\\"version\\": 9'))
    for open_it in (
        lambda: _open(store.folder, "int8", dense="codes"),
        lambda: find_sizes(store.folder, MeshConfig(dense="codes")),
    ):
        with pytest.raises(StoreError, match=r"holds 'q6_k' of version 9\): convert the GGUF file again"):
            open_it()


def test_merging_keeps_the_codes_of_unchanged_layers(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", DENSE, **DENSE_SIZES)
    settings: Any = {"r": 4, "target_modules": ["layers.1.self_attn.q_proj"], "init_lora_weights": False}
    adapted = get_peft_model(made.model, LoraConfig(**settings))
    adapted.save_pretrained(tmp_path / "adapter")
    exact = adapted.merge_and_unload()
    store = convert(made.path, tmp_path / "store", "int8").store
    for base in (made.path, store.folder):
        merged = merge(base, tmp_path / "adapter", tmp_path / f"merged-{base.name}", weights="int8").store
        assert not list(verify(merged))
        model = _open(merged.folder, "int8", dense="codes")
        assert _linears(model) == {"model.layers.0.self_attn.q_proj": "q4_k", "lm_head": "q6_k"}
        assert _difference(_logits(model), _logits(exact)) <= ROUNDED


def test_saving_keeps_the_codes_of_linear_layers(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", DENSE, **DENSE_SIZES)
    model = _open(made.path, "auto", dense="codes")
    for opened in (model, model.model):
        opened.save_pretrained(tmp_path / "saved")
        assert not list(verify(open_store(tmp_path / "saved")))
        again = _open(tmp_path / "saved", "auto", dense="codes")
        kept = {path: kind for path, kind in _linears(model).items() if opened is model or path != "lm_head"}
        assert _linears(again) == kept
        for path in kept:
            assert torch.equal(again.get_submodule(path)._mesh_packed, model.get_submodule(path)._mesh_packed)
    # A caller's values have no codes.
    state = {**model.state_dict(), "lm_head.weight": model.lm_head.unpacked_weight() + 1}
    model.save_pretrained(tmp_path / "given", state_dict=state)
    assert "lm_head" not in _linears(_open(tmp_path / "given", "auto", dense="codes"))
    # Saving a model without codes removes those of the folder, and an ordinary checkpoint cannot hold codes.
    _open(made.path, "auto").save_pretrained(tmp_path / "saved")
    assert not [path for path in (tmp_path / "saved").iterdir() if is_codes_file(path.name)]
    with pytest.warns(
        UserWarning, match=r"3 linear layers .* \(q4_k, q6_k\).* as ordinary weights with the same values"
    ):
        _open(made.path, "bf16", dense="codes").save_pretrained(tmp_path / "exact")
    head = AutoModelForCausalLM.from_pretrained(tmp_path / "exact").lm_head.weight
    assert torch.equal(head, model.lm_head.unpacked_weight())


def test_a_tied_head_keeps_the_codes_of_the_embedding(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps": "Q8_0", "token_embd": "Q8_0"}, tied=True)
    model = _open(made.path, "auto", dense="codes")
    assert _linears(model) == {"lm_head": "int8_fp16"} and isinstance(model.model.embed_tokens, torch.nn.Embedding)
    assert torch.equal(model.lm_head.unpacked_weight(), model.model.embed_tokens.weight)
    assert _difference(_logits(model), _logits(made.model)) <= ROUNDED
    stored = _open(convert(made.path, tmp_path / "store", "auto").store.folder, "auto", dense="codes")
    assert _linears(stored) == _linears(model) and torch.equal(_logits(stored), _logits(model))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(_logits(_open(tmp_path / "saved", "auto", dense="codes")), _logits(model))
    with torch.no_grad():
        model.model.embed_tokens.weight[3] += 1  # the tied head is saved with this change
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(UnsupportedModelError, match="This model has none in a type"):
        _open(tmp_path / "trained", "auto", dense="codes")


def test_a_model_may_have_layers_of_several_types(tmp_path: Path, cache: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", MIXED, **K_SIZES)
    model = _open(made.path, weights="auto", dtype=torch.float32)
    assert model.config.quantization_config.weights == "q4_k+q6_k|q4_k:01"
    assert "weights=q4_k+q6_k|q4_k (" in repr(model)
    # Gradients, and the weights that come back, are those of each layer's own types.
    x = model.get_input_embeddings()(IDS).detach().requires_grad_()
    torch_mesh_grad = torch.autograd.grad(model(inputs_embeds=x, use_cache=False).logits.square().mean(), x)[0]
    y = x.detach().clone().requires_grad_()
    own = torch.autograd.grad(made.model(inputs_embeds=y, use_cache=False).logits.square().mean(), y)[0]
    assert _difference(torch_mesh_grad, own) <= 0.1
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(_logits(_open(tmp_path / "saved", weights="auto", dtype=torch.float32)), _logits(model))
    plain = torch_mesh.unpatch(model, lossy=True)
    expected = made.model.state_dict()
    experts = {name: value for name, value in plain.state_dict().items() if ".experts." in name}
    assert experts and all(torch.equal(value, expected[name]) for name, value in experts.items())


def test_fewer_layers_than_the_file_has(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps.weight": "Q8_0"})
    model = _open(made.path, weights="auto", num_hidden_layers=1)
    assert len(model.model.layers) == 1 and _logits(model).isfinite().all()


@pytest.mark.parametrize(
    ("order", "expected"), [((1,), "q4_k"), ((0,), "q6_k"), ((1, 0), "q4_k|q6_k:01")], ids=["last", "first", "swapped"]
)
def test_moved_layers_of_several_types_keep_their_own(order: tuple[int, ...], expected: str, tmp_path: Path) -> None:
    kinds = {r"blk.0.ffn_(gate|up|down)_exps": "Q6_K", "_exps.weight": "Q4_K"}
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", kinds, **K_SIZES)
    model = _open(made.path, weights="auto", dtype=torch.float32)
    assert model.config.quantization_config.weights == "q6_k|q4_k:01"
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in order])
    model.config.num_hidden_layers = len(order)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.save_pretrained(tmp_path / "saved")
    assert open_store(tmp_path / "saved").manifest.weights == expected
    assert torch.equal(_logits(_open(tmp_path / "saved", weights="auto", dtype=torch.float32)), _logits(model))


# gemma4 has no head for values in any layer of the first part, and divisors of frequencies in the last part.
@pytest.mark.parametrize("architecture", ["qwen2moe", "gemma4"])
def test_a_gguf_file_in_several_parts_is_one_model(architecture: str, tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", architecture, {"_exps.weight": "Q8_0"}, parts=3)
    model = _open(made.path, dtype=torch.float32)
    assert not model.config.tie_word_embeddings  # the head is not in the part that transformers reads
    assert _difference(_logits(model), _logits(made.model)) <= 0.005


def test_missing_parts_are_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--maker--model" / "snapshots" / "f00"
    (snapshot / "q8").mkdir(parents=True)
    made = gguf_files.write(snapshot / "q8" / "model.gguf", "qwen3moe", {"_exps": "Q8_0"}, parts=3)
    others = [path.rename(tmp_path / path.name) for path in sorted((snapshot / "q8").iterdir())[1:]]
    asked = []

    def cached(model: str, name: str, cache_dir: Path, revision: str, **given: Any) -> None:
        asked.append((model, name, cache_dir, revision, given))
        (tmp_path / Path(name).name).rename(snapshot / name)

    monkeypatch.setattr(checkpoint_source, "cached_file", cached)
    model = _open(made.path, dtype=torch.float32, token="hf_of_the_caller")
    given = {"token": "hf_of_the_caller", "proxies": None, "local_files_only": False}
    assert asked == [("maker/model", f"q8/{path.name}", tmp_path, "f00", given) for path in others]
    assert _difference(_logits(model), _logits(made.model)) <= 0.005


def test_a_config_or_a_dict_is_taken(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "minimax-m2", {"_exps.weight": "Q8_0"})
    config = {"quant_method": "mesh", "resident": 0.5, "weights": "int8"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", quantization_config=config)
    assert len(list(patched_modules(model))) == 2
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", quantization_config=MeshConfig(resident=0.5, weights="int8")
    )
    assert torch.equal(_logits(model), _logits(again)) and made.path.exists()


@pytest.mark.skipif(not gguf_files.READS_QWEN35MOE, reason="this transformers does not read qwen35moe")
def test_without_a_mesh_config_transformers_loads_the_file_itself(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen35moe", {"_exps.weight": "Q8_0"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert not list(patched_modules(model))
    assert _difference(_logits(model), _logits(made.model)) <= 1e-4


def test_trained_weights_are_saved(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps.weight": "Q8_0"})
    model = _open(made.path, weights="int8")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(_logits(_open(tmp_path / "saved", weights="auto")), _logits(model))


def test_a_truncated_file_is_a_store_error(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps.weight": "Q8_0"})
    data = made.path.read_bytes()
    made.path.write_bytes(data[: len(data) - 4096])
    with pytest.raises(StoreError, match="truncated"):
        _open(made.path)
