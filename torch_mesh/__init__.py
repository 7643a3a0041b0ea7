"""Mixture-of-Experts models that do not fit in memory, run in place.

>>> import torch_mesh
>>> from transformers import AutoModelForCausalLM
>>> model = AutoModelForCausalLM.from_pretrained(path, quantization_config=torch_mesh.MeshConfig(resident="8GiB"))
>>> print(torch_mesh.stats(model))

Importing the package registers its ops with torch and its checkpoints with transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .errors import (
    ChecksumError,
    DeviceError,
    ForkedProcessError,
    MeshError,
    PoolClosedError,
    ReadError,
    ReadTimeoutError,
    StoreError,
    UnsupportedModelError,
)
from .version import __version__

__all__ = [
    "ChecksumError",
    "DeviceError",
    "Experts",
    "ForkedProcessError",
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
    "capture_batch_sizes",
    "describe_training",
    "hottest_experts",
    "load_trace",
    "patch",
    "place_experts",
    "record_trace",
    "reset_stats",
    "save_profile",
    "set_capture_batch_sizes",
    "stats",
    "synchronize",
    "unpatch",
    "watch",
]


def _load_extension() -> None:
    """Imports torch_mesh._C and checks that it was built against the torch that runs: brgemm is no stable ABI."""
    import torch

    try:
        from . import _C
    except ImportError as error:
        raise ImportError(
            f"torch_mesh's extension does not load with torch {torch.__version__}: {error}. Build it in this environment: "
            "pip install --no-build-isolation --no-deps -e . (or `make build`)"
        ) from error
    running = torch.__version__.split("+")[0]
    if _C.torch_version.split("+")[0] != running:
        raise ImportError(
            f"torch_mesh was built against torch {_C.torch_version}, but torch {running} is loaded; build it again: "
            "pip install --no-build-isolation --no-deps -e . (or `make build`)"
        )


# `torch-mesh doctor` has to run where the extension does not, so the package itself imports without it; every name that
# needs it raises the reason.
_unusable: ImportError | None = None
try:
    _load_extension()
except ImportError as error:
    _unusable = error
else:
    import torch_mesh.loading as _loading  # noqa: F401  registers "mesh" with transformers
    import torch_mesh.ops as _ops  # noqa: F401  registers fake kernels and gradients

    from .adapters.registration import register_with_peft
    from .adapters.report import describe_training
    from .config import MeshConfig
    from .experts import Experts
    from .foresight.traces import load_trace, record_trace
    from .gpu.device_work import capture_batch_sizes, place_experts, set_capture_batch_sizes, synchronize
    from .gpu.placement import hottest_experts
    from .packed_weight import PackedWeight
    from .patching import patch, unpatch
    from .statistics.stats import reset_stats, save_profile, stats
    from .statistics.watch import watch
    from .trainer import MeshTrainerCallback

    register_with_peft()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        if _unusable is not None and name in __all__:
            raise ImportError(str(_unusable)) from _unusable
        raise AttributeError(f"module 'torch_mesh' has no attribute '{name}'")
