"""The private names of torch that torch_mesh uses; no other file of ``torch_mesh/`` has any.

``NAMES`` lists each with the versions that have it; ``tests/models/test_compat.py`` fails with the name that is gone.
``torch._check``, which ``ops/`` calls, is documented.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

__all__ = [
    "DDP_IGNORED",
    "FakeTensorMode",
    "after_backward",
    "arguments_of",
    "in_forward_mode",
    "is_described",
    "is_in_backward",
    "is_tracing",
    "make_wrapper",
    "multiplies_bf16",
    "multiplies_in_tiles",
    "pytree",
    "raise_recompile_limit",
    "version_of",
    "without_torch_function",
]

# The name, and the versions that have it.
NAMES: tuple[tuple[str, str], ...] = (
    ("torch.Tensor._make_wrapper_subclass", ">=2.11"),
    ("torch._C.DisableTorchFunctionSubclass", ">=2.11"),
    ("torch._C._current_graph_task_id", ">=2.11"),
    ("torch.Tensor._version", ">=2.11"),
    ("torch._dynamo.config.patch", ">=2.11"),
    ("torch._dynamo.config.recompile_limit", ">=2.11"),
    ("torch._guards.TracingContext.try_get", ">=2.11"),
    ("torch._subclasses.fake_tensor.FakeTensorMode", ">=2.11"),
    ("torch._subclasses.meta_utils.MetaTensorDescriber", ">=2.11"),
    ("torch.autograd.Variable._execution_engine.queue_callback", ">=2.11"),
    ("torch.autograd.forward_ad._current_level", ">=2.11"),
    ("torch.cpu._is_amx_tile_supported", ">=2.11"),
    ("torch.cpu._is_avx512_bf16_supported", ">=2.11"),
    ("torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model", ">=2.11"),
    ("torch.ops.aten.detach.default._schema.arguments", ">=2.11"),
    ("torch.utils._pytree.tree_leaves", ">=2.11"),
    ("torch.utils._pytree.tree_map", ">=2.11"),
    ("torch.utils._pytree.tree_map_only", ">=2.11"),
)

# The attribute of a module by which DistributedDataParallel leaves out parameters; the listed method sets it.
DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"


def arguments_of(op: Any) -> Any:
    """The declared arguments of an op: each has ``name`` and ``is_write``."""
    return op._schema.arguments


def make_wrapper(cls: Any, shape: Any, **options: Any) -> Any:
    """A tensor of the subclass ``cls`` without memory."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, **options)


def without_torch_function() -> AbstractContextManager[Any]:
    """Within, no ``__torch_function__`` of a subclass is called."""
    return torch._C.DisableTorchFunctionSubclass()


def version_of(tensor: Any) -> int:
    """How often a tensor was written to in place; 0 for one of inference mode, which is not counted."""
    return 0 if tensor.is_inference() else int(tensor._version)


def is_tracing() -> bool:
    """Whether torch.compile or torch.export traces in this thread."""
    return TracingContext.try_get() is not None


def is_described() -> bool:
    """Whether torch asks for a tensor's properties to make a fake one of it. torch.export does so before it traces."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch_mesh.", "torch._tensor")):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == MetaTensorDescriber.__module__


def is_in_backward() -> bool:
    """Whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def after_backward(call: Callable[[], None]) -> None:
    """Call ``call`` when the backward that this thread runs has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def multiplies_bf16() -> bool:
    """Whether torch uses native bf16 products of this CPU."""
    return torch.cpu._is_avx512_bf16_supported() or multiplies_in_tiles()


def multiplies_in_tiles() -> bool:
    """Whether torch uses AMX."""
    return torch.cpu._is_amx_tile_supported()


def raise_recompile_limit(minimum: int) -> AbstractContextManager[Any]:
    """Within, torch.compile makes at least ``minimum`` graphs of a function."""
    limits: dict[str, Any] = {"recompile_limit": max(torch._dynamo.config.recompile_limit, minimum)}
    patched: AbstractContextManager[Any] = torch._dynamo.config.patch(**limits)
    return patched
