"""``torch_mesh.cache_prefixes``: a model's ``generate`` keeps the keys and values of prompts on disk."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers.generation import GenerationMixin

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.serving.kept_keys import KeptKeys
from torch_mesh.serving.prefix_cache import PrefixCache, PrefixCounts
from torch_mesh.validators import parse_size

if TYPE_CHECKING:
    from typing_extensions import Self

_METHOD = "generate"  # the attribute of a model, patched or not


def cache_prefixes(model: Any, size: str | int = "8GiB") -> CachedPrefixes:
    """Let ``model.generate`` keep keys and values of its sequences on disk, and read those of a prompt's beginning.

    They are in the folder of ``torch-mesh cache``, for later processes too. Calls with one sequence and a dynamic cache
    take part, one at a time; others run as before. Copies of the model do not.

    Args:
        model: of transformers, patched or not. Adapters are part of its identity. Weights that ``torch_mesh.patch`` has
            packed from memory are another model's in each process.
        size: bytes, or a text such as ``"8GiB"``: the limit of all models' files, of which the least recently used are
            removed.

    Raises UnsupportedModelError for a model whose caches cannot be kept, ValueError for a wrong size.
    """
    if not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no generate of transformers' own. For a PeftModel give get_base_model()."
        )
    limit = parse_size(size, "size")
    if isinstance(before := vars(model).get(_METHOD), CachedPrefixes):
        before.close()
    return CachedPrefixes(model, limit)


class CachedPrefixes:
    """The installation that ``cache_prefixes`` made, until ``close`` or the end of a ``with`` block.

    It is the model's ``generate`` meanwhile.
    """

    def __init__(self, model: Any, limit: int) -> None:
        self._model = model
        self._was_set = _METHOD in vars(model)  # not only the method of its class
        self._original = model.generate
        self._prefixes = PrefixCache(model, limit)
        self._kept = KeptKeys(model, 0, prefixes=self._prefixes)
        self._running = threading.local()  # has an attribute while this thread is in generate
        vars(model)[_METHOD] = self

    @property
    def counts(self) -> PrefixCounts:
        """Hits, tokens of their prefixes, and bytes read and written so far."""
        return self._prefixes.counts

    def flush(self) -> None:
        """Return when the sequences so far are written. Without this call they are written by the end of the
        process."""
        self._prefixes.flush()

    def close(self) -> None:
        """Restore the original ``model.generate``."""
        if self._is_installed:
            if self._was_set:
                vars(self._model)[_METHOD] = self._original
            else:
                del vars(self._model)[_METHOD]
        self._prefixes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _is_installed(self) -> bool:
        return vars(self._model).get(_METHOD) is self

    def __call__(self, *positional: Any, **named: Any) -> Any:
        # A call from within generate, as assistant_early_exit drafts, may compute a part of the layers.
        if not self._is_installed or vars(self._running):
            return self._original(*positional, **named)
        self._running.call = True
        try:
            arguments = _by_name(self._original, positional, named)
            config = copy.deepcopy(arguments.get("generation_config") or self._model.generation_config)
            others = config.update(**{name: value for name, value in arguments.items() if name != "generation_config"})
            options = arguments.keys() - others.keys()
            if self._kept.can_keep(arguments, config, options):
                return self._kept.run(arguments, config, options)
            return self._original(*positional, **named)
        finally:
            del self._running.call

    def __reduce__(self) -> Any:
        """A copy of the model, also a pickled one, has the original ``generate`` and no prefix cache."""
        if self._was_set:
            return _same, (self._original,)
        return getattr, (self._model, _METHOD)


def _by_name(method: Any, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``generate`` by their names. Raises TypeError as the call would. A ``method`` that
    takes any arguments has the names of transformers' own."""
    signature = inspect.signature(method)
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in signature.parameters.values()):
        _, *own = inspect.signature(GenerationMixin.generate).parameters.values()  # without self
        signature = inspect.Signature(own)
    arguments: dict[str, Any] = {}
    for name, value in signature.bind(*positional, **named).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments["input_ids" if name == "inputs" else name] = value
    return arguments


def _same(method: Any) -> Any:
    return method
