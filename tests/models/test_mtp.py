"""``generate(use_mtp=True)`` of patched models: the heads are built once and kept, with their experts in a pool."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from pairs import each_once_quick, first_quick
from safetensors.torch import load_file, save_file
from tiny_models import ALL_EXPERTS, TINY_MODELS
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig, MeshError, UnsupportedModelError
from torch_mesh.modules.dense import packed_linears
from torch_mesh.modules.experts import pools_of
from torch_mesh.speculation import mtp
from torch_mesh.speculation.controller import Controller
from torch_mesh.store.convert import convert

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="this transformers does not draft with these heads"
)

# For each family: its class of experts, config fields, the checkpoint's name for a head's layer, and a head's other
# weights.
_FAMILIES: dict[str, tuple[str, dict[str, Any], str, dict[str, str]]] = {
    "Mellum": (
        "MellumExperts",
        {
            "num_nextn_predict_layers": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "mtp.layers.{}.",
        {
            "mtp.fc": "eh_proj",
            "mtp.pre_fc_norm_embedding": "norm",
            "mtp.pre_fc_norm_hidden": "norm",
            "mtp.norm": "norm",
        },
    ),
    **{
        f"GLM with {heads}": (
            "Glm4MoeExperts",
            {"num_nextn_predict_layers": heads},
            "model.layers.{}.",
            {"{}eh_proj": "eh_proj", "{}enorm": "norm", "{}hnorm": "norm", "{}shared_head.norm": "norm"},
        )
        for heads in (1, 2)
    },
}


@pytest.fixture(params=["Mellum", "GLM with 2", pytest.param("GLM with 1", marks=pytest.mark.thorough)])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose heads have the weights of the last layer."""
    name, fields, named, others = _FAMILIES[request.param]
    tiny = TINY_MODELS[name]
    model = dataclasses.replace(tiny, fields={**tiny.fields, **fields}).build()
    layers = model.config.num_hidden_layers
    if named.startswith("model."):  # transformers knows only the layer numbers of published models
        pattern = (
            rf"model\.layers\.({'|'.join(str(layers + i) for i in range(fields['num_nextn_predict_layers']))})\..*"
        )
        monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [pattern])
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    hidden = model.config.hidden_size
    last = f"model.layers.{layers - 1}."
    whole = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)  # passes on the hidden state only
    values = {"norm": torch.ones(hidden), "eh_proj": whole}
    heads = {}
    for i in range(fields["num_nextn_predict_layers"]):
        layer = named.format(layers + i if named.startswith("model.") else i)
        heads |= {each.replace(last, layer): weights[each].clone() for each in weights if each.startswith(last)}
        heads |= {f"{each.format(layer)}.weight": values[kind].to(torch.bfloat16) for each, kind in others.items()}
    save_file(weights | {each: value.contiguous() for each, value in heads.items()}, file, metadata={"format": "pt"})
    return tmp_path


class Scripted(Controller):
    """A controller that drafts where ``drafts`` says so, by default always. It keeps its observations."""

    def __init__(self, lengths: Sequence[int], drafts: Iterator[bool] | None = None) -> None:
        super().__init__(lengths)
        self.drafts = itertools.repeat(True) if drafts is None else drafts
        self.observations: list[tuple[int, int, float | None]] = []

    def choose(self, most: int, tier: int = 0) -> int:
        return most if next(self.drafts) else 0

    def observe(self, length: int, accepted: int, seconds: float | None, tier: int = 0) -> None:
        self.observations.append((length, accepted, seconds))


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always drafts. By measured time heads of such a small model would never pay."""
    monkeypatch.setattr(mtp, "Controller", Scripted)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Weak references to all heads that were built."""
    found: list[Any] = []
    built = mtp.MtpModel.from_pretrained

    def counted(*args: Any, **kwargs: Any) -> Any:
        heads = built(*args, **kwargs)
        found.append(weakref.ref(heads))
        return heads

    monkeypatch.setattr(mtp.MtpModel, "from_pretrained", counted)
    return found


def _loaded(folder: Path, **fields: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **fields)


def _patched(folder: Path, **fields: Any) -> PreTrainedModel:
    return torch_mesh.patch(_loaded(folder), **{"resident": 0.5, "attention": "mesh", "dense": "bf16"} | fields)


def _generate(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    ids = torch.arange(5, 25)[None]
    settings = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=ids, **settings | options)


def _check(model: PreTrainedModel, **options: Any) -> None:
    """Check that tokens with heads are those without. GLM's router is in fp32 and may choose differently for several
    rows than for one, so there only most tokens have to agree."""
    found = _generate(model, use_mtp=True, **options)
    if model.config.model_type != "glm4_moe":
        assert torch.equal(found, _generate(model, **options))
        return
    with torch.no_grad():
        predicted = model(found).logits[:, 19:-1].argmax(-1)
    assert (predicted == found[:, 20:]).float().mean() >= 0.8


def _forwards(model: PreTrainedModel, **options: Any) -> tuple[torch.Tensor, int]:
    count = 0

    def seen(*_: Any) -> None:
        nonlocal count
        count += 1

    handle = model.register_forward_pre_hook(seen)
    tokens = _generate(model, **options)
    handle.remove()
    return tokens, count


def test_correct_drafts_save_forwards(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"].zero_()  # the model and its heads always choose the same token
    save_file(weights, file, metadata={"format": "pt"})
    found, forwards = _forwards(_patched(folder), use_mtp=True, max_new_tokens=90)
    assert found.shape == (1, 110) and forwards <= 46


def test_heads_are_built_once_and_tokens_are_those_of_plain_decoding(folder: Path, loads: list[Any]) -> None:
    model = _patched(folder)
    names, parameters = set(model.state_dict()), sum(1 for _ in model.parameters())
    for _ in range(3):
        _check(model)
    assert len(loads) == 1
    experts = next(module for module in loads[0]().modules() if hasattr(module, "_mesh_pool"))
    pool = experts._mesh_pool
    assert pool.weights == "int8" and pool.slots < 8 * pool.layers and pool.engine.stats()["bytes_read"].sum() > 0
    assert set(model.state_dict()) == names and sum(1 for _ in model.parameters()) == parameters
    _generate(model, use_mtp=True, prompt_lookup_num_tokens=3)  # prompt lookup takes precedence, as in transformers
    torch.manual_seed(3)
    assert _generate(model, use_mtp=True, do_sample=True).shape == (1, 70)


def test_heads_take_no_variables_of_the_environment(
    folder: Path, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _patched(folder)
    for name, value in (
        ("DEFERRED_EXPERTS", "1"),
        ("ROUTING_BIAS", "0.5"),
        ("FALLBACK", "int8"),
        ("GPU_EXPERTS", "2"),
        ("EARLY_EXPERTS", "1,4"),
        ("DENSE", "int4"),
        ("GROUP_SIZE", "32"),
    ):
        monkeypatch.setenv(f"TORCH_MESH_{name}", value)
    _generate(model, use_mtp=True, max_new_tokens=4)
    stats = torch_mesh.stats(loads[0]())
    assert not stats.lossy and not stats.early
    assert {pool.group_size for pool in pools_of(loads[0]())} == {64}
    assert all(linear.exact for _, linear in packed_linears(loads[0]()))


def _candidates(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, dict[int, list[int]]]:
    """The generated tokens, and the drafts by the number of tokens before them."""
    drafted: dict[int, list[int]] = {}
    get = mtp.KeptHeads.get_candidates

    def seen(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = get(self, input_ids, *args, **kwargs)
        drafted[input_ids.shape[1]] = found[0][0, input_ids.shape[1] :].tolist()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(mtp.KeptHeads, "get_candidates", seen)
        return _generate(model, use_mtp=True, max_new_tokens=90), drafted


@pytest.mark.parametrize("folder", first_quick("GLM with 2", "GLM with 1", "Mellum"), indirect=True)
def test_heads_draft_the_same_after_pauses(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    model = torch_mesh.patch(_loaded(folder, **ALL_EXPERTS), resident=1.0, attention="mesh", dense="bf16")
    expected, steady = _candidates(model, monkeypatch)
    coin = random.Random(seed)
    # Stretches without and with drafts of random lengths. The first one, without, includes the prompt.
    pattern = (on for on in itertools.cycle([False, True]) for _ in range(coin.randint(1, 6)))
    made_for, heads, controller = vars(model)[mtp._KEPT]
    vars(model)[mtp._KEPT] = (made_for, heads, Scripted(controller.lengths, pattern))
    found, pausing = _candidates(model, monkeypatch)
    assert any(pausing.values()) and sum(not each for each in pausing.values()) > 3
    length = next((i for i in range(expected.shape[1]) if expected[0, i] != found[0, i]), expected.shape[1])
    both = [place for place in steady.keys() & pausing.keys() if place <= length and pausing[place] and steady[place]]
    same = [steady[place] == pausing[place] for place in both]
    # Texts that differ early, at two logits that are equal in bf16, have few places in common.
    assert len(both) > min(5, (length - 20) // 8), (length, steady, pausing)
    assert sum(same) >= 0.8 * len(same), (steady, pausing)


@pytest.mark.parametrize(
    ("folder", "seconds"), each_once_quick(["GLM with 2", "Mellum", "GLM with 1"], [0.5, 4.0]), indirect=["folder"]
)
def test_heads_draft_only_if_it_pays(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """``seconds`` is the time of a verifying forward. Any other takes 1."""
    monkeypatch.setattr(mtp, "Controller", Controller)
    model = _patched(folder)
    took: list[float] = []
    monkeypatch.setattr(mtp, "clock", lambda: sum(took))

    def seen(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        took.append(1.0 if inputs["input_ids"].shape[1] == 1 else seconds)

    handle = model.register_forward_pre_hook(seen, with_kwargs=True)
    for _ in range(3):
        took.append(-seconds)  # the prompt's forward does not count
        _generate(model, use_mtp=True)
    handle.remove()
    drafts = took.count(seconds) - 3
    if seconds > 1:  # at most a twentieth of 3 x 50 is lost, and the trial that was begun within it
        assert drafts > 0 and sum(took) <= 1.05 * 3 * 50 + seconds
    else:
        assert drafts >= 0.9 * (len(took) - 6)


@pytest.mark.parametrize("folder", first_quick("GLM with 2", "GLM with 1", "Mellum"), indirect=True)
def test_heads_work_with_converted_folders(folder: Path, loads: list[Any], tmp_path: Path) -> None:
    fields = {"resident": 0.5, "attention": "mesh", "dense": "bf16"}
    model = _loaded(folder, quantization_config=MeshConfig(weights="int8", **fields))
    _check(model)
    store = tmp_path / "store"
    convert(folder, store, "int8")
    again = _loaded(store, quantization_config=MeshConfig(**fields))
    for _ in range(2):
        _check(again)
    assert len(loads) == 2


def test_heads_are_freed_with_their_model(no_collector: None, folder: Path, loads: list[Any]) -> None:
    model = _patched(folder)
    _generate(model, use_mtp=True)
    pool = weakref.ref(pools_of(model)[0])
    del model
    assert pool() is None and loads[0]() is None


def test_heads_are_freed_by_unpatch(folder: Path, loads: list[Any]) -> None:
    model = _patched(folder)
    _generate(model, use_mtp=True)
    copied = copy.deepcopy(model)
    _check(copied)
    del copied
    torch_mesh.unpatch(model, lossy=True)
    assert loads[0]() is None and not any("mtp" in name or "heads" in name for name in vars(model))
    before = len(loads)
    for _ in range(2):
        _generate(model, use_mtp=True)
    assert len(loads) == before + 2, "an unpatched model does not do as transformers does"


@pytest.mark.parametrize("folder", first_quick("Mellum", "GLM with 1", "GLM with 2"), indirect=True)
def test_a_cast_rebuilds_the_heads(folder: Path, loads: list[Any]) -> None:
    model = _patched(folder, dense="none", attention="model")
    _generate(model, use_mtp=True)
    model.float()
    _generate(model, use_mtp=True)
    assert len(loads) == 2 and loads[0]() is None
    assert next(loads[1]().layers.parameters()).dtype == torch.float32


def test_heads_that_do_not_fit_into_memory_are_refused(
    folder: Path, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _patched(folder)
    message = r"take [\d,]+ bytes until their experts are packed, and 1,000 are free"
    with monkeypatch.context() as patched, pytest.raises(MeshError, match=message):
        patched.setattr("torch_mesh.system.memory.available_bytes", lambda: 1000)
        _generate(model, use_mtp=True)
    assert not loads
    _check(model)
    assert len(loads) == 1


def test_heads_are_refused_for_a_model_divided_among_ranks(folder: Path, loads: list[Any]) -> None:
    model = _patched(folder)
    model.config.distributed_config = {"tp_size": 2, "ep_size": 2}
    with pytest.raises(UnsupportedModelError, match="distributed among processes, whose clocks .* Leave use_mtp out"):
        _generate(model, use_mtp=True)
    assert not loads


def test_models_without_heads_are_refused() -> None:
    model = torch_mesh.patch(TINY_MODELS["Qwen3MoeExperts"].build(), resident=0.5)
    with pytest.raises(ValueError, match="num_mtp_layers"):
        _generate(model, use_mtp=True)
