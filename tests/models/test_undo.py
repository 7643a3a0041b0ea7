"""patch is all or nothing: if an error or Ctrl-C ends it early, the model is as before."""

from __future__ import annotations

import copy
import importlib
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import build, logits_of
from torch_mesh.ops import device as devices
from transformers import PreTrainedModel

import torch_mesh
from torch_mesh import MeshError, _testing
from torch_mesh.gpu import choosing, placing
from torch_mesh.models.families import find_experts
from torch_mesh.modules import experts as modules
from torch_mesh.modules.experts import patched_modules
from torch_mesh.patching import api, expert_source, modes, pipeline, rollback
from torch_mesh.pool.expert_pool import ExpertPool
from torch_mesh.store import convert, writer

PACKAGE = str(Path(torch_mesh.__file__).parent)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, with Triton interpreted, as a device that holds experts."""
    pytest.importorskip("triton")
    importlib.import_module("quick_interpreter")
    monkeypatch.setattr(choosing, "_holds_experts", lambda device: True)
    monkeypatch.setattr(choosing, "_device_memory", lambda device: (3 << 30, 4 << 30))
    monkeypatch.setattr(devices, "open_driver", lambda device: _testing.simulated_device())


class _State:
    """A snapshot of everything in a model that patching changes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules = [(module, type(module), list(vars(module))) for module in model.modules()]
        self.parameters = list(model.named_parameters())
        self.values = {name: parameter.detach().clone() for name, parameter in self.parameters}
        self.wanted = {name: parameter.requires_grad for name, parameter in self.parameters}
        self.config = set(vars(model.config))

    def check(self, model: PreTrainedModel, freed: str | None = None) -> None:
        """``freed``: a part of the names of parameters that may be new objects with the same values."""
        for module, cls, attributes in self.modules:
            assert type(module) is cls
            assert list(vars(module)) == attributes
        now = dict(model.named_parameters())
        assert list(now) == list(self.values)
        for name, parameter in self.parameters:
            assert (freed is not None and freed in name) or now[name] is parameter, name
            assert now[name].device == parameter.device and now[name].requires_grad == self.wanted[name]
            assert torch.equal(now[name], self.values[name]), name
        assert set(vars(model.config)) == self.config


IN_MEMORY: dict[str, Any] = {"resident": 1.0}
ON_DISK: dict[str, Any] = {"resident": 0.4}
ALL: dict[str, Any] = {"dense": "int8", "attention": "mesh", "lossy": {"routing_bias": 0.3, "deferred_experts": 1}}


def _ids() -> torch.Tensor:
    return torch.randint(3, 100, (2, 9))


def _at_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, count: int, error: type[BaseException], after: bool
) -> None:
    """Make the ``count``-th call of a function raise ``error``, before or after the function runs."""
    original, calls = getattr(owner, name), iter(range(1, 1 << 30))

    def failing(*args: Any, **kwargs: Any) -> Any:
        last = next(calls) == count
        if last and not after:
            raise error("injected")
        result = original(*args, **kwargs)
        if last:
            raise error("injected")
        return result

    monkeypatch.setattr(owner, name, failing)


STEPS = [
    (IN_MEMORY, modules, "change_class", 1),
    (IN_MEMORY, pipeline, "install", 1),
    (IN_MEMORY, pipeline, "install", 3),
    (IN_MEMORY | ALL, modes, "attach_quantizer", 1),
    (IN_MEMORY | ALL, modes, "install_lossy", 1),
    (IN_MEMORY | ALL, importlib.import_module("torch_mesh.lossy.decoding"), "change_class", 2),
    (IN_MEMORY | ALL, importlib.import_module("torch_mesh.modules.dense"), "change_class", 3),
    (IN_MEMORY | ALL, modes, "pack_dense", 1),
    (IN_MEMORY | ALL, modes, "install_attention", 1),
    (IN_MEMORY | ALL, modes, "set_config_metadata", 1),
    (ON_DISK, expert_source, "convert_model", 1),
    (ON_DISK | {"weights": "int4"}, pipeline, "install", 2),
    (ON_DISK | {"weights": "int4"}, modes, "connect", 1),
    (ON_DISK | {"weights": "int4"} | ALL, modes, "move_experts", 1),
    (ON_DISK | {"lossy": {"fallback": "int4"}}, pipeline, "open_other", 1),
    (ON_DISK | {"lossy": {"fallback": "int4"}}, pipeline, "install", 3),
]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize(("fields", "owner", "name", "count"), STEPS)
def test_an_error_at_any_step_leaves_the_model_as_it_was(
    fields: dict[str, Any],
    owner: Any,
    name: str,
    count: int,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    cache: Path,
) -> None:
    model, ids = build(), _ids()
    before, plain = _State(model), logits_of(model, ids)
    with monkeypatch.context() as faulty:
        _at_call(faulty, owner, name, count, error, after=bool(rng.integers(2)))
        with pytest.raises(error, match="injected"):
            torch_mesh.patch(model, **fields)
    before.check(model, freed=".experts." if fields["resident"] == 1.0 else None)
    assert torch.equal(logits_of(model, ids), plain)
    assert not cache.exists() or not list(cache.iterdir())
    torch_mesh.patch(model, **fields)
    assert list(patched_modules(model))


class _InterruptAt:
    """Simulates Ctrl-C at the ``line``-th executed line of FILES, which change a model."""

    FILES = tuple(
        f"{PACKAGE}/{name}.py"
        for name in (
            "patching/pipeline",
            "patching/api",
            "patching/modes",
            "modules/experts",
            "modules/dense",
            "lossy/decoding",
            "hf/attention",
            "hf/saving",
            "hf/model_config",
        )
    )

    def __init__(self, line: int | None) -> None:
        self.lines, self._line = 0, line

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self.FILES:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                sys.settrace(None)
                raise KeyboardInterrupt("injected")
        return self

    def __enter__(self) -> _InterruptAt:  # noqa: PYI034  Self is of Python 3.11
        self._previous = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._previous)


@pytest.mark.parametrize("fields", [IN_MEMORY | ALL, ON_DISK | ALL | {"weights": "int4"}])
def test_ctrl_c_at_any_line_leaves_the_model_as_it_was(fields: dict[str, Any], rng: np.random.Generator) -> None:
    model, ids = build(), _ids()
    before, plain = _State(model), logits_of(model, ids)
    with _InterruptAt(None) as counted:
        torch_mesh.patch(copy.deepcopy(model), **fields)
    for line in rng.choice(counted.lines, 12, replace=False) + 1:
        with pytest.raises(KeyboardInterrupt, match="injected"), _InterruptAt(int(line)):
            torch_mesh.patch(model, **fields)
        before.check(model, freed=".experts." if fields["resident"] == 1.0 else None)
    assert torch.equal(logits_of(model, ids), plain)


def test_layers_without_originals_are_unpacked_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(), _ids()
    before = _State(model)
    rounded = torch_mesh.unpatch(torch_mesh.patch(copy.deepcopy(model), weights="int4"), lossy=True)
    with monkeypatch.context() as faulty:
        _at_call(faulty, pipeline, "install", 3, KeyboardInterrupt, after=False)
        with (
            pytest.warns(UserWarning, match="originals of 2 layers.*rounded to int4.*load the model again"),
            pytest.raises(KeyboardInterrupt),
        ):
            torch_mesh.patch(model, weights="int4", resident=1.0)
    assert not list(patched_modules(model))
    given = dict(rounded.named_parameters())
    for name, parameter in model.named_parameters():
        packed = ".experts." in name and not name.startswith("model.layers.2")
        assert torch.equal(parameter, given[name] if packed else before.values[name]), name
    assert logits_of(model, ids).isfinite().all()
    torch_mesh.patch(model, weights="int4", resident=1.0)


@pytest.mark.parametrize("weights", ["bf16", "int4"])
@pytest.mark.parametrize(("name", "layers"), [("install", 2), ("attach_quantizer", 3)])
def test_layers_that_do_not_fit_unpacked_stay_patched(
    name: str, layers: int, weights: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, ids = build(), _ids()
    before = _State(model)
    reference = torch_mesh.patch(copy.deepcopy(model), weights=weights, resident=1.0, dense="none")
    for layer in range(layers, 3):
        reference.model.layers[layer].mlp.experts = copy.deepcopy(model.model.layers[layer].mlp.experts)
    expected = logits_of(reference, ids)
    with monkeypatch.context() as faulty:
        faulty.setattr(rollback, "shortage", lambda needed: 1000 if needed > 1000 else None)
        owner, count = (pipeline, 3) if name == "install" else (modes, 1)
        _at_call(faulty, owner, name, count, KeyboardInterrupt, after=False)
        with (
            pytest.warns(UserWarning, match=rf"memory is short to undo it: {layers} layers.* 1,000 are free.*unpatch"),
            pytest.raises(KeyboardInterrupt),
        ):
            torch_mesh.patch(model, **IN_MEMORY | ALL, weights=weights)
    assert len(list(patched_modules(model))) == layers
    assert model.config.quantization_config.dense == "none"
    assert torch.equal(logits_of(model, ids), expected)
    if weights == "bf16":
        model.save_pretrained(tmp_path / "saved")
        saved = type(model).from_pretrained(tmp_path / "saved")
        assert all(torch.equal(saved.state_dict()[key], value) for key, value in before.values.items())
    with pytest.raises(MeshError, match="patched already"):
        torch_mesh.patch(model)
    torch_mesh.unpatch(model, lossy=weights == "int4")
    if weights == "bf16":
        before.check(model, freed=".experts.")
    assert not list(patched_modules(model))


def test_a_model_restored_in_inference_mode_trains_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(), _ids()
    with torch.inference_mode(), monkeypatch.context() as faulty:
        _at_call(faulty, modes, "install_caches", 1, OSError, after=True)
        with pytest.raises(OSError, match="injected"):
            torch_mesh.patch(model, **IN_MEMORY)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(layer.mlp.gate.weight.grad.any() for layer in model.model.layers)


def test_a_failed_patch_removes_its_named_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    fields: dict[str, Any] = {
        "store": tmp_path / "store",
        "weights": "int8",
        "lossy": {"fallback": "int4"},
        "resident": 0.6,
    }
    with monkeypatch.context() as faulty:
        _at_call(faulty, modes, "connect", 1, OSError, after=True)
        with pytest.raises(OSError, match="injected"):
            torch_mesh.patch(model, **fields)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("store")] == []
    torch_mesh.patch(model, **fields)
    assert (tmp_path / "store").is_dir() and (tmp_path / "store-int4").is_dir()
    with pytest.raises(MeshError, match="patched already"):  # this error leaves both stores
        torch_mesh.patch(model, **fields)
    other = build()
    with pytest.raises(torch_mesh.StoreError, match="has another store.*remove this one") as caught:
        torch_mesh.patch(other, **fields)
    assert "--force" not in str(caught.value)  # patch has no such option
    assert (tmp_path / "store").is_dir() and (tmp_path / "store-int4").is_dir()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize(
    ("owner", "name"), [(convert, "pack_expert"), (writer, "move_into_place"), (convert, "write_store")]
)
def test_a_failed_patch_removes_its_unfinished_store(
    owner: Any,
    name: str,
    error: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    model = build()
    with monkeypatch.context() as faulty:
        count = 5 if name == "pack_expert" else 1
        _at_call(faulty, owner, name, count, error, after=name == "write_store" or bool(rng.integers(2)))
        with pytest.raises(error, match="injected"):
            torch_mesh.patch(model, store=tmp_path / "store", resident=0.4)
    assert [path.name for path in tmp_path.iterdir() if "store" in path.name] == []


def test_a_failed_patch_keeps_the_unfinished_store_of_another_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, partial = build(), tmp_path / ".store.partial"
    with monkeypatch.context() as faulty:
        _at_call(faulty, convert, "pack_expert", 5, KeyboardInterrupt, after=False)
        with pytest.raises(KeyboardInterrupt):
            convert.convert_model(model, tmp_path / "store", "int8")
    left = sorted(path.name for path in partial.iterdir())
    with monkeypatch.context() as faulty:
        _at_call(faulty, writer, "check_free_space", 1, OSError, after=False)
        with pytest.raises(OSError, match="injected"):
            torch_mesh.patch(model, store=tmp_path / "store", resident=0.4)
    assert left == sorted(path.name for path in partial.iterdir()) != []


def test_a_store_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = build(), tmp_path / "store"
    with monkeypatch.context() as faulty:
        _at_call(faulty, modes, "connect", 1, KeyboardInterrupt, after=True)
        _at_call(faulty, rollback, "remove_made_from", 1, PermissionError, after=False)
        with (
            pytest.warns(UserWarning, match=r"cannot be removed \(injected\). Remove .*/store "),
            pytest.raises(KeyboardInterrupt),
        ):
            torch_mesh.patch(model, store=store, resident=0.4)
    assert store.is_dir() and not list(patched_modules(model))


def test_ctrl_c_interrupts_closing_pools_after_the_model_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, closed, original = build(), [], ExpertPool.close
    before = _State(model)

    def interrupted(pool: ExpertPool) -> None:
        before.check(model)
        original(pool)
        closed.append(pool)
        if len(closed) == 1:
            signal.raise_signal(signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    with monkeypatch.context() as faulty:
        _at_call(faulty, modes, "connect", 1, OSError, after=True)
        faulty.setattr(ExpertPool, "close", interrupted)
        with pytest.raises(KeyboardInterrupt) as ended:
            torch_mesh.patch(model, store=tmp_path / "store", resident=0.6, weights="int8", lossy={"fallback": "int4"})
    signal.signal(signal.SIGINT, handler)
    assert any(entry.name == "interrupted" for entry in ended.traceback)  # not only after all pools were closed
    assert len(closed) == 2 and [path for path in tmp_path.iterdir() if "store" in path.name] == []


@pytest.mark.filterwarnings("error:Patching ended early")
def test_a_warning_raised_as_an_error_does_not_stop_the_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    _at_call(monkeypatch, modes, "attach_quantizer", 1, OSError, after=True)
    with pytest.raises(UserWarning, match="Patching ended early"):
        torch_mesh.patch(model, weights="int4", resident=1.0)
    assert not list(patched_modules(model)) and logits_of(model, _ids()).isfinite().all()


def test_ctrl_c_during_the_rollback_is_raised_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    before = _State(model)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    with monkeypatch.context() as faulty:
        _at_call(faulty, modes, "attach_quantizer", 1, OSError, after=True)
        original = rollback.restored_parameters

        def interrupted(*args: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return original(*args)

        faulty.setattr(rollback, "restored_parameters", interrupted)
        with pytest.raises(KeyboardInterrupt):
            torch_mesh.patch(model, resident=1.0)
    before.check(model, freed=".experts.")
    assert signal.signal(signal.SIGINT, handler) is signal.default_int_handler


@pytest.mark.device
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("fields", [IN_MEMORY, ON_DISK])
def test_a_failure_of_the_card_leaves_the_model_as_it_was(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    model, ids = build(), _ids()
    before, plain = _State(model), logits_of(model, ids)
    with monkeypatch.context() as faulty:
        name, count = ("_copy_layer", 2) if rng.integers(2) else ("register", 2)
        _at_call(faulty, placing, name, count, MemoryError, after=bool(rng.integers(2)))
        with pytest.raises(MemoryError, match="injected"):
            torch_mesh.patch(model, gpu={"experts": 3}, **fields)
    before.check(model, freed=".experts." if fields["resident"] == 1.0 else None)
    assert torch.equal(logits_of(model, ids), plain)


@pytest.mark.parametrize("fields", [IN_MEMORY | ALL, ON_DISK | ALL])
def test_unpatch_resumes_after_ctrl_c_at_any_line(fields: dict[str, Any], rng: np.random.Generator) -> None:
    model = build()
    fields = fields | {"dense": "bf16"}
    before = _State(model)
    torch_mesh.patch(model, **fields)
    with _InterruptAt(None) as counted:
        torch_mesh.unpatch(model)
    before.check(model, freed="")
    for line in [*(rng.choice(counted.lines, 5, replace=False) + 1), counted.lines]:
        torch_mesh.patch(model, **fields)
        with pytest.raises(KeyboardInterrupt, match="injected"), _InterruptAt(int(line)):
            torch_mesh.unpatch(model)
        try:
            torch_mesh.unpatch(model)
        except MeshError as error:  # unpatching was already complete, as is checked below
            assert "not patched" in str(error)
        before.check(model, freed="")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (importlib.import_module("torch_mesh.modules.dense"), "restore_class"),
        (importlib.import_module("torch_mesh.lossy.decoding"), "restore_class"),
        (modules, "change_class"),
        (modes, "restore_dense"),
        (modes, "uninstall_lossy"),
        (modes, "clear_config_metadata"),
    ],
)
def test_unpatch_resumes_after_an_interrupted_step(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(), _ids()
    before, plain = _State(model), logits_of(model, ids)
    for after in (False, True):
        torch_mesh.patch(model, resident=1.0, **ALL | {"dense": "bf16"})
        with monkeypatch.context() as faulty:
            _at_call(faulty, owner, name, 1, KeyboardInterrupt, after=after)
            with pytest.raises(KeyboardInterrupt):
                torch_mesh.unpatch(model)
        torch_mesh.unpatch(model)
        before.check(model, freed="")
    assert torch.equal(logits_of(model, ids), plain)


def test_a_partly_unpatched_model_is_refused_by_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    torch_mesh.patch(model, resident=1.0)
    with monkeypatch.context() as faulty:
        _at_call(faulty, modules, "change_class", 3, KeyboardInterrupt, after=True)
        with pytest.raises(KeyboardInterrupt):
            torch_mesh.unpatch(model)
    assert len(find_experts(model)) == len(find_experts(build()))
    with pytest.raises(MeshError, match="patched already.*unpatch"):
        torch_mesh.patch(model)
    torch_mesh.patch(torch_mesh.unpatch(model), resident=1.0)


def test_unpatch_resumes_after_an_interrupted_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(), _ids()
    before, plain = _State(model), logits_of(model, ids)
    torch_mesh.patch(model, resident=0.4, dense="bf16", lossy={"routing_bias": 0.3})
    with monkeypatch.context() as faulty:
        _at_call(faulty, api, "restore", 2, KeyboardInterrupt, after=False)
        with pytest.raises(KeyboardInterrupt):
            torch_mesh.unpatch(model)
    torch_mesh.unpatch(model)
    before.check(model, freed="")
    assert torch.equal(logits_of(model, ids), plain)
