"""Makes PEFT put our wrapper around experts that are in a pool, whoever wrote the LoraConfig and when.

PEFT's extension point is ``LoraConfig._register_custom_module``, a mapping that belongs to one config and is not saved with it. It is filled in
where a config meets such experts.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_MODULE = "peft.tuners.lora.model"


def register_with_peft() -> None:
    """Now if PEFT is imported, or else when it will be: torch_mesh does not import it for its own sake."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _extend(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_extend(module: ModuleType) -> None:
                execute(module)
                _extend(module)

            spec.loader.exec_module = execute_and_extend  # type: ignore[method-assign]
        return spec


def _extend(module: ModuleType) -> None:
    lora_model: Any = module.LoraModel
    create = lora_model._create_new_module
    if hasattr(create, "_mesh_original"):
        return

    @functools.wraps(create)
    def create_new_module(lora_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        from ..modules import MeshExperts

        experts = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        if isinstance(experts, MeshExperts):
            wrapper = importlib.import_module(".wrapper", __package__)
            lora_config._register_custom_module({MeshExperts: wrapper.ParamWrapper})
        return create(lora_config, adapter_name, target, **kwargs)

    create_new_module._mesh_original = create  # type: ignore[attr-defined]
    lora_model._create_new_module = staticmethod(create_new_module)
