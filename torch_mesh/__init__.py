"""Mixture-of-Experts models that do not fit in memory, run in place.

>>> import torch_mesh
>>> from transformers import AutoModelForCausalLM
>>> model = AutoModelForCausalLM.from_pretrained(path, quantization_config=torch_mesh.MeshConfig(resident="8GiB"))
>>> print(torch_mesh.stats(model))

Importing the package registers its ops with torch and its checkpoints with transformers, now or when these are
imported. It imports neither until one of its names is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any

from torch_mesh.errors import (
    ChecksumError,
    DeviceError,
    ForkedProcessError,
    HubError,
    LostRankError,
    MeshError,
    PoolClosedError,
    ReadError,
    ReadTimeoutError,
    StoreError,
    UnsupportedModelError,
)
from torch_mesh.hf.import_hooks import AfterImport
from torch_mesh.version import __version__

if TYPE_CHECKING:
    from torch_mesh.adapters.merging import merge
    from torch_mesh.adapters.report import describe_training
    from torch_mesh.adapters.trainer import MeshTrainerCallback
    from torch_mesh.config import MeshConfig
    from torch_mesh.gpu.device_work import capture_batch_sizes, place_experts, set_capture_batch_sizes, synchronize
    from torch_mesh.gpu.placement import hottest_experts
    from torch_mesh.hf.compile import compile
    from torch_mesh.modules.packed_weight import PackedWeight
    from torch_mesh.patching.api import patch, unpatch
    from torch_mesh.patching.single_layer import Experts
    from torch_mesh.routing.recording import record_trace
    from torch_mesh.routing.traces import load_trace
    from torch_mesh.serving.cached_generate import cache_prefixes
    from torch_mesh.speculation.decoding import speculate
    from torch_mesh.statistics.stats import reset_stats, save_profile, stats
    from torch_mesh.statistics.watch import watch
    from torch_mesh.store.convert import convert

__all__ = [
    "ChecksumError",
    "DeviceError",
    "Experts",
    "ForkedProcessError",
    "HubError",
    "LostRankError",
    "MeshConfig",
    "MeshError",
    "MeshTrainerCallback",
    "PackedWeight",
    "PoolClosedError",
    "ReadError",
    "ReadTimeoutError",
    "StoreError",
    "UnsupportedModelError",
    "__version__",
    "cache_prefixes",
    "capture_batch_sizes",
    "compile",
    "convert",
    "describe_training",
    "hottest_experts",
    "load_trace",
    "merge",
    "patch",
    "place_experts",
    "record_trace",
    "reset_stats",
    "save_profile",
    "set_capture_batch_sizes",
    "speculate",
    "stats",
    "synchronize",
    "unpatch",
    "watch",
]


_WHERE = {
    "Experts": "patching.single_layer",
    "MeshConfig": "config",
    "MeshTrainerCallback": "adapters.trainer",
    "PackedWeight": "modules.packed_weight",
    "cache_prefixes": "serving.cached_generate",
    "capture_batch_sizes": "gpu.device_work",
    "compile": "hf.compile",
    "convert": "store.convert",
    "describe_training": "adapters.report",
    "hottest_experts": "gpu.placement",
    "load_trace": "routing.traces",
    "merge": "adapters.merging",
    "patch": "patching.api",
    "place_experts": "gpu.device_work",
    "record_trace": "routing.recording",
    "reset_stats": "statistics.stats",
    "save_profile": "statistics.stats",
    "set_capture_batch_sizes": "gpu.device_work",
    "speculate": "speculation.decoding",
    "stats": "statistics.stats",
    "synchronize": "gpu.device_work",
    "unpatch": "patching.api",
    "watch": "statistics.watch",
}

# `torch-mesh doctor` has to run without the extension, so importing the package does not need it. Every name that needs
# it raises this error.
_unusable: ImportError | None = None

_HOW_TO_BUILD = (
    "Install the torch_mesh wheel for it, or build one here: pip install --no-cache-dir torch_mesh-*.tar.gz, or `make "
    "build` in a checkout."
)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _stated_torch() -> str | None:
    """The minor version of torch in the package's own version, such as 0.1.0+torch2.15."""
    from importlib import metadata  # slow to import, and needed only here

    try:
        return metadata.version("torch_mesh").partition("+torch")[2] or None
    except metadata.PackageNotFoundError:  # a checkout that was built in place
        return None


def _load_extension() -> None:
    """Import torch_mesh._C and register the ops, if it was built against the running torch, whose C++ classes have
    no stable ABI."""
    import torch

    global _unusable
    cause: Exception | None = None
    try:
        from torch_mesh import _C

        built = _C.torch_version
        if _minor(built) == _minor(torch.__version__):
            importlib.import_module("torch_mesh.ops")
            return
    except Exception as error:  # noqa: BLE001  if it were raised here, torch itself could not be imported
        # An extension for another torch may lack a symbol.
        built, cause = _stated_torch() or torch.__version__, error
    advice = _HOW_TO_BUILD
    if _is_of_checkout(cause):
        folder = os.path.dirname(os.path.abspath(__file__))
        reason = f"{folder} is torch_mesh's source folder, and has no extension"
        advice = (
            "Python found the sources of torch_mesh instead of an installed package: start it in another folder, or "
            f"build in place: pip install -e {os.path.dirname(folder)}, or `make build`."
        )
    elif _minor(built) == _minor(torch.__version__):
        reason = f"torch_mesh's extension does not load with torch {torch.__version__}: {cause}"
    else:
        reason = f"torch_mesh was built against torch {built}, and torch {torch.__version__} is loaded"
    _unusable = ImportError(f"{reason}. {advice}")
    _unusable.__cause__ = cause


def _is_of_checkout(error: Exception | None) -> bool:
    """Whether a compiled or generated part is missing because Python imported a checkout's sources that were never
    built."""
    missing = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(f"{__name__}.")
    return missing and os.path.exists(os.path.join(os.path.dirname(__file__), os.pardir, "setup.py"))


def _register_with_transformers() -> None:
    from transformers.utils import logging as theirs

    # torch_mesh's log messages follow transformers' settings: set_verbosity_info(), TRANSFORMERS_VERBOSITY.
    logging.getLogger(__name__).parent = theirs.get_logger()  # type: ignore[assignment]
    if _unusable is None:
        importlib.import_module("torch_mesh.patching.quantizer")


def _open_known_types() -> None:
    if _unusable is None:
        importlib.import_module("torch_mesh.hf.known_types")


_torch = AfterImport(["torch"], ["torch"], _load_extension)
_torch.watch()
# transformers reads config.json before it imports what the next hook awaits.
AfterImport(["transformers.configuration_utils"], ["transformers", "torch_mesh"], _open_known_types).watch()
# Opening a model, a quantized config or the config of a GGUF file imports one of these.
AfterImport(
    ["transformers.quantizers.auto", "transformers.integrations.gguf"],
    ["transformers", "torch_mesh"],
    _register_with_transformers,
).watch()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _WHERE or name == "_C":
            # Importing torch loads the extension, or records why it does not load. A checkout's extension needs torch's
            # libraries to be loaded first.
            import torch  # noqa: F401

            _torch.act_if_due()  # another thread may have begun to import torch before torch_mesh
            if _unusable is not None:
                raise ImportError(str(_unusable)) from _unusable
            if name == "_C":
                return importlib.import_module("torch_mesh._C")
            value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
            globals()[name] = value
            return value
        if not name.startswith("__") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        if name == "_testing":
            raise ImportError(
                "torch_mesh._testing, for tests and benchmarks, is not part of a wheel: in the checkout, pip install "
                "-e . or `make build-test`."
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
