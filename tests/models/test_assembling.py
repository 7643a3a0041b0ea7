"""A step that fails while a model is patched or opened leaves nothing behind."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import every_other_quick
from tiny_models import TINY_MODELS
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import MeshConfig, PoolClosedError
from torch_mesh.modules.experts import PackedModule
from torch_mesh.patching import modes, pipeline
from torch_mesh.patching.rollback import Undo
from torch_mesh.store.convert import convert

MODES: dict[str, Any] = {"dense": "bf16", "attention": "mesh"}
FIELDS: dict[str, dict[str, Any]] = {
    "patch in memory": MODES | {"resident": 1.0, "lossy": {"routing_bias": 0.3, "deferred_experts": 1}},
    "patch on disk": MODES | {"resident": 0.6, "lossy": {"routing_bias": 0.3, "fallback": "int4"}},
    "raw checkpoint": MODES | {"resident": 0.6, "lossy": {"routing_bias": 0.3, "fallback": "int4"}},
    "converted": MODES | {"resident": 0.6, "lossy": {"routing_bias": 0.3, "fallback": "int4"}},
    "one layer of a store": {"resident": 0.5},
}
# Functions that run in every way but the last.
ALWAYS = {
    "check_forwards",
    "choose_experts",
    "pool_slots",
    "pack_dense",
    "install",
    "install_lossy",
    "move_experts",
    "set_config_metadata",
}


@pytest.fixture
def ways(tmp_path: Path) -> dict[str, Callable[[], Any]]:
    original = TINY_MODELS["Qwen3MoeExperts"].build()
    original.save_pretrained(tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "converted", "int8")

    def opened(folder: str, way: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(tmp_path / folder, quantization_config=MeshConfig(**FIELDS[way]))

    return {
        "patch in memory": lambda: torch_mesh.patch(original, **FIELDS["patch in memory"]),
        "patch on disk": lambda: torch_mesh.patch(original, **FIELDS["patch on disk"]),
        "raw checkpoint": lambda: opened("raw", "raw checkpoint"),
        "converted": lambda: opened("converted", "converted"),
        "one layer of a store": lambda: torch_mesh.Experts.from_store(
            tmp_path / "converted", 1, **FIELDS["one layer of a store"]
        ),
    }


class _Steps:
    """Counts the calls of the functions of the pipeline. ``fails`` makes one call raise an error, before or after the
    function runs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.pools: list[Any] = []
        self.fails: tuple[str, int, bool, BaseException] | None = None
        for module in (pipeline, modes):
            for name, value in vars(module).items():
                if (inspect.isfunction(value) or name == "ExpertPool") and name not in (
                    "undone_on_error",
                    "check",
                    "assemble",
                ):
                    patch.setattr(module, name, self._counted(name, value))
        original = Undo.closing
        patch.setattr(Undo, "closing", lambda undo, pool: (self.pools.append(pool), original(undo, pool))[1])

    def _counted(self, name: str, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            fails = self.fails if self.fails and self.fails[:2] == (name, self.calls[name]) else None
            if fails and not fails[2]:
                raise fails[3]
            result = original(*args, **kwargs)
            if fails:
                raise fails[3]
            return result

        return counted


@pytest.mark.parametrize("way", every_other_quick(FIELDS, 0))
def test_a_step_that_fails_leaves_nothing_behind(
    way: str, ways: dict[str, Callable[[], Any]], cache: Path, rng: np.random.Generator
) -> None:
    def run(model: Any) -> torch.Tensor:
        with torch.no_grad():
            if isinstance(model, torch_mesh.Experts):
                x, weights = torch.ones(2, 72, dtype=torch.bfloat16), torch.ones(2, 3)
                return model(x, torch.arange(6).view(2, 3), weights)
            return model(input_ids=ids, use_cache=False).logits

    ids = torch.randint(3, 100, (2, 9))
    with pytest.MonkeyPatch.context() as patch:
        counted = _Steps(patch)
        expected = run(model := ways[way]())
    if isinstance(model, PreTrainedModel):
        assert counted.calls.keys() >= ALWAYS
    if way.startswith("patch"):
        torch_mesh.unpatch(model)
        plain = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    del model
    before = sorted(path.name for path in cache.rglob("*"))
    for name, calls in counted.calls.items():
        error = [KeyboardInterrupt, OSError][rng.integers(2)]("injected")
        with pytest.MonkeyPatch.context() as patch:
            faulty = _Steps(patch)
            faulty.fails = (name, int(rng.integers(calls)) + 1, bool(rng.integers(2)), error)
            with pytest.raises(type(error), match="injected") as raised:
                ways[way]()
        assert raised.value is error
        for pool in faulty.pools:
            with pytest.raises(PoolClosedError):
                pool.engine.read_record(0, 0)
        assert sorted(path.name for path in cache.rglob("*")) == before, name
    model = ways[way]()
    assert torch.equal(run(model), expected)
    if way.startswith("patch"):
        torch_mesh.unpatch(model)
        assert not any(isinstance(module, PackedModule) for module in model.modules())
        assert all(torch.equal(parameter, plain[name]) for name, parameter in model.state_dict().items())


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"lossy": {"deferred_experts": 9}}, "deferred_experts"),
        ({"lossy": {"fallback": "int8"}}, "fallback"),
        ({"gpu": {"weights": "int4"}}, "gpu.weights"),
        ({"residency": {"pins": 0.5}}, "early_experts"),
        ({"resident": 4096}, "resident"),
    ],
)
def test_fields_are_refused_before_anything_is_written(
    fields: dict[str, Any], name: str, tmp_path: Path, cache: Path
) -> None:
    model = TINY_MODELS["Qwen3MoeExperts"].build()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=name):
        torch_mesh.patch(model, **{"weights": "int8", "resident": 0.5} | fields)
    with pytest.raises(ValueError, match=name):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MeshConfig(weights="int8", **fields))
    assert not cache.exists()
