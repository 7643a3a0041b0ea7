"""``torch_mesh.cache_prefixes``: a model's ``generate`` keeps the keys and values of prompts on disk."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor
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

    def __call__(self, inputs: Tensor | None = None, generation_config: Any = None, **arguments: Any) -> Any:
        if inputs is not None:
            arguments["input_ids"] = inputs
        if generation_config is not None:
            arguments["generation_config"] = generation_config
        ids = arguments.get("input_ids")
        is_supported = isinstance(ids, Tensor) and ids.dim() == 2
        if not self._is_installed or not is_supported or self._kept.is_nested():
            return self._original(**arguments)
        config = copy.deepcopy(self._model.generation_config if generation_config is None else generation_config)
        others = config.update(**{name: value for name, value in arguments.items() if name != "generation_config"})
        return self._kept.run(arguments, config, arguments.keys() - others.keys())

    def __reduce__(self) -> Any:
        """A copy of the model, also a pickled one, has the original ``generate`` and no prefix cache."""
        if self._was_set:
            return _same, (self._original,)
        return getattr, (self._model, _METHOD)


def _same(method: Any) -> Any:
    return method
