"""Experts under the names of a GGUF file, which are its own and the same for every architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.models.families import ExpertsLayer
from torch_mesh.store.gguf import read_parts
from torch_mesh.store.header import Tensor, store_error
from torch_mesh.store.sources.gguf import gguf_weights
from torch_mesh.store.views import View, split_experts, strided

OF_GGUF: Mapping[str, Any] = {"quant_method": "gguf"}


class GgufStacks:
    """The experts in the files of a GGUF model. Each expert is one range [out, in] of each of its layer's stacks."""

    quantization = OF_GGUF

    def __init__(self, path: Path) -> None:
        self.headers = tuple(part.header for part in read_parts(path))
        found = gguf_weights(self.headers)
        self.weights = tuple(found.values())
        self._path = path
        self._found = {name: (index, weight) for index, (name, weight) in enumerate(found.items())}

    def names_of(self, layers: Sequence[ExpertsLayer]) -> frozenset[str]:
        return frozenset(name for layer in layers for name, _ in self._stacks_of(layer))

    def stored(self, names: frozenset[str]) -> frozenset[str]:
        return names

    def common_dtype(self, names: Iterable[str]) -> str:
        return "fp32"  # all weights are read as fp32

    def layer_views(self, layer: ExpertsLayer) -> list[dict[str, View]]:
        views: list[dict[str, View]] = [{} for _ in range(layer.num_experts)]
        for name, parts in self._stacks_of(layer):
            index, weight = self._found[name]
            values = Tensor(name, "F32", weight.shape, 0, 4 * math.prod(weight.shape))
            for expert, matrix in enumerate(split_experts(index, values)):
                rows = matrix.shape[0] // len(parts)
                for number, part in enumerate(parts):
                    views[expert][part] = strided(layer, name, matrix.rows(number * rows, rows))
        return views

    def _stacks_of(self, layer: ExpertsLayer) -> list[tuple[str, tuple[str, ...]]]:
        """The tensors that hold a layer's experts, each with the parts whose rows are concatenated in it.

        Raises ``StoreError`` for a missing tensor, or one of another shape than the model's.
        """
        number = re.search(r"\.layers\.(\d+)\.", layer.path)
        if number is None:
            raise UnsupportedModelError(f"{self._path}: {layer.path} is in no numbered layer, and GGUF counts layers.")
        found: list[tuple[str, tuple[str, ...]]] = []
        for kind in ("weight", "bias") if layer.has_bias else ("weight",):
            suffix = "_bias" if kind == "bias" else ""
            fused = f"blk.{number[1]}.ffn_gate_up_exps.{kind}"
            if layer.has_gate and fused in self._found:
                found.append((fused, ("gate" + suffix, "up" + suffix)))
            else:
                separate = ("gate", "up") if layer.has_gate else ("up",)
                found += [(f"blk.{number[1]}.ffn_{part}_exps.{kind}", (part + suffix,)) for part in separate]
            found.append((f"blk.{number[1]}.ffn_down_exps.{kind}", ("down" + suffix,)))
        for name, parts in found:
            self._check(name, layer, len(parts), parts[0].startswith("down"), parts[0].endswith("_bias"))
        return found

    def _check(self, name: str, layer: ExpertsLayer, parts: int, is_down: bool, is_bias: bool) -> None:
        if name not in self._found:
            cause = "incomplete?"
            if name.replace("_exps.", ".0.") in self._found:
                cause = "each expert is a tensor of its own, as before April 2024. Take a newer file"
            raise store_error(self._path, f"no tensor is called {name!r}, which {layer.path} needs: {cause}")
        weight = self._found[name][1]
        rows, columns = (layer.hidden, layer.intermediate) if is_down else (layer.intermediate * parts, layer.hidden)
        expected = (layer.num_experts, rows) if is_bias else (layer.num_experts, rows, columns)
        if weight.shape != expected:
            path, tensor = weight.codes
            raise store_error(
                path,
                f"tensor {name!r} has the shape {list(weight.shape)}, {layer.path} needs {list(expected)}",
                tensor.offset,
            )
