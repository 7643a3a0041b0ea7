"""Locate experts in a safetensors checkpoint: transformers' conversion mapping, applied to views instead of tensors.

transformers renames, merges and transposes tensors while it loads. A mapping that does more to experts is refused.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import conversion_mapping, core_model_loading

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.models.families import ExpertsLayer, find_experts, unpooled_layers
from torch_mesh.store.codes import RAW_DTYPES
from torch_mesh.store.header import Tensor, read_headers, store_error
from torch_mesh.store.sources import Source, source_of
from torch_mesh.store.sources.layout import Weight
from torch_mesh.store.views import Matrix, Stack, View, plain_view, split_experts, strided
from torch_mesh.store.weight_files import weight_files

_AS_LAYERS = re.compile(r"\.experts\.(gate_up|down)_projs\.\d+\.")


def model_names(model: Any, names: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """The parameter of ``model`` for each checkpoint tensor, and whether it is the tensor itself rather than made of
    it."""
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    return {name: (target, pattern is None) for name, target, pattern in _renamed(model, names, transforms)}


def parameter_tensors(
    model: Any, names: Iterable[str], wanted: Collection[str], key_mapping: Mapping[str, str] | None = None
) -> dict[str, list[tuple[str, Any]]]:
    """By the parameters ``wanted``: the checkpoint's tensors that become them, in transformers' order, and the
    converter that takes each (None: it is only renamed)."""
    transforms = conversion_mapping.get_model_conversion_mapping(model, dict(key_mapping or {}))
    converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
    found: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for name, target, pattern in _renamed(model, names, transforms):
        if target in wanted:
            converter = None if pattern is None else next(c for c in converters if pattern in c.source_patterns)
            found[target].append((name, converter))
    return found


def _renamed(model: Any, names: Iterable[str], transforms: Sequence[Any]) -> Iterator[tuple[str, str, str | None]]:
    """Name, new name, and pattern of the converter (None: only renamed), in transformers' order."""
    renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
    state = model.state_dict()
    for name in sorted(names, key=core_model_loading.dot_natural_key):
        target, pattern = core_model_loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        yield (name, name, None) if target not in state and name in state else (name, target, pattern)


class ParameterStacks:
    """The expert parameters of a model, each as one matrix per expert in the checkpoint's files. ``key_mapping`` is as
    in ``from_pretrained``."""

    def __init__(
        self,
        folder: Path,
        model: Any,
        quantization: Mapping[str, Any] | None,
        key_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self.headers = read_headers(weight_files(folder))
        self.quantization = quantization
        self._folder = folder
        self._shapes: dict[str, tuple[int, ...]] = {}  # without rows of identity experts, which a file may lack
        self._rows: dict[str, int] = {}  # numbers of rows, with those of identity experts
        for layer in (*find_experts(model), *unpooled_layers(model)):
            for name, parameter in layer.parameters.items():
                self._rows[f"{layer.path}.{name}"], *sizes = parameter.shape
                self._shapes[f"{layer.path}.{name}"] = (layer.num_experts, *sizes)
        self._tied: Mapping[str, str] = model.all_tied_weights_keys
        self._tensors = {
            name: (file, tensor) for file, header in enumerate(self.headers) for name, tensor in header.tensors.items()
        }
        self.weights: tuple[Weight, ...] = ()
        if quantization is not None:
            self._see_weights(source_of(quantization, str(folder)))
        transforms = conversion_mapping.get_model_conversion_mapping(model, dict(key_mapping or {}))
        self._converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
        self._sources = self._match(model, transforms)

    def names_of(self, layers: Sequence[ExpertsLayer]) -> frozenset[str]:
        """The checkpoint tensors with the experts of these layers."""
        parameters = [f"{layer.path}.{name}" for layer in layers for name in layer.parameter_names]
        return frozenset(
            name for parameter in parameters for names in self._sources[parameter].values() for name in names
        )

    def stored(self, names: frozenset[str]) -> frozenset[str]:
        if not self.weights:
            return names
        return frozenset(t.name for name in names for _, t in self.weights[self._tensors[name][0]].parts.values())

    def layer_views(self, layer: ExpertsLayer) -> list[dict[str, View]]:
        """Per expert of one layer, the view of each part. Raises as ``stack`` does."""
        views: list[dict[str, View]] = [{} for _ in range(layer.num_experts)]
        gate_up, down = layer.parameter_names[:2]
        for suffix in ("", "_bias") if layer.has_bias else ("",):
            transposed = layer.is_transposed and suffix == ""
            for expert, matrix in enumerate(self.stack(f"{layer.path}.{gate_up}{suffix}")):
                for part, view in _gate_and_up(layer, matrix.transposed() if transposed else matrix).items():
                    views[expert][part + suffix] = strided(layer, gate_up, view)
            for expert, matrix in enumerate(self.stack(f"{layer.path}.{down}{suffix}")):
                views[expert]["down" + suffix] = strided(
                    layer, down, (matrix.transposed() if transposed else matrix).whole()
                )
        return views

    def stack(self, parameter: str) -> Stack:
        """Raises ``StoreError`` if the checkpoint lacks the parameter, ``UnsupportedModelError`` for unsupported
        mappings."""
        sources = self._sources.get(parameter)
        if not sources and parameter in self._tied:
            raise UnsupportedModelError(
                self._cannot_follow(parameter, f"it is tied to {self._tied[parameter]} and has no tensors of its own")
            )
        unstacked = next((name for name in self._tensors if _AS_LAYERS.search(name)), None) if not sources else None
        if unstacked is not None:
            raise UnsupportedModelError(
                f"{self._folder}: {unstacked} is an expert as a linear layer of its own, as in unsloth's copies of "
                "gpt-oss for bitsandbytes, which transformers' mapping does not support. Use openai/gpt-oss-20b or "
                "-120b, which are in four bits, or a GGUF file of them."
            )
        if not sources:
            raise store_error(
                self._folder, f"no tensor of the checkpoint has {parameter}: incomplete, or of another model"
            )
        converter = next((c for c in self._converters if set(sources) <= set(c.source_patterns)), None)
        expected = self._shapes[parameter]
        operands = {pattern: self._operand(parameter, names, expected) for pattern, names in sources.items()}
        if converter is not None and None not in sources:
            operands = self._convert(parameter, converter, operands, expected)
        result = self._single(parameter, operands)
        shape = (len(result), *result[0].shape)[: len(expected)]
        if shape != expected:
            raise store_error(
                self._folder, f"{parameter} has the shape {shape} in the checkpoint, {expected} in the model"
            )
        return result

    def _see_weights(self, source: Source) -> None:
        """Replace the tensors that make up a weight by the weight, as a tensor of fp32 values in a file of its own."""
        weights = source.weights(self.headers)
        self.weights = tuple(weights.values())
        self._tensors = {
            weight.name: (index, Tensor(weight.name, "F32", weight.shape, 0, 4 * math.prod(weight.shape)))
            for index, weight in enumerate(self.weights)
        }

    def _match(self, model: Any, transforms: Sequence[Any]) -> dict[str, dict[str | None, list[str]]]:
        """Checkpoint names per expert parameter and pattern of the converter (None: only renamed), in transformers'
        order."""
        matches: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, target, pattern in _renamed(model, self._tensors, transforms):
            if pattern is not None and target in self._shapes:
                target = self._split_target(target, pattern, name)
            if target in self._shapes:
                matches[target][pattern].append(name)
            elif pattern is not None:
                self._refuse_split(target, pattern, name)
        return matches

    def _split_target(self, target: str, pattern: str, name: str) -> str:
        """The expert's parameter if a converter splits one list of experts evenly among several parameters; otherwise
        ``target``.

        ``target`` names the first of these parameters. The number in ``name`` decides, since a converted checkpoint
        only has a part of the list.
        """
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        if not isinstance(converter.operations[0], core_model_loading.ErnieFuseAndSplitTextVisionExperts):
            return target
        match = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
        part = None if match is None else int(match[1]) // self._shapes[target][0]
        if part is None or part >= len(converter.target_patterns):
            raise store_error(self._folder, f"tensor {name!r} is for more experts than the model has")
        return target.replace(converter.target_patterns[0], converter.target_patterns[part])

    def _refuse_split(self, target: str, pattern: str, name: str) -> None:
        """A converter with several targets only names the first: refuse it if another one is an experts parameter."""
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        ends = [t.replace("\\", "").lstrip(".") for t in converter.target_patterns]
        if len(ends) > 1 and any(parameter.endswith(end) for parameter in self._shapes for end in ends):
            raise UnsupportedModelError(
                self._cannot_follow(target, f"{name} is divided among {converter.target_patterns}")
            )

    def common_dtype(self, tensors: Iterable[str]) -> str:
        dtypes: dict[str, str] = {}
        for name in sorted(tensors):
            dtypes.setdefault(self._tensors[name][1].dtype, name)
        known = ", ".join(RAW_DTYPES.values())
        for dtype, name in dtypes.items():
            if dtype not in RAW_DTYPES:
                raise UnsupportedModelError(
                    f"{self._folder}: the expert tensor {name} is {dtype}. torch_mesh reads {known} checkpoints and "
                    "quantizes them itself: use the unquantized original."
                )
        if len(dtypes) > 1:
            examples = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            raise UnsupportedModelError(
                f"{self._folder}: experts have different dtypes ({examples}). All must have one of {known}: save the "
                "model in one dtype."
            )
        return RAW_DTYPES[next(iter(dtypes), "BF16")]

    def _operand(self, parameter: str, names: Sequence[str], expected: tuple[int, ...]) -> Stack:
        """Tensors with as many dimensions as the parameter are stacks of experts; with one fewer, single experts."""
        rank = len(expected)
        matrices: Stack = []
        shape = self._tensors[names[0]][1].shape
        for name in names:
            file, tensor = self._tensors[name]
            if tensor.shape != shape:
                raise store_error(
                    self._folder,
                    f"{name} has the shape {list(tensor.shape)}, and {names[0]} has {list(shape)}: experts of a layer "
                    "have equal shapes",
                )
            if len(tensor.shape) == rank and len(names) == 1:
                stack = split_experts(file, tensor)
                if self.weights and self.weights[file].layout.is_transposed:
                    stack = [matrix.transposed() for matrix in stack]
                matrices.extend(stack)
            elif len(tensor.shape) == rank - 1:
                matrices.append(Matrix((plain_view(file, tensor),)))
            else:
                raise UnsupportedModelError(self._cannot_follow(parameter, f"{name} has the shape {tensor.shape}"))
        if len(matrices) == self._rows[parameter]:
            matrices = matrices[: expected[0]]
        if len(matrices) != expected[0]:
            raise store_error(
                self._folder,
                f"{parameter} has {len(matrices)} of {expected[0]} experts, beginning with {names[0]}: incomplete?",
            )
        return matrices

    def _convert(
        self, parameter: str, converter: Any, operands: dict[Any, Stack], expected: tuple[int, ...]
    ) -> dict[Any, Stack]:
        for operation in converter.operations:
            rule = _OPERATIONS.get(type(operation))
            result = rule(operation, operands, converter.source_patterns, expected) if rule is not None else None
            if result is None:
                raise UnsupportedModelError(self._cannot_follow(parameter, f"it is made by {operation!r}"))
            operands = result
        return operands

    def _single(self, parameter: str, operands: dict[Any, Stack]) -> Stack:
        if len(operands) != 1:
            raise UnsupportedModelError(self._cannot_follow(parameter, f"it is made of {len(operands)} tensors"))
        (stack,) = operands.values()
        return stack

    def _cannot_follow(self, parameter: str, why: str) -> str:
        return (
            f"{self._folder}: {parameter} cannot be read straight from the checkpoint, because {why}. "
            "Load the model with from_pretrained, then patch it with torch_mesh.patch."
        )


_Operands = dict[Any, Stack]  # by pattern


def _joined(operands: _Operands, patterns: Sequence[str], axis: int) -> _Operands | None:
    stacks = [operands[pattern] for pattern in patterns if pattern in operands]
    if axis not in (0, 1) or len({len(stack) for stack in stacks}) != 1:
        return None
    joined = []
    for matrices in zip(*stacks, strict=True):
        if (
            any(len(m.parts) > 1 and m.axis != axis for m in matrices)
            or len({m.shape[1 - axis] for m in matrices}) != 1
        ):
            return None
        joined.append(Matrix(tuple(part for m in matrices for part in m.parts), axis))
    return {patterns[0]: joined}


def _transpose(operation: Any, operands: _Operands, _: Any, expected: tuple[int, ...]) -> _Operands | None:
    if len(operands) != 1 or {operation.dim0, operation.dim1} != {1, 2}:
        return None
    ((pattern, stack),) = operands.items()
    if operation.check_dims and stack and (len(stack), *stack[0].shape) == expected:
        return operands
    return {pattern: [matrix.transposed() for matrix in stack]}


def _deinterleave(operation: Any, operands: _Operands, *_: Any) -> _Operands | None:
    if len(operands) != 1 or operation.inverse or operation.dim not in (1, 2):
        return None
    ((pattern, stack),) = operands.items()
    result = []
    for matrix in stack:
        rows = matrix if operation.dim == 1 else matrix.transposed()
        half = rows.shape[0] // 2
        even, odd = rows.rows(0, half, 2), rows.rows(1, half, 2)
        if even is None or odd is None or rows.shape[0] % 2:
            return None
        halves = Matrix((even, odd))
        result.append(halves if operation.dim == 1 else halves.transposed())
    return {pattern: result}


# By operation of transformers' mapping: a function (operation, operands, the converter's patterns, the parameter's
# shape) -> operands; None if strides cannot describe the result.
_OPERATIONS: dict[type, Callable[[Any, _Operands, Sequence[str], tuple[int, ...]], _Operands | None]] = {
    core_model_loading.MergeModulelist: lambda operation, operands, *_: operands if operation.dim == 0 else None,
    core_model_loading.Concatenate: lambda operation, operands, patterns, _: _joined(
        operands, patterns, operation.dim - 1
    ),
    core_model_loading.Transpose: _transpose,
    core_model_loading.Interleave: _deinterleave,
    # ``_split_target`` has split the experts among the targets.
    core_model_loading.ErnieFuseAndSplitTextVisionExperts: lambda operation, operands, patterns, _: (
        _joined(operands, patterns, operation.concat_dim - 1) if operation.stack_dim == 0 else None
    ),
}
if hasattr(core_model_loading, "Inkling2LoopDequantizeExperts"):  # transformers 5.24
    # Weights without scales stay as they are, as in transformers; others are not supported here.
    _OPERATIONS[core_model_loading.Inkling2LoopDequantizeExperts] = lambda _, operands, *__: (
        operands if len(operands) == 1 else None
    )


def _gate_and_up(layer: ExpertsLayer, matrix: Matrix) -> dict[str, View | None]:
    count = layer.intermediate
    if not layer.has_gate:
        return {"up": matrix.whole()}
    if layer.is_concatenated:
        return {"gate": matrix.rows(0, count), "up": matrix.rows(count, count)}
    return {"gate": matrix.rows(0, count, 2), "up": matrix.rows(1, count, 2)}
