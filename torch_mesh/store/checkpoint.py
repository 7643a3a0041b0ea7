"""Where each expert stands in a Hugging Face checkpoint as it was downloaded.

Names in a checkpoint are not those of the model: transformers renames, merges and transposes while it loads. Its own conversion
mapping is followed here symbolically, on offsets and strides instead of tensors, so that an expert can be read straight from the
file. A mapping that does more to experts than rearrange them is refused.

In a checkpoint that another tool has quantised, offsets and strides are those of the fp32 values that its weights stand for. So they
are in GGUF files, which have names of their own for the experts, the same for every architecture.

Where a function takes the folder of a checkpoint, it takes a GGUF file too, the first of its parts.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import conversion_mapping, core_model_loading

from torch_mesh import _C
from torch_mesh.errors import UnsupportedModelError
from torch_mesh.families import (
    ExpertsLayer,
    ExpertTensors,
    common_activation,
    common_geometry,
    find_experts,
    layers_left_alone,
)
from torch_mesh.store import gguf_model
from torch_mesh.store.codes import RAW_DTYPES, KeptCodes, kept_codes
from torch_mesh.store.gguf import gguf_files, is_gguf, read_gguf, read_parts
from torch_mesh.store.header import Header, Tensor, check_folder, read_header, read_range, store_error, weight_files
from torch_mesh.store.manifest import Shape, is_store
from torch_mesh.store.sources import Source, method_of, nearest, own_quantisation, source_of
from torch_mesh.store.sources.gguf import gguf_weights
from torch_mesh.store.sources.layout import Nearest, Weight, nearest_to

if TYPE_CHECKING:
    from torch_mesh._C import RawView

TORCH_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PARTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
_OF_GGUF: Mapping[str, Any] = {"quant_method": "gguf"}


@dataclass(frozen=True)
class CheckpointExperts:
    """The experts of a checkpoint, found but not read.

    ``extents`` is int64 [layers, experts, pieces, 3] of (index in ``files``, offset, bytes); ``raw_views`` says where in those
    pieces gate, up, down and their biases are, and is the same for every expert. ``modules`` are the paths of the experts modules,
    ``names`` the tensors in the checkpoint that hold experts; all others are ``other_tensors``, by file.

    Of a quantised checkpoint ``weights`` are all weights, which are what ``extents`` names and counts the bytes of, as if they were fp32; ``kept``
    is how they lie in the files, where a record holds their codes and scales as they are.
    """

    folder: Path
    shape: Shape
    modules: tuple[str, ...]
    dtype: str  # 'bf16', 'fp16', 'fp32': what ``read_expert`` gives
    files: tuple[tuple[str, int], ...]
    extents: npt.NDArray[np.int64]
    raw_views: dict[str, RawView]
    names: frozenset[str]
    headers: tuple[Header, ...]
    quantisation: Mapping[str, Any] | None = None
    weights: tuple[Weight, ...] = ()
    kept: KeptCodes | None = None

    @property
    def format(self) -> str:
        """What the experts are kept in."""
        if not self.weights:
            return self.dtype
        experts = self._of_experts()
        quantised = [weight for weight in experts if not weight.is_plain]  # all else are biases
        return ", ".join(sorted({weight.layout.title for weight in quantised or experts}))

    @property
    def expert_bytes(self) -> int:
        """Of one expert, as it is stored."""
        return self.all_experts_bytes // (self.extents.shape[0] * self.extents.shape[1])

    @property
    def all_experts_bytes(self) -> int:
        if not self.weights:
            return int(self.extents[..., 2].sum())
        return sum(weight.stored_bytes for weight in self._of_experts())

    @property
    def reads_per_expert(self) -> int:
        """Of the pieces that one expert is in."""
        if self.kept is not None:
            return int(self.kept.extents.shape[2])
        pieces = self.extents[0, 0, :, 0].tolist()
        return sum(len(self.weights[index].parts) for index in pieces) if self.weights else len(pieces)

    @property
    def own_records(self) -> tuple[str, int] | None:
        """The format and group size of records that the files can be read as, without a conversion."""
        if not self.weights:
            return "bf16", 0
        return None if self.kept is None else (self.kept.weights, self.kept.group_size)

    @property
    def rest_is_quantised(self) -> bool:
        """Whether any weight but the experts' is, or has other names and values than transformers', as those of GGUF files."""
        if is_gguf(self.folder):
            return True
        of_experts = {weight.name for weight in self._of_experts()} if self.weights else set()
        return any(not weight.is_plain and weight.name not in of_experts for weight in self.weights)

    @property
    def expert_files(self) -> tuple[Path, ...]:
        """That experts are read from."""
        return tuple(header.path for header in self.headers if not self.names.isdisjoint(header.tensors))

    def nearest(self) -> Nearest:
        """The format of ours that is nearest to what the experts are kept in."""
        if self.kept is not None:
            return Nearest(
                self.kept.weights, self.kept.group_size, True, "which holds their codes and scales as they are"
            )
        return nearest(self._of_experts()) if self.weights else nearest_to(self.dtype)

    def _of_experts(self) -> list[Weight]:
        return [self.weights[index] for index in sorted(set(self.extents[..., 0].flatten().tolist()))]

    @property
    def other_tensors(self) -> list[tuple[Header, list[Tensor]]]:
        """Tensors that are no routed expert's, by file and in the file's order."""
        by_file = [
            (header, [t for t in header.tensors.values() if t.name not in self.names]) for header in self.headers
        ]
        return [(header, sorted(tensors, key=lambda t: t.offset)) for header, tensors in by_file if tensors]

    @cached_property
    def fingerprint(self) -> str:
        return checkpoint_fingerprint((header.path for header in self.headers), self.quantisation)

    def source_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``torch_mesh._C.Source``. A raw checkpoint has no checksums: first reads set them."""
        kept = self.kept
        return {
            "files": list(self.files),
            "extents": self.extents if kept is None else kept.extents,
            "checksums": None,
            "store_id": bytes(16),
            "raw_dtype": self.dtype if kept is None else kept.dtype,
            "raw_views": self.raw_views if kept is None else kept.raw_views,
        }

    def pack_kept(self, layer: int, expert: int) -> torch.Tensor:
        """One expert's record of its codes and scales, read now. Raises ``StoreError`` for those that stand for no number."""
        kept, shape = self.kept, self.shape
        assert kept is not None
        extents = kept.extents[layer, expert].tolist()
        pieces = [read_range(self.files[file][0], offset, size) for file, offset, size in extents]
        sizes = (shape.hidden, shape.intermediate, shape.gated, shape.bias)
        try:
            record = _C.pack_raw(pieces, kept.dtype, kept.raw_views, kept.weights, kept.group_size, *sizes)
        except ValueError as problem:
            file, offset, _ = extents[0]
            where = f"expert {expert} of layer {layer}"
            raise store_error(self.files[file][0], f"{where}: {problem}", offset) from None
        return torch.frombuffer(record, dtype=torch.uint8)

    def read_expert(self, layer: int, expert: int) -> ExpertTensors:
        """One expert's weights in the checkpoint's dtype, read now; ``gate``, ``up`` and ``down`` are views of what was read."""
        pieces = [self._read_piece(*extent) for extent in self.extents[layer, expert].tolist()]
        tensors = {part: self._view(pieces, part) for part in _PARTS}
        return ExpertTensors(**tensors)  # type: ignore[arg-type]  # up and down are always there

    def _read_piece(self, file: int, offset: int, size: int) -> torch.Tensor:
        if not self.weights:
            return torch.frombuffer(read_range(self.files[file][0], offset, size), dtype=TORCH_DTYPES[self.dtype])
        weight = self.weights[file]
        return weight.read(offset // size if size < 4 * math.prod(weight.shape) else None).flatten()

    def _view(self, pieces: Sequence[torch.Tensor], part: str) -> torch.Tensor | None:
        view = self.raw_views.get(part)
        if view is None:
            return None
        sizes, strides = self._part_shape(part), (view["row_stride"], view["column_stride"])
        return pieces[view["piece"]].as_strided(sizes, strides[: len(sizes)], view["offset"])

    def _part_shape(self, part: str) -> tuple[int, ...]:
        hidden, intermediate = self.shape.hidden, self.shape.intermediate
        if part.endswith("_bias"):
            return (hidden,) if part == "down_bias" else (intermediate,)
        return (hidden, intermediate) if part == "down" else (intermediate, hidden)


def meta_model(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """The model that ``config`` describes, on the meta device: every module and shape, no memory."""
    architectures = getattr(config, "architectures", None) or [""]
    model_class = getattr(transformers, architectures[0], None)
    if model_class is None and hasattr(config, "auto_map"):
        raise UnsupportedModelError(
            f"The model class {architectures[0]!r} is code of the checkpoint's own; torch_mesh runs models of transformers only."
        )
    with torch.device("meta"):
        try:
            return (model_class or transformers.AutoModelForCausalLM.from_config)(config)
        except Exception as problem:  # whatever transformers makes of sizes that fit no model
            raise UnsupportedModelError(
                f"{type(config).__name__} describes no causal language model: {problem}"
            ) from problem


def shape_of(layers: Sequence[ExpertsLayer]) -> Shape:
    """What layers of one geometry have in common."""
    geometry = common_geometry(layers)
    return Shape(
        layers=len(layers),
        experts=geometry.num_experts,
        top_k=max(layer.top_k for layer in layers),
        hidden=geometry.hidden,
        intermediate=geometry.intermediate,
        gated=geometry.has_gate,
        bias=geometry.has_bias,
        activation=common_activation(layers),
    )


def find_checkpoint_experts(folder: str | os.PathLike[str], model: transformers.PreTrainedModel) -> CheckpointExperts:
    """Where the experts of ``model`` stand in the checkpoint in ``folder``.

    ``model`` may be on the meta device, but must have its expert parameters. Raises ``UnsupportedModelError`` for checkpoints quantised in a
    way that cannot be read, mixed dtypes, and layouts that strides cannot describe; ``StoreError`` for files that are damaged or incomplete.
    """
    folder = Path(folder)
    if is_gguf(folder):
        return _experts_of(folder, find_experts(model), _GgufStacks(folder))
    stacks = _ParameterStacks(folder, model, find_quantisation(folder, model.config))
    experts = _experts_of(folder, find_experts(model), stacks)
    if stacks.quantisation is None:
        _check_unquantised(folder, stacks.headers)
    return experts


def model_names(model: Any, names: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """What a checkpoint's tensors are in ``model``: the parameter, and whether that is the tensor as it is or made of it, and perhaps of others."""
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    return {name: (target, pattern is None) for name, target, pattern in _renamed(model, names, transforms)}


def _renamed(model: Any, names: Iterable[str], transforms: Sequence[Any]) -> Iterator[tuple[str, str, str | None]]:
    """Name, what transformers makes of it, and the pattern of the converter that takes it (None: it is only renamed), in transformers' order."""
    renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
    state = model.state_dict()
    for name in sorted(names, key=core_model_loading.dot_natural_key):
        target, pattern = core_model_loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        yield (name, name, None) if target not in state and name in state else (name, target, pattern)


def _check_unquantised(folder: Path, headers: Sequence[Header]) -> None:
    """transformers would take codes for values."""
    for header in headers:
        for tensor in header.tensors.values():
            if tensor.dtype.startswith(("F8", "F6", "F4")):
                raise UnsupportedModelError(
                    f"{folder}: {tensor.name} is {tensor.dtype}, and config.json names no quantization_config that says what scales it has. "
                    "Take the config.json that belongs to these weights, or the unquantised original."
                )


def find_left_alone(
    folder: str | os.PathLike[str], model: transformers.PreTrainedModel
) -> list[tuple[ExpertsLayer, CheckpointExperts]]:
    """Each layer of experts that no pool takes, and where its own stand in the folder, which may be that of a converted checkpoint.

    Raises as ``find_checkpoint_experts`` does.
    """
    layers = layers_left_alone(model)
    if not layers:
        return []
    folder = Path(folder)
    stacks: _Stacks = (
        _GgufStacks(folder)
        if is_gguf(folder)
        else _ParameterStacks(folder, model, None if is_store(folder) else find_quantisation(folder, model.config))
    )
    return [(layer, _experts_of(folder, [layer], stacks)) for layer in layers]


def _experts_of(folder: Path, layers: Sequence[ExpertsLayer], stacks: _Stacks) -> CheckpointExperts:
    """Those of layers that are alike."""
    names = stacks.names_of(layers)
    dtype = stacks.common_dtype(names)
    placed = [stacks.layer_views(layer) for layer in layers]
    extents, raw_views = _pieces(folder, layers, placed)
    headers = stacks.headers
    return CheckpointExperts(
        folder=folder,
        shape=shape_of(layers),
        modules=tuple(layer.path for layer in layers),
        dtype=dtype,
        files=tuple((str(header.path), header.file_bytes) for header in headers),
        extents=extents,
        raw_views=raw_views,
        names=stacks.stored(names),
        headers=headers,
        quantisation=stacks.quantisation,
        weights=stacks.weights,
        kept=kept_codes(stacks.weights, headers, extents, raw_views) if stacks.weights else None,
    )


def checkpoint_fingerprint(files: Iterable[Path], quantisation: Mapping[str, Any] | None = None) -> str:
    """Hex digest of the files' names, sizes, times of change and safetensors headers, and of what says how they are to be read: another
    checkpoint has another."""
    digest = hashlib.blake2b(digest_size=16)
    if quantisation is not None:
        digest.update(json.dumps(quantisation, sort_keys=True).encode())
    for path in sorted(files):
        status = path.stat()
        header = read_gguf(path).header if is_gguf(path) else read_header(path)
        with path.open("rb") as file:
            raw = file.read(header.data_start)
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0{len(raw)}\0".encode())
        digest.update(raw)
    return digest.hexdigest()


def find_quantisation(folder: Path, config: Any = None) -> Mapping[str, Any] | None:
    """How another tool has quantised the checkpoint in ``folder``, by its own config.json or else by ``config``; None if none has.

    Raises ``UnsupportedModelError`` for a store, and for what cannot be read.
    """
    if is_gguf(folder):
        return _OF_GGUF
    said = own_quantisation(folder)
    if said is None and config is not None and not (folder / "config.json").is_file():
        said = getattr(config, "quantization_config", None)
        said = said if said is None or isinstance(said, dict) else said.to_dict()
    if said is None:
        return None
    if method_of(said) != "mesh":
        source_of(said, str(folder))
        return said
    if is_store(folder):
        raise UnsupportedModelError(
            f"{folder} is a converted store already; open it as it is, without converting it again."
        )
    return None  # the config of a patched model, and ordinary weights


def checkpoint_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The files with the weights of a checkpoint. Raises ``StoreError`` where they are not all there."""
    return gguf_files(folder) if is_gguf(folder) else weight_files(folder)


@dataclass(frozen=True, slots=True)
class _View:
    """A matrix inside a tensor of a file. ``begin`` and ``size`` (bytes) are the stretch that belongs to this expert alone; ``offset``
    and the strides count elements from ``begin``."""

    file: int
    begin: int
    size: int
    offset: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int

    def transposed(self) -> _View:
        return replace(
            self, rows=self.columns, columns=self.rows, row_stride=self.column_stride, column_stride=self.row_stride
        )

    def take_rows(self, start: int, count: int, step: int = 1) -> _View:
        return replace(
            self, offset=self.offset + start * self.row_stride, rows=count, row_stride=self.row_stride * step
        )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One expert's matrix: ``parts`` side by side along ``axis``."""

    parts: tuple[_View, ...]
    axis: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        first = self.parts[0]
        if self.axis == 0:
            return sum(part.rows for part in self.parts), first.columns
        return first.rows, sum(part.columns for part in self.parts)

    def transposed(self) -> _Matrix:
        return _Matrix(tuple(part.transposed() for part in self.parts), 1 - self.axis)

    def rows(self, start: int, count: int, step: int = 1) -> _View | None:
        """Those rows as one view, or None if strides cannot say it."""
        if len(self.parts) == 1:
            return self.parts[0].take_rows(start, count, step)
        if self.axis != 0 or step != 1:
            return None
        for part in self.parts:
            if 0 <= start and start + count <= part.rows:
                return part.take_rows(start, count)
            start -= part.rows
        return None

    def whole(self) -> _View | None:
        return self.rows(0, self.shape[0])


_Stack = list[_Matrix]  # one per expert


class _ParameterStacks:
    """The expert parameters of a model, each as one matrix per expert in the checkpoint's files."""

    def __init__(self, folder: Path, model: Any, quantisation: Mapping[str, Any] | None) -> None:
        self.headers = tuple(read_header(path) for path in weight_files(folder))
        self.quantisation = quantisation
        self._folder = folder
        # Without the rows of experts that compute nothing, which a checkpoint has or not.
        self._shapes = {
            f"{layer.path}.{name}": (layer.num_experts, *getattr(layer.module, name).shape[1:])
            for layer in (*find_experts(model), *layers_left_alone(model))
            for name in layer.parameter_names
        }
        self._rows = {
            f"{layer.path}.{name}": getattr(layer.module, name).size(0)
            for layer in (*find_experts(model), *layers_left_alone(model))
            for name in layer.parameter_names
        }
        self._tied: Mapping[str, str] = model.all_tied_weights_keys
        self._tensors = self._tensors_by_name(self.headers)
        self.weights: tuple[Weight, ...] = ()
        if quantisation is not None:
            self._see_weights(source_of(quantisation, str(folder)))
        transforms = conversion_mapping.get_model_conversion_mapping(model)
        self._converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
        self._sources = self._match(model, transforms)

    def names_of(self, layers: Sequence[ExpertsLayer]) -> frozenset[str]:
        """The tensors in the checkpoint that hold the experts of these layers."""
        parameters = [f"{layer.path}.{name}" for layer in layers for name in layer.parameter_names]
        return frozenset(
            name for parameter in parameters for names in self._sources[parameter].values() for name in names
        )

    def stored(self, names: frozenset[str]) -> frozenset[str]:
        """The tensors of the files that these are kept in."""
        if not self.weights:
            return names
        return frozenset(t.name for name in names for _, t in self.weights[self._tensors[name][0]].parts.values())

    def layer_views(self, layer: ExpertsLayer) -> list[dict[str, _View]]:
        """Per expert of one layer, the view of each part. Raises as ``stack`` does."""
        views: list[dict[str, _View]] = [{} for _ in range(layer.num_experts)]
        gate_up, down = layer.parameter_names[:2]
        for suffix in ("", "_bias") if layer.has_bias else ("",):
            turn = layer.is_transposed and suffix == ""
            for expert, matrix in enumerate(self.stack(f"{layer.path}.{gate_up}{suffix}")):
                for part, view in _gate_and_up(layer, matrix.transposed() if turn else matrix).items():
                    views[expert][part + suffix] = _strided(layer, gate_up, view)
            for expert, matrix in enumerate(self.stack(f"{layer.path}.{down}{suffix}")):
                views[expert]["down" + suffix] = _strided(
                    layer, down, (matrix.transposed() if turn else matrix).whole()
                )
        return views

    def stack(self, parameter: str) -> _Stack:
        """Raises ``StoreError`` if the checkpoint lacks the parameter, ``UnsupportedModelError`` if it cannot be followed."""
        sources = self._sources.get(parameter)
        if not sources and parameter in self._tied:
            raise UnsupportedModelError(
                self._cannot_follow(parameter, f"it is tied to {self._tied[parameter]} and has no tensors of its own")
            )
        if not sources:
            raise store_error(
                self._folder, f"no tensor of the checkpoint holds {parameter}: incomplete, or of another model"
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

    def _tensors_by_name(self, headers: Sequence[Header]) -> dict[str, tuple[int, Tensor]]:
        tensors: dict[str, tuple[int, Tensor]] = {}
        for file, header in enumerate(headers):
            for name, tensor in header.tensors.items():
                if name in tensors:
                    raise store_error(header.path, f"tensor {name!r} is also in {headers[tensors[name][0]].path}")
                tensors[name] = (file, tensor)
        return tensors

    def _see_weights(self, source: Source) -> None:
        """Weights in the place of the tensors that they are kept in, each as a file of its own that has their values in fp32."""
        weights = source.weights(self.headers)
        self.weights = tuple(weights.values())
        self._tensors = {
            weight.name: (index, Tensor(weight.name, "F32", weight.shape, 0, 4 * math.prod(weight.shape)))
            for index, weight in enumerate(self.weights)
        }

    def _match(self, model: Any, transforms: Sequence[Any]) -> dict[str, dict[str | None, list[str]]]:
        """Checkpoint names per expert parameter and pattern of the converter (None: it is only renamed), in transformers' order."""
        matches: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, target, pattern in _renamed(model, self._tensors, transforms):
            if pattern is not None and target in self._shapes:
                target = self._dealt(target, pattern, name)
            if target in self._shapes:
                matches[target][pattern].append(name)
            elif pattern is not None:
                self._refuse_split(target, pattern, name)
        return matches

    def _dealt(self, target: str, pattern: str, name: str) -> str:
        """The parameter that an expert goes to where a converter deals one list of experts out, in equal parts, to several.

        Its first target is what ``target`` names. By the number in ``name``: a converted checkpoint has only some of the list.
        """
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        if not isinstance(converter.operations[0], core_model_loading.ErnieFuseAndSplitTextVisionExperts):
            return target
        match = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
        part = None if match is None else int(match[1]) // self._shapes[target][0]
        if part is None or part >= len(converter.target_patterns):
            raise store_error(self._folder, f"tensor {name!r} is of more experts than the model has")
        return target.replace(converter.target_patterns[0], converter.target_patterns[part])

    def _refuse_split(self, target: str, pattern: str, name: str) -> None:
        """A converter with several targets names the first alone: if any other is an experts parameter, it cannot be followed."""
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        ends = [t.replace("\\", "").lstrip(".") for t in converter.target_patterns]
        if len(ends) > 1 and any(parameter.endswith(end) for parameter in self._shapes for end in ends):
            raise UnsupportedModelError(
                self._cannot_follow(target, f"{name} is spread over {converter.target_patterns}")
            )

    def common_dtype(self, tensors: Iterable[str]) -> str:
        dtypes: dict[str, str] = {}
        for name in sorted(tensors):
            dtypes.setdefault(self._tensors[name][1].dtype, name)
        known = ", ".join(RAW_DTYPES.values())
        for dtype, name in dtypes.items():
            if dtype not in RAW_DTYPES:
                raise UnsupportedModelError(
                    f"{self._folder}: the expert tensor {name} is {dtype}. torch_mesh reads {known} checkpoints and quantises them "
                    "itself: use the unquantised original."
                )
        if len(dtypes) > 1:
            examples = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            raise UnsupportedModelError(
                f"{self._folder}: experts have different dtypes ({examples}). All must have one of {known}: save the model in one dtype."
            )
        return RAW_DTYPES[next(iter(dtypes), "BF16")]

    def _operand(self, parameter: str, names: Sequence[str], expected: tuple[int, ...]) -> _Stack:
        """Tensors of the parameter's rank are stacks of experts already; of one rank less, one expert each."""
        rank = len(expected)
        matrices: _Stack = []
        for name in names:
            file, tensor = self._tensors[name]
            if len(tensor.shape) == rank and len(names) == 1:
                stack = _split_experts(file, tensor)
                if self.weights and self.weights[file].layout.turned:
                    stack = [matrix.transposed() for matrix in stack]
                matrices.extend(stack)
            elif len(tensor.shape) == rank - 1:
                matrices.append(_Matrix((_plain_view(file, tensor),)))
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
        self, parameter: str, converter: Any, operands: dict[Any, _Stack], expected: tuple[int, ...]
    ) -> dict[Any, _Stack]:
        for operation in converter.operations:
            rule = _OPERATIONS.get(type(operation))
            result = rule(operation, operands, converter.source_patterns, expected) if rule is not None else None
            if result is None:
                raise UnsupportedModelError(self._cannot_follow(parameter, f"it is made by {operation!r}"))
            operands = result
        return operands

    def _single(self, parameter: str, operands: dict[Any, _Stack]) -> _Stack:
        if len(operands) != 1:
            raise UnsupportedModelError(self._cannot_follow(parameter, f"it is made of {len(operands)} tensors"))
        (stack,) = operands.values()
        return stack

    def _cannot_follow(self, parameter: str, why: str) -> str:
        return (
            f"{self._folder}: {parameter} cannot be read straight from the checkpoint, because {why}. "
            "Load the model with from_pretrained, then patch it with torch_mesh.patch."
        )


class _GgufStacks:
    """The experts in the files of a GGUF: each is one stretch of each of its layer's stacks, always [out, in]."""

    quantisation = _OF_GGUF

    def __init__(self, path: Path) -> None:
        self.headers = tuple(part.header for part in read_parts(path))
        found = gguf_weights(self.headers)
        self.weights = tuple(found.values())
        self._path = path
        self._places = {name: (index, weight) for index, (name, weight) in enumerate(found.items())}

    def names_of(self, layers: Sequence[ExpertsLayer]) -> frozenset[str]:
        return frozenset(name for layer in layers for name, _ in self._stacks_of(layer))

    def stored(self, names: frozenset[str]) -> frozenset[str]:
        return names

    def common_dtype(self, names: Iterable[str]) -> str:
        return "fp32"  # which all weights are read as

    def layer_views(self, layer: ExpertsLayer) -> list[dict[str, _View]]:
        views: list[dict[str, _View]] = [{} for _ in range(layer.num_experts)]
        for name, parts in self._stacks_of(layer):
            index, weight = self._places[name]
            values = Tensor(name, "F32", weight.shape, 0, 4 * math.prod(weight.shape))
            for expert, matrix in enumerate(_split_experts(index, values)):
                rows = matrix.shape[0] // len(parts)
                for number, part in enumerate(parts):
                    views[expert][part] = _strided(layer, name, matrix.rows(number * rows, rows))
        return views

    def _stacks_of(self, layer: ExpertsLayer) -> list[tuple[str, tuple[str, ...]]]:
        """The tensors that hold a layer's experts, each with the parts whose rows follow one another in it.

        Raises ``StoreError`` for what is missing or of another shape than the model's.
        """
        number = re.search(r"\.layers\.(\d+)\.", layer.path)
        if number is None:
            raise UnsupportedModelError(f"{self._path}: {layer.path} is in no numbered layer, and GGUF counts layers.")
        found: list[tuple[str, tuple[str, ...]]] = []
        for kind in ("weight", "bias") if layer.has_bias else ("weight",):
            suffix = "_bias" if kind == "bias" else ""
            fused = f"blk.{number[1]}.ffn_gate_up_exps.{kind}"
            if layer.has_gate and fused in self._places:
                found.append((fused, ("gate" + suffix, "up" + suffix)))
            else:
                apart = ("gate", "up") if layer.has_gate else ("up",)
                found += [(f"blk.{number[1]}.ffn_{part}_exps.{kind}", (part + suffix,)) for part in apart]
            found.append((f"blk.{number[1]}.ffn_down_exps.{kind}", ("down" + suffix,)))
        for name, parts in found:
            self._check(name, layer, len(parts), parts[0].startswith("down"), parts[0].endswith("_bias"))
        return found

    def _check(self, name: str, layer: ExpertsLayer, parts: int, is_down: bool, is_bias: bool) -> None:
        if name not in self._places:
            raise store_error(self._path, f"no tensor is called {name!r}, which {layer.path} needs: incomplete?")
        weight = self._places[name][1]
        rows, columns = (layer.hidden, layer.intermediate) if is_down else (layer.intermediate * parts, layer.hidden)
        expected = (layer.num_experts, rows) if is_bias else (layer.num_experts, rows, columns)
        if weight.shape != expected:
            path, tensor = weight.codes
            raise store_error(
                path,
                f"tensor {name!r} has the shape {list(weight.shape)}, {layer.path} needs {list(expected)}",
                tensor.offset,
            )


_Stacks = _ParameterStacks | _GgufStacks


def _plain_view(file: int, tensor: Tensor) -> _View:
    rows, columns = (*tensor.shape, 1, 1)[:2]
    return _View(file, tensor.offset, tensor.bytes, 0, rows, columns, columns, 1)


def _split_experts(file: int, tensor: Tensor) -> _Stack:
    experts = tensor.shape[0]
    size = tensor.bytes // experts if experts else 0
    return [
        _Matrix(
            (_plain_view(file, replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + i * size, bytes=size)),)
        )
        for i in range(experts)
    ]


# Each rule is one operation of transformers' mapping, or None where strides cannot describe it.
_Operands = dict[Any, _Stack]


def _merge(operation: Any, operands: _Operands, patterns: Sequence[str], expected: tuple[int, ...]) -> _Operands | None:
    return operands if operation.dim == 0 else None


def _concatenate(
    operation: Any, operands: _Operands, patterns: Sequence[str], expected: tuple[int, ...]
) -> _Operands | None:
    return _joined(operands, patterns, operation.dim - 1)


def _fuse_and_split(
    operation: Any, operands: _Operands, patterns: Sequence[str], expected: tuple[int, ...]
) -> _Operands | None:
    """The experts of one target: ``_dealt`` has split them."""
    return _joined(operands, patterns, operation.concat_dim - 1) if operation.stack_dim == 0 else None


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
        joined.append(_Matrix(tuple(part for m in matrices for part in m.parts), axis))
    return {patterns[0]: joined}


def _transpose(
    operation: Any, operands: _Operands, patterns: Sequence[str], expected: tuple[int, ...]
) -> _Operands | None:
    if len(operands) != 1 or {operation.dim0, operation.dim1} != {1, 2}:
        return None
    ((pattern, stack),) = operands.items()
    if operation.check_dims and stack and (len(stack), *stack[0].shape) == expected:
        return operands
    return {pattern: [matrix.transposed() for matrix in stack]}


def _deinterleave(
    operation: Any, operands: _Operands, patterns: Sequence[str], expected: tuple[int, ...]
) -> _Operands | None:
    if len(operands) != 1 or operation.inverse or operation.dim not in (1, 2):
        return None
    ((pattern, stack),) = operands.items()
    result = []
    for matrix in stack:
        turned = matrix if operation.dim == 1 else matrix.transposed()
        half = turned.shape[0] // 2
        even, odd = turned.rows(0, half, 2), turned.rows(1, half, 2)
        if even is None or odd is None or turned.shape[0] % 2:
            return None
        halves = _Matrix((even, odd))
        result.append(halves if operation.dim == 1 else halves.transposed())
    return {pattern: result}


_OPERATIONS: dict[type, Callable[..., _Operands | None]] = {
    core_model_loading.MergeModulelist: _merge,
    core_model_loading.Concatenate: _concatenate,
    core_model_loading.Transpose: _transpose,
    core_model_loading.Interleave: _deinterleave,
    core_model_loading.ErnieFuseAndSplitTextVisionExperts: _fuse_and_split,
}


def _gate_and_up(layer: ExpertsLayer, matrix: _Matrix) -> dict[str, _View | None]:
    count = layer.intermediate
    if not layer.has_gate:
        return {"up": matrix.whole()}
    if layer.is_concatenated:
        return {"gate": matrix.rows(0, count), "up": matrix.rows(count, count)}
    return {"gate": matrix.rows(0, count, 2), "up": matrix.rows(1, count, 2)}


def _strided(layer: ExpertsLayer, parameter: str, view: _View | None) -> _View:
    if view is None:
        raise UnsupportedModelError(
            f"{layer.path}.{parameter} cannot be read straight from the checkpoint, because no strides describe where its gate and up "
            "rows stand. Load the model with from_pretrained, then patch it with torch_mesh.patch."
        )
    return view


def _pieces(
    folder: Path,
    layers: Sequence[ExpertsLayer],
    placed: Sequence[Sequence[dict[str, _View]]],
) -> tuple[npt.NDArray[np.int64], dict[str, RawView]]:
    """Extents per expert, and the views into them that all experts share."""
    shared: dict[str, RawView] | None = None
    extents = []
    for layer, experts in zip(layers, placed, strict=True):
        for views in experts:
            pieces, raw_views = _expert_pieces(views)
            if shared is not None and raw_views != shared:
                raise UnsupportedModelError(
                    f"{folder}: the experts of {layer.path} are laid out differently from those of {layers[0].path}. "
                    "Save the model anew with save_pretrained, so that all are alike."
                )
            shared = raw_views
            extents.append(pieces)
    assert shared is not None, "find_experts returned at least one layer with experts"
    return np.array(extents, dtype=np.int64).reshape(len(layers), len(placed[0]), -1, 3), shared


def _expert_pieces(views: Mapping[str, _View]) -> tuple[list[tuple[int, int, int]], dict[str, RawView]]:
    pieces: list[tuple[int, int, int]] = []
    raw_views: dict[str, RawView] = {}
    for part in _PARTS:
        if part not in views:
            continue
        view = views[part]
        extent = (view.file, view.begin, view.size)
        if extent not in pieces:
            pieces.append(extent)
        raw_views[part] = {
            "piece": pieces.index(extent),
            "offset": view.offset,
            "row_stride": view.row_stride,
            "column_stride": view.column_stride,
        }
    return pieces, raw_views


def read_config(folder: str | os.PathLike[str]) -> transformers.PretrainedConfig:
    """The folder's config, whatever its quantisation. UnsupportedModelError if transformers does not know the model."""
    if is_gguf(folder):
        return gguf_model.read_config(Path(folder))
    check_folder(folder)
    if not (Path(folder) / "config.json").is_file():
        raise store_error(folder, "has no config.json: not a Hugging Face checkpoint")
    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except ValueError as problem:
        raise UnsupportedModelError(
            f"{folder}: transformers {transformers.__version__} refuses its config: {problem}"
        ) from problem
