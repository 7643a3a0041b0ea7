"""Replace functions of upstream packages."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any


def wrap(owner: str, name: str, ours: Callable[..., Any]) -> None:
    """Replace a function or method of an upstream module or class by ``ours(original, *args, **kwargs)``.

    Replacements by other libraries stay inside. Raises KeyError if there is no such name.
    """
    target = pkgutil.resolve_name(owner)
    found = vars(target)[name]
    is_of_class = isinstance(found, classmethod)
    theirs = found.__func__ if is_of_class else found

    @functools.wraps(theirs)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    setattr(target, name, classmethod(wrapper) if is_of_class else wrapper)
