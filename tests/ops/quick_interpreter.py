"""Imported for its effect: makes Triton's interpreter many times as fast.

At each call of a device function the interpreter patches all of Triton's language again, which takes milliseconds.
This module patches each module of the language once per launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter

_patch_language = interpreter._patch_lang
_launch = interpreter.GridExecutor.__call__
_patched: set[tuple[bool, bool]] = set()  # since the current launch began


@functools.cache
def _modules(function: Callable[..., Any]) -> tuple[bool, bool]:
    """Return which modules of the language a function imports."""
    seen = list(map(id, function.__globals__.values()))
    return id(tl) in seen, id(tl.core) in seen


def _patch_once(function: Callable[..., Any]) -> Any:
    if _modules(function) in _patched:
        return None
    _patched.add(_modules(function))
    scope = _patch_language(function)
    # Triton 3.6 calls int() on an array of one element for a range's end, which NumPy 2.4 refuses. The scope restores
    # the original method.
    tl.core.tensor.__index__ = lambda tensor: int(tensor.handle.data.item())
    return scope


def _launch_afresh(self: Any, *arguments: Any, **options: Any) -> Any:
    _patched.clear()
    return _launch(self, *arguments, **options)


if triton.knobs.runtime.interpret:
    interpreter._patch_lang = _patch_once
    interpreter.GridExecutor.__call__ = _launch_afresh
