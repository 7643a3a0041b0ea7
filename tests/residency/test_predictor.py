"""Fitted predictors: their gain in recall, what is refused, and that the tokens stay the same."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation import CompileConfig

import torch_mesh
from torch_mesh import MeshConfig, MeshError, StoreError
from torch_mesh.cli import main
from torch_mesh.cli.routing.fit import _verdict
from torch_mesh.hf.open_model import open_tokenizer
from torch_mesh.models.families import find_experts, find_router
from torch_mesh.modules.experts import patched_modules
from torch_mesh.prefetch.predictor import Predictor, Recall, fit, identity_of, load_predictor, recall, save_predictor
from torch_mesh.routing.simulation import simulate
from torch_mesh.routing.traces import load_trace
from torch_mesh.store.text import token_sequences

TEXT = Path(__file__).parents[1] / "data" / "text"


@pytest.fixture(scope="module")
def model(mesh_tiny: Path) -> PreTrainedModel:
    """The model in float32, which is several times as fast on processors without bf16 arithmetic."""
    return AutoModelForCausalLM.from_pretrained(mesh_tiny, dtype=torch.float32)


@pytest.fixture(scope="module")
def sequences(mesh_tiny: Path) -> list[torch.Tensor]:
    """Half prose and half code, 256 tokens each."""
    tokenizer = AutoTokenizer.from_pretrained(mesh_tiny)
    texts = []
    for name in ("prose", "code"):
        texts.append([json.loads(line)["text"] for line in (TEXT / f"{name}.jsonl").read_text().splitlines()])
    documents = [text for pair in zip(*texts, strict=False) for text in pair]
    return [torch.tensor(tokenizer(text)["input_ids"][:256]) for text in documents]


@pytest.fixture(scope="module")
def predictor(model: PreTrainedModel, sequences: list[torch.Tensor]) -> Predictor:
    return fit(model, sequences[:22])


@pytest.fixture(scope="module")
def file(predictor: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predictor") / "tiny.safetensors"
    save_predictor(predictor, path)
    return path


def test_a_fitted_predictor_beats_lookahead_on_other_texts(
    model: PreTrainedModel, predictor: Predictor, sequences: list[torch.Tensor]
) -> None:
    rows = recall(model, predictor, sequences[22:])
    assert [row.fetched for row in rows] == [(4, 6, 8)] * 6
    assert rows[0].lookahead is None and rows[0].fitted[0] > 0.45
    for row in rows[1:]:
        assert row.lookahead is not None
        assert all(ours > theirs for ours, theirs in zip(row.fitted, row.lookahead, strict=True))
        assert all(a < b for a, b in zip(row.fitted, row.fitted[1:], strict=False))
    gains = np.mean([np.subtract(row.fitted, row.lookahead) for row in rows[1:]], axis=0)
    assert gains[0] > 0.03


def test_recall_equals_a_direct_count(
    model: PreTrainedModel, predictor: Predictor, sequences: list[torch.Tensor]
) -> None:
    layers = find_experts(model)
    seen: dict[int, Any] = {}
    hooks = [
        layer.module.register_forward_pre_hook(
            lambda _, arguments, index=index: seen.__setitem__(index, (arguments[0], arguments[1]))
        )
        for index, layer in enumerate(layers)
    ]
    with torch.no_grad():
        model(input_ids=sequences[-1].unsqueeze(0))
    for hook in hooks:
        hook.remove()
    rows = recall(model, predictor, sequences[-1:])
    for index in range(6):
        right = 0
        for token in range(1 if index == 0 else 0, len(sequences[-1])):
            x = seen[(index - 1) % 6][0][token - (index == 0)]
            predicted = (predictor.weights[index].float() @ x.float()).topk(6).indices.tolist()
            right += len(set(predicted) & set(seen[index][1][token].tolist()))
        assert rows[index].fitted[1] == pytest.approx(right / (4 * (len(sequences[-1]) - (index == 0))))


@pytest.mark.parametrize("tokens", [2, 8, 40])
def test_fitting_to_few_tokens_does_not_reduce_recall(
    model: PreTrainedModel, sequences: list[torch.Tensor], tokens: int
) -> None:
    rows = recall(model, fit(model, [sequences[0][:tokens]]), sequences[22:26])
    gains = [row.fitted[0] - row.lookahead[0] for row in rows if row.lookahead is not None]
    assert len(gains) == 5 and np.mean(gains) > -0.01


def test_nothing_can_be_fitted_to_single_tokens(model: PreTrainedModel, sequences: list[torch.Tensor]) -> None:
    for none in ([], [sequences[0][:1]]):
        with pytest.raises(MeshError, match="no two tokens in a row"):
            fit(model, none)


def test_layers_without_a_router_are_fitted_to_their_choices(
    model: PreTrainedModel, sequences: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_mesh.prefetch.predictor.find_router", lambda model, layer: None)
    rows = recall(model, fit(model, sequences[:11]), sequences[22:26])
    assert all(row.lookahead is None for row in rows)
    assert all(row.fitted[0] > 0.6 for row in rows[1:])


def test_a_saved_predictor_loads_unchanged(predictor: Predictor, file: Path, model: PreTrainedModel) -> None:
    loaded = load_predictor(file, find_experts(model))
    assert loaded.identity == predictor.identity == identity_of(model, find_experts(model))
    assert all(torch.equal(a, b) for a, b in zip(loaded.weights, predictor.weights, strict=True))
    assert list(file.parent.iterdir()) == [file]


def _generate(folder: Path, **fields: object) -> tuple[torch.Tensor, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(resident=0.25, **fields))
    prompt = torch.arange(3, 15).unsqueeze(0)
    tokens = model.generate(prompt, max_new_tokens=32, min_new_tokens=32, do_sample=False)
    next(patched_modules(model))._mesh_pool.engine.drain()
    return tokens, torch_mesh.stats(model)


def test_a_model_reads_ahead_with_it_and_gives_the_same_tokens(mesh_tiny: Path, file: Path) -> None:
    plain, _ = _generate(mesh_tiny, prefetch="off")
    routers, by_routers = _generate(mesh_tiny)
    fitted, by_fitted = _generate(mesh_tiny, prefetch=file)
    assert torch.equal(plain, fitted) and torch.equal(plain, routers)
    assert by_routers.per_layer[0].prefetches == 0 < by_fitted.per_layer[0].prefetches
    assert all(layer.prefetches > 0 for layer in by_fitted.per_layer)


def test_prediction_compiles_into_the_decode_step(mesh_tiny: Path, file: Path) -> None:
    config = MeshConfig(resident=0.25, prefetch=file, io="threads")
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=config)
    prompt = {"input_ids": torch.arange(3, 15).unsqueeze(0), "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    settings = {"cache_implementation": "static", "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(**prompt, **settings, disable_compile=True)
    torch._dynamo.reset()
    counters.clear()
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager")
    compile_config._compile_all_devices = True
    torch_mesh.reset_stats(model)
    assert torch.equal(model.generate(**prompt, **settings, compile_config=compile_config), expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert torch_mesh.stats(model).per_layer[0].prefetches > 0


def test_predictions_are_recorded_and_replayed(
    model: PreTrainedModel, file: Path, sequences: list[torch.Tensor], tmp_path: Path
) -> None:
    for name, extra in (("routers", {"lookahead": True}), ("fitted", {"predictor": file})):
        with torch_mesh.record_trace(model, tmp_path / f"{name}.npz", **extra):
            for tokens in sequences[22:26]:
                model(input_ids=tokens.unsqueeze(0))
    routers, fitted = (load_trace(tmp_path / f"{name}.npz") for name in ("routers", "fitted"))
    assert fitted.lookahead is not None and (fitted.lookahead[fitted.offsets[:-1], 0] == 0).all()
    rows = [simulate(trace, "auto", 0.25, predictor="lookahead", as_decode=True) for trace in (routers, fitted)]
    counted = recall(model, load_predictor(file, find_experts(model)), sequences[22:26])
    assert rows[1].recall == pytest.approx(np.mean([row.fitted[0] for row in counted]), abs=0.01)
    assert rows[1].recall > rows[0].recall + 0.1  # the first layer too
    assert rows[1].wait_rate < rows[0].wait_rate


def _rewritten(file: Path, folder: Path, change: Any) -> Path:
    """The file with another header."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    change(header, body)
    text = json.dumps(header).encode()
    path = folder / "changed.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def _other_format(header: Any, body: bytearray) -> None:
    header["__metadata__"]["format"] = "torch_mesh predictor 2"


def _no_number(header: Any, body: bytearray) -> None:
    body[2:4] = b"\xc0\x7f"


def _other_shape(header: Any, body: bytearray) -> None:
    header["layers.3"]["shape"] = header["layers.3"]["shape"][::-1]


def _other_dtype(header: Any, body: bytearray) -> None:
    header["layers.3"]["dtype"] = "F16"


def _other_name(header: Any, body: bytearray) -> None:
    header["layers.6"] = header.pop("layers.5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_format, "its format is 'torch_mesh predictor 2'"),
        (_no_number, "'layers.0' has values that are not finite"),
        (_other_shape, "fitted to another model"),
        (_other_dtype, "but the model needs 6 in BF16"),
        (_other_name, "fitted to another model"),
    ],
)
def test_damaged_files_are_refused(
    model: PreTrainedModel, file: Path, tmp_path: Path, change: Any, message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        load_predictor(_rewritten(file, tmp_path, change), find_experts(model))


def test_a_truncated_file_is_refused(
    model: PreTrainedModel, file: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    data = file.read_bytes()
    for end in rng.integers(0, len(data), 20):
        (tmp_path / "cut").write_bytes(data[:end])
        with pytest.raises(StoreError):
            load_predictor(tmp_path / "cut", find_experts(model))


def test_another_model_is_refused(mesh_tiny: Path, model: PreTrainedModel, file: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(mesh_tiny)
    with torch.no_grad():
        find_router(other, find_experts(other)[2]).weight[0, 0] += 1  # type: ignore[union-attr, index]
    with pytest.raises(MeshError, match="was fitted to another model"):
        torch_mesh.patch(other, prefetch=file, resident=0.5)
    assert not list(patched_modules(other)), "a model that was refused is as it was"
    with pytest.raises(StoreError, match="cannot be read"):
        AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=MeshConfig(prefetch=tmp_path / "none"))
    # Another weight format or dtype of the same model is accepted.
    for weights in ("int8", "int4"):
        config = MeshConfig(resident=0.5, weights=weights, prefetch=file)
        AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=config, dtype=torch.float32)


def test_a_checkpoint_cannot_name_a_predictor(file: Path) -> None:
    assert "prefetch" not in MeshConfig(prefetch=file).to_dict()
    with pytest.warns(UserWarning, match="sets prefetch, which is ignored"):
        config = MeshConfig.of_checkpoint({"quant_method": "mesh", "prefetch": str(file)})
    assert (config.prefetch, config.predictor) == ("auto", None)


@pytest.mark.parametrize("value", ["on", "", 1, None, True])
def test_prefetch_is_a_keyword_or_a_file(value: object) -> None:
    with pytest.raises(ValueError, match="prefetch=.* it is 'auto', 'off', or the path of a file"):
        MeshConfig(prefetch=value)


def test_the_command_fits_and_prints_the_gain(
    mesh_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiny.safetensors"
    files = [str(TEXT / f"{name}.jsonl") for name in ("prose", "code")]
    arguments = [str(mesh_tiny), "--out", str(out), "--resident", "0.5", "--length", "128", "--io", "threads"]
    assert main(["routing", "fit", *arguments, "--tokens", "2000", "--text", *files]) == 0
    printed = capsys.readouterr().out
    assert "routers, 4" in printed and "fitted, 8" in printed and "Use it with MeshConfig(prefetch=" in printed
    # Another file is left as it is, and an earlier predictor is replaced.
    weights = shutil.copy(mesh_tiny / "model.safetensors", tmp_path)
    arguments += ["--tokens", "700", "--text", *files]
    for other in (files[0], weights):
        before = Path(other).read_bytes()
        assert main(["routing", "fit", *arguments, "--out", other]) == 2
        assert f"{other} exists and is no earlier output of this kind" in capsys.readouterr().err
        assert Path(other).read_bytes() == before
    before = out.read_bytes()
    assert main(["routing", "fit", *arguments]) == 0
    assert out.read_bytes() != before
    _generate(mesh_tiny, prefetch=out)


@pytest.mark.parametrize(("words", "length"), [(9, 512), (900, 64), (900, 7)])
def test_the_command_runs_as_many_tokens_as_it_may(mesh_tiny: Path, tmp_path: Path, words: int, length: int) -> None:
    """Whatever the length of documents and sequences is."""
    document = "In the beginning there was " + "a word " * words
    tokens = [len(part) for part in token_sequences(open_tokenizer(mesh_tiny), [document] * 100, length, 1001)]
    assert 1000 <= sum(tokens) <= 1001 and max(tokens) <= length


def test_documents_beyond_enough_tokens_are_not_tokenized() -> None:
    seen = []

    def tokenizer(text: str, verbose: bool) -> dict[str, list[int]]:
        seen.append(text)
        return {"input_ids": [1] * 8}

    assert len(token_sequences(tokenizer, ["a", "b", "c"], 8, 12)) == 2
    assert seen == ["a", "b"]


def test_the_printed_path_is_taken_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    for name in ("predictor", "auto"):
        advised = re.search(r"MeshConfig\(prefetch='(.*)'\)", _verdict([Recall(0, (4,), (0.5,), None)], name, 9, 9))
        assert advised is not None and MeshConfig(prefetch=advised[1]).predictor == f"/tmp/{name}"


def test_the_command_names_what_is_missing_or_wrong(
    mesh_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_mesh.hf.open_model.open_model", lambda *_: pytest.fail("the model was opened"))
    short, strange, binary = tmp_path / "short.txt", tmp_path / "strange.jsonl", tmp_path / "binary"
    short.write_text("In the beginning.")
    strange.write_text('{"text": "a"}\n{"words": 3}\n')
    binary.write_bytes(b"\xff\xfe")
    for text, extra, code, message in (
        (short, [], 2, "but 5 are needed"),
        (strange, [], 1, "strange.jsonl, line 2: not a JSON object with a text"),
        (binary, [], 1, "is not text in UTF-8"),
        (tmp_path / "none", [], 1, "no such file"),
        (short, ["--resident", "0"], 2, "resident=0.0 is not a fraction"),
        (short, ["--out", str(tmp_path / "none" / "out")], 1, "there is no such folder"),
        (TEXT / "prose.jsonl", ["--out", str(tmp_path)], 1, "is a directory"),
        (TEXT / "prose.jsonl", ["--out", "/proc/out"], 1, "/proc/out: no such file"),
    ):
        arguments = ["--text", str(text), "--out", str(tmp_path / "out"), *extra]
        assert main(["routing", "fit", str(mesh_tiny), *arguments]) == code
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
