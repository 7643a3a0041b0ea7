"""A store with an adapter merged into it, compared with PEFT's merge_and_unload of the unpatched model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from limited_processes import small_disk, without_privileges
from peft import LoraConfig, PeftModel, get_peft_model
from quantized import KINDS, write_quantized
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import MeshError, StoreError, merge
from torch_mesh.cli import main
from torch_mesh.models.families import find_experts
from torch_mesh.store import writer
from torch_mesh.store.convert import convert, stored_expert, stored_record
from torch_mesh.store.manifest import MANIFEST_NAME, Store, described, open_store
from torch_mesh.store.verify import read_record, verify

QWEN = "Qwen3MoeExperts"
# Gate and up as halves; transposed, with biases and interleaved columns; other names in checkpoints; no gate.
FAMILIES = [QWEN, "GptOssExperts", "MixtralExperts", "NemotronHExperts"]


def _build(name: str = QWEN, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = TINY_MODELS[name].build().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # values that need all bits of fp32
            parameter.mul_(1 + 2**-7 * torch.rand_like(parameter))
    return model


def _adapted(model: PreTrainedModel, **fields: Any) -> PeftModel:
    """The model with an adapter of random values, as after training."""
    layer = find_experts(model)[0]
    block = layer.path.split(".")[-2:]
    targets = [".".join([*block, name]) for name in layer.parameter_names[:2]]
    settings = {"r": 4, "lora_alpha": 24, "target_modules": ["q_proj"], "target_parameters": targets}
    return get_peft_model(model, LoraConfig(**(settings | {"init_lora_weights": False} | fields)))


def _records(store: Store) -> list[bytes]:
    return [read_record(store, layer, expert) for layer, expert in store.records()]


def _values(store: Store) -> list[torch.Tensor]:
    """The values of each expert, flattened."""
    experts = [stored_expert(store, layer, expert) for layer, expert in store.records()]
    return [torch.cat([part.float().flatten() for part in expert if part is not None]) for expert in experts]


def _error(values: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return ((torch.cat(values) - torch.cat(expected)).norm() / torch.cat(expected).norm()).item()


def _dense(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


def _check(merged: Store, exact: PreTrainedModel, tmp_path: Path) -> None:
    """Check ``merged`` against ``exact``, PEFT's merged model in fp32: experts are rounded only once, other weights are
    equal."""
    exact.save_pretrained(tmp_path / "exact")
    manifest = merged.manifest
    rounded = convert(tmp_path / "exact", tmp_path / "rounded", manifest.weights, manifest.group_size or None).store
    wide = [
        torch.cat([part.float().flatten() for part in layer.expert(expert) if part is not None])
        for layer in find_experts(exact)
        for expert in range(layer.num_experts)
    ]
    assert _error(_values(merged), wide) <= 1.01 * _error(_values(rounded), wide)
    dense = _dense(merged.folder)
    for name, expected in _dense(rounded.folder).items():
        torch.testing.assert_close(dense.pop(name), expected, rtol=1e-5, atol=1e-6, check_dtype=False)
    assert not dense
    assert list(verify(merged)) == []


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param(name, {}, marks=[pytest.mark.slow] if name in ("NemotronHExperts", "MixtralExperts") else [])
        for name in FAMILIES
    ]
    + [
        (QWEN, {"use_rslora": True, "rank_pattern": {r"layers\.1\..*": 6}, "alpha_pattern": {"down_proj": 3}}),
        (QWEN, {"modules_to_save": ["norm", "embed_tokens"], "target_modules": ["lm_head", "q_proj"]}),
        (QWEN, {"target_parameters": ["mlp.gate.weight", "mlp.experts.down_proj"]}),
        (QWEN, {"use_dora": True, "target_parameters": None}),
        (QWEN, {"target_modules": "all-linear"}),
    ],
)
def test_a_merged_store_has_the_weights_that_peft_merges(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    model = _build(name)
    model.save_pretrained(tmp_path / "base")
    if name == "NemotronHExperts":
        fields = {"target_modules": ["in_proj"]}
    adapted = _adapted(model, **fields)
    if "modules_to_save" in fields:
        for wrapped in (adapted.base_model.model.model.norm, adapted.base_model.model.model.embed_tokens):
            wrapped.modules_to_save["default"].weight.data.mul_(1.5)
    adapted.save_pretrained(tmp_path / "adapter")
    written = merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert not written.existed and written.store.manifest.weights == "bf16"
    _check(written.store, adapted.merge_and_unload(), tmp_path)
    assert merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged").existed


def test_a_bf16_base_is_merged_in_fp32_and_opens_as_the_trained_model(tmp_path: Path) -> None:
    model = _build(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    patched = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=torch_mesh.MeshConfig(resident=0.5)
    )
    adapted = _adapted(patched)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged").store
    wide = PeftModel.from_pretrained(model.float(), tmp_path / "adapter").merge_and_unload()
    q_proj = wide.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(_dense(merged.folder)["model.layers.0.self_attn.q_proj.weight"], q_proj.bfloat16())
    ids = torch.randint(3, 100, (1, 24))
    with torch.no_grad():
        base, expected = (model.bfloat16()(ids).logits.float() for model in (_fresh(tmp_path / "base"), adapted))
        found = _fresh(tmp_path / "merged")(ids).logits.float()
    change = (expected - base).norm(dim=-1).median()
    assert (found - expected).norm(dim=-1).median() < 0.15 * change


def _fresh(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(("weights", "group_size"), [("int4", 32), ("int8", 64)])
def test_a_store_may_be_the_base_and_unchanged_experts_keep_their_records(
    tmp_path: Path, weights: str, group_size: int
) -> None:
    _build().save_pretrained(tmp_path / "base")
    base = convert(tmp_path / "base", tmp_path / "store", weights, group_size).store
    dequantized = torch_mesh.unpatch(
        AutoModelForCausalLM.from_pretrained(tmp_path / "store", dtype=torch.float32), lossy=True
    )
    adapted = _adapted(dequantized)
    for name, parameter in adapted.named_parameters():
        if ".experts." in name and "lora_B" in name:  # as if expert 5 of each layer was never chosen
            parameter.data.view(parameter.size(0), -1, 8)[..., 5] = 0
    adapted.save_pretrained(tmp_path / "adapter")
    merged = merge(tmp_path / "store", tmp_path / "adapter", tmp_path / "merged").store
    assert (merged.manifest.weights, merged.manifest.group_size) == (weights, group_size)
    for layer, expert in base.records():
        same = torch.equal(stored_record(merged, layer, expert), stored_record(base, layer, expert))
        assert same == (expert == 5)
    named = merge(tmp_path / "store", tmp_path / "adapter", tmp_path / "named", weights=weights).store
    assert _records(named) == _records(merged)
    with pytest.warns(UserWarning, match=f"{weights} experts in groups of {group_size} are rounded again.*of 128"):
        merge(tmp_path / "store", tmp_path / "adapter", tmp_path / "others", weights=weights, group_size=128)
    exact = adapted.merge_and_unload()
    found = torch_mesh.unpatch(AutoModelForCausalLM.from_pretrained(merged.folder, dtype=torch.float32), lossy=True)
    shutil.rmtree(tmp_path / "base")
    exact.save_pretrained(tmp_path / "exact")
    rounded = convert(tmp_path / "exact", tmp_path / "rounded", weights, group_size).store
    wide = list(exact.state_dict().values())
    by_conversion = torch_mesh.unpatch(
        AutoModelForCausalLM.from_pretrained(rounded.folder, dtype=torch.float32), lossy=True
    )
    errors = [
        sum((a - b).square().sum().item() for a, b in zip(model.state_dict().values(), wide, strict=True))
        for model in (found, by_conversion)
    ]
    assert errors[0] <= 1.02 * errors[1]


def test_a_quantized_base_needs_a_named_format(tmp_path: Path) -> None:
    values = write_quantized(tmp_path / "base", KINDS["ct_mxfp4"]())
    plain = tmp_path / "plain"
    shutil.copytree(tmp_path / "base", plain)
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config.pop("quantization_config")
    (plain / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    adapted = _adapted(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"has mxfp4 experts.*'int8'"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    exact = adapted.merge_and_unload()
    for base in (tmp_path / "base", convert(tmp_path / "base", tmp_path / "store", "auto").store.folder):
        merged = merge(base, tmp_path / "adapter", tmp_path / f"merged-{base.name}", weights="int8").store
        wide = [
            torch.cat([part.float().flatten() for part in layer.expert(expert) if part is not None])
            for layer in find_experts(exact)
            for expert in range(layer.num_experts)
        ]
        assert merged.manifest.weights == "int8" and _error(_values(merged), wide) < 0.01


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = _build(dtype=torch.bfloat16)
    model.save_pretrained(folder / "base")
    _adapted(model).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def base_and_adapter(tmp_path: Path, saved: Path) -> tuple[Path, Path]:
    """A copy of base and adapter, which a test may damage."""
    return tuple(Path(shutil.copytree(saved / name, tmp_path / name)) for name in ("base", "adapter"))


def _edit_tensors(edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return apply


def _edit_config(**fields: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda folder: os.truncate(folder / "adapter_model.safetensors", 5000), "adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_config.json").write_text("[1"), "adapter_config.json"),
        (_edit_config(peft_type="IA3"), "peft_type='IA3'; only LORA"),
        (_edit_config(init_lora_weights="pissa"), "path_initial_model_for_weight_conversion"),
        (_edit_config(init_lora_weights="loftq"), "path_initial_model_for_weight_conversion"),
        (_edit_config(scale_of_a_later_peft=2, empty_of_it=None), "has scale_of_a_later_peft, unknown to PEFT"),
        (_edit_config(rank_pattern=["q_proj"]), "does not fit"),
        (_edit_config(rank_pattern={"(": 2}), "does not fit"),
        (_edit_config(arrow_config={"top_k": 2}), "does not fit"),
        (_edit_config(target_modules=["query"], target_parameters=None), "does not fit Qwen3MoeForCausalLM"),
        (_edit_config(target_modules=["k_proj"]), "does not have: .*q_proj"),
        (_edit_config(r=8), "does not fit.*size mismatch"),
        (_edit_config(trainable_token_indices=[1, 2]), "trainable_token"),
        (_edit_config(layer_replication=[[0, 2], [1, 3]]), "layer_replication"),
        (_edit_config(modules_to_save=["experts"]), "modules_to_save='experts'"),
        (_edit_tensors(lambda tensors: tensors.pop(FIRST)), r"lacks tensors.*0\.self_attn\.q_proj\.lora_A\.weight"),
        (
            _edit_tensors(
                lambda tensors: tensors.update({FIRST.replace("layers.0", "layers.7"): tensors[FIRST].clone()})
            ),
            r"does not have: .*layers\.7\.self_attn",
        ),
        (_edit_tensors(lambda tensors: tensors[FIRST].fill_(float("nan"))), "cannot be merged into .*q_proj"),
        (
            _edit_tensors(lambda tensors: next(t for n, t in tensors.items() if "experts" in n).fill_(float("inf"))),
            "not finite",
        ),
    ],
)
def test_an_adapter_that_cannot_be_merged_whole_is_refused(
    tmp_path: Path, base_and_adapter: tuple[Path, Path], change: Callable[[Path], None], message: str
) -> None:
    base, adapter = base_and_adapter
    change(adapter)
    with pytest.raises(StoreError, match=message):
        merge(base, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_values_that_the_dtype_of_the_base_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = _build(dtype=torch.float16)
    model.save_pretrained(tmp_path / "base")
    _adapted(model, target_parameters=None).save_pretrained(tmp_path / "adapter")
    _edit_tensors(lambda tensors: [tensor.mul_(1e4) for tensor in tensors.values()])(tmp_path / "adapter")
    with pytest.raises(StoreError, match="q_proj.weight that are not finite in F16"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_a_base_of_other_sizes_or_of_tied_weights_is_refused(
    tmp_path: Path, base_and_adapter: tuple[Path, Path]
) -> None:
    base, adapter = base_and_adapter
    TINY_MODELS["MixtralExperts"].build().save_pretrained(tmp_path / "other")
    with pytest.raises(StoreError, match="does not fit MixtralForCausalLM|has no place"):
        merge(tmp_path / "other", adapter, tmp_path / "merged")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tied = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(tied, LoraConfig(target_modules=["lm_head"], init_lora_weights=False)).save_pretrained(adapter)
    with pytest.raises(StoreError, match=r"(lm_head|embed_tokens)\.weight, which shares its weights with"):
        merge(base, adapter, tmp_path / "merged")


def test_an_existing_store_is_kept_unless_forced(tmp_path: Path, base_and_adapter: tuple[Path, Path]) -> None:
    base, adapter = base_and_adapter
    convert(base, tmp_path / "store", "int8")
    with pytest.raises(StoreError, match="has another store.*remove this one"):
        merge(base, adapter, tmp_path / "store")
    for folder in (base, adapter):
        with pytest.raises(ValueError, match="choose another folder"):
            merge(base, adapter, folder, force=True)
    assert open_store(tmp_path / "store").manifest.weights == "int8"
    assert merge(base, adapter, tmp_path / "store", force=True).store.manifest.weights == "bf16"


def test_a_store_without_its_other_files_is_no_base(tmp_path: Path, base_and_adapter: tuple[Path, Path]) -> None:
    base, adapter = base_and_adapter
    store = convert(base, tmp_path / "store", "int8").store
    for file in store.manifest.other_files:
        (store.folder / file.name).unlink()
    with pytest.raises(StoreError):
        merge(store.folder, adapter, tmp_path / "merged")


@pytest.mark.parametrize("part", [0, 1])
def test_no_store_is_written_if_a_source_changes_meanwhile(
    tmp_path: Path, base_and_adapter: tuple[Path, Path], part: int
) -> None:
    touched = [*base_and_adapter[part].glob("*.safetensors")]

    def touch(done: int, total: int) -> None:
        os.utime(touched[0])

    with pytest.raises(StoreError, match="was changed while it was read"):
        merge(*base_and_adapter, tmp_path / "merged", progress=touch)
    assert not (tmp_path / "merged").exists()


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, base_and_adapter: tuple[Path, Path]) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk, pytest.raises(StoreError, match="the disk has .* free"):
        merge(*base_and_adapter, disk / "merged")


def test_an_interrupted_merge_resumes(
    tmp_path: Path, base_and_adapter: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = merge(*base_and_adapter, tmp_path / "reference").store
    made: list[tuple[int, int]] = []
    original = writer.UnfinishedStore._write_record

    def write(self: Any, layer: int, expert: int, make: Any) -> Any:
        made.append((layer, expert))
        if len(made) == 10:
            raise KeyboardInterrupt
        return original(self, layer, expert, make)

    monkeypatch.setattr(writer.UnfinishedStore, "_write_record", write)
    with pytest.raises(KeyboardInterrupt):
        merge(*base_and_adapter, tmp_path / "merged", workers=1)
    first = made[:9]
    store = merge(*base_and_adapter, tmp_path / "merged", workers=1).store
    assert len(set(made[len(first) + 2 :]) & set(first)) <= 2, "finished records were made again"
    assert all(torch.equal(*(stored_record(of, *place) for of in (store, reference))) for place in store.records())
    assert {path.name: path.read_bytes() for path in store.folder.glob("model-*")} == {
        path.name: path.read_bytes() for path in reference.folder.glob("model-*")
    }


KILLED = """
import os, signal, sys
from torch_mesh.cli import main
from torch_mesh.adapters import merging
original = merging._record
def record(folder, base, factors, layer, expert):
    if (layer, expert) == (1, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(folder, base, factors, layer, expert)
merging._record = record
sys.exit(main(["merge", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_killed_merge_command_resumes(
    tmp_path: Path, base_and_adapter: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*map(str, base_and_adapter), str(tmp_path / "merged"), "--threads", "1"]
    killed = warm.run(KILLED, *arguments)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / ".merged.partial").is_dir() and not (tmp_path / "merged").exists()
    assert main(["merge", *arguments]) == 0
    assert "now holds 3 x 8 experts with the adapter" in capsys.readouterr().out
    assert list(verify(open_store(tmp_path / "merged"))) == [] and not (tmp_path / ".merged.partial").exists()
    assert main(["merge", *arguments]) == 0
    assert "already holds" in capsys.readouterr().out


@pytest.mark.slow
def test_a_read_only_folder_is_an_error_of_one_line(tmp_path: Path, base_and_adapter: tuple[Path, Path]) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    command = [sys.executable, "-m", "torch_mesh", "merge", *map(str, base_and_adapter)]
    done = without_privileges([*command, str(tmp_path / "closed" / "merged")])
    assert done.returncode == 1 and "cannot be written" in done.stderr.splitlines()[-1]


PEAK = """
import sys, threading, psutil
from torch_mesh import merge
base, adapter, out = sys.argv[1:]
merge(base, adapter, out + "-first", weights="int8", workers=2)  # what is allocated once, for whatever size
process, peak, done = psutil.Process(), [0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], process.memory_full_info().uss)
before = process.memory_full_info().uss
threading.Thread(target=watch, daemon=True).start()
merge(base, adapter, out, weights="int8", workers=2)
done.set()
print(peak[0] - before)
"""


@pytest.mark.slow
def test_merging_takes_the_memory_of_a_few_experts_and_the_adapter(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 96}
    tiny = TINY_MODELS[QWEN]
    tiny = type(tiny)(tiny.family, tiny.config, tiny.model, tiny.fields | sizes)
    model = tiny.build()
    model.save_pretrained(tmp_path / "base")
    adapted = _adapted(model, r=2)
    adapted.save_pretrained(tmp_path / "adapter")
    expert, adapter = 3 * 512 * 512 * 4, (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    command = [sys.executable, "-c", PEAK, *(str(tmp_path / name) for name in ("base", "adapter", "merged"))]
    rise = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert rise < 2 * adapter + 20 * expert, f"{(rise - 2 * adapter) / expert:.1f} experts of 288"


def test_a_store_with_more_layers_than_its_config_is_not_merged(tmp_path: Path) -> None:
    _build(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    _adapted(_fresh_patched(tmp_path / "base", num_hidden_layers=2)).save_pretrained(tmp_path / "adapter")
    store = convert(tmp_path / "base", tmp_path / "store", "int8").store
    config = json.loads((store.folder / "config.json").read_text())
    (store.folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    files = tuple(described(store.folder / file.name, store.manifest.store_id) for file in store.manifest.other_files)
    (store.folder / MANIFEST_NAME).write_text(replace(store.manifest, other_files=files).to_json())
    with pytest.raises(StoreError, match="has records of 3 layers, and its config.json has 2"):
        merge(store.folder, tmp_path / "adapter", tmp_path / "merged")


def test_merge_and_unload_of_a_patched_model_names_the_call_to_use(tmp_path: Path) -> None:
    _build(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    model = _adapted(_fresh_patched(tmp_path / "base"))
    with pytest.raises(MeshError, match="torch_mesh.merge") as caught:
        model.merge_and_unload()
    assert f"torch_mesh.merge({str(tmp_path / 'base')!r}, 'adapter', 'merged')" in str(caught.value)


def _fresh_patched(folder: Path, **fields: Any) -> PreTrainedModel:
    config = torch_mesh.MeshConfig(resident=0.5)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **fields)
