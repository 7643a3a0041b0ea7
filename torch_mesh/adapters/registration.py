"""Makes PEFT put our wrapper around experts that are in a pool, whoever wrote the LoraConfig and when.

PEFT's extension point is ``LoraConfig._register_custom_module``, a mapping that belongs to one config and is not saved with it. It is filled in
where a config meets such experts.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


def register() -> None:
    """Called once PEFT has been imported."""
    lora_model: Any = importlib.import_module("peft.tuners.lora.model").LoraModel
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
