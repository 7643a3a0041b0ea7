"""``torch_mesh.cache_prefixes``: a model's ``generate`` keeps the keys and values of prompts on disk."""

from __future__ import annotations

import copy
import types
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.generation import GenerationMixin

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.serving.kept_keys import KeptKeys
from torch_mesh.serving.prefix_cache import PrefixCache, PrefixCounts
from torch_mesh.validators import parse_size

if TYPE_CHECKING:
    from typing_extensions import Self

_HANDLE, _METHOD = "_prefix_cache", "generate"  # attributes of a model, patched or not


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
    if (before := vars(model).get(_HANDLE)) is not None:
        before.close()
    return CachedPrefixes(model, limit)


class CachedPrefixes:
    """The installation that ``cache_prefixes`` made, until ``close`` or the end of a ``with`` block."""

    def __init__(self, model: Any, limit: int) -> None:
        self._model = model
        self._prefixes = PrefixCache(model, limit)
        self._kept = KeptKeys(model, 0, prefixes=self._prefixes)
        vars(model).update({_HANDLE: self, _METHOD: types.MethodType(_generate, model)})

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
        if vars(self._model).get(_HANDLE) is self:
            del vars(self._model)[_HANDLE], vars(self._model)[_METHOD]
        self._prefixes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has no prefix cache."""

    def __reduce__(self) -> Any:
        return types.NoneType, ()


def _generate(model: Any, inputs: Tensor | None = None, generation_config: Any = None, **arguments: Any) -> Any:
    handle: CachedPrefixes | None = vars(model).get(_HANDLE)
    if inputs is not None:
        arguments["input_ids"] = inputs
    if generation_config is not None:
        arguments["generation_config"] = generation_config
    ids = arguments.get("input_ids")
    if handle is None or not isinstance(ids, Tensor) or ids.dim() != 2:
        return type(model).generate(model, **arguments)
    config = copy.deepcopy(model.generation_config if generation_config is None else generation_config)
    others = config.update(**{name: value for name, value in arguments.items() if name != "generation_config"})
    return handle._kept.run(arguments, config, arguments.keys() - others.keys())
