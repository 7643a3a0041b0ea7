"""Lets programs that do not import torch_mesh open its checkpoints.

torch calls ``register`` at the end of its import (entry points of the group ``torch.backends``). It stands outside of
the package, whose import loads the extension, and would come too late for programs that do import it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from typing import Any

# All that opens a model, a quantized config or a GGUF file imports one of these.
_AWAITED = ("transformers.quantizers.auto", "transformers.integrations.gguf")
_registered = False


def register() -> None:
    """Watch for transformers. Imports nothing else, and raises nothing: torch would not import."""
    global _registered
    if _registered or "torch_mesh" in sys.modules:
        return
    _registered = True
    try:
        _hooks().AfterImport(_AWAITED, ["transformers"], _import_torch_mesh).watch(in_progress=True)
    except Exception as error:  # noqa: BLE001  the program may have no use for it
        _warn(error)


def _hooks() -> Any:
    """The module torch_mesh.hf.import_hooks, without its package."""
    package = importlib.util.find_spec("torch_mesh")
    if package is None or not package.submodule_search_locations:
        raise ImportError("there is no torch_mesh")
    path = os.path.join(package.submodule_search_locations[0], "hf", "import_hooks.py")
    spec = importlib.util.spec_from_file_location("torch_mesh_import_hooks", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_torch_mesh() -> None:
    before = list(sys.meta_path)
    try:
        package: Any = importlib.import_module("torch_mesh")  # whose own hooks find transformers imported
        if package._unusable is not None:
            _warn(package._unusable)
    except Exception as error:  # noqa: BLE001  the program may have no use for it
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder in before]  # or its hooks would try again
        _warn(error)


def _warn(error: Exception) -> None:
    logging.getLogger("torch_mesh").warning("torch_mesh does not import, and opens no models here: %s", error)
