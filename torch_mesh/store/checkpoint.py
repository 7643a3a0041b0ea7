"""Locate each expert in a Hugging Face checkpoint as downloaded.

Experts are described by offsets and strides (``views``), of quantized weights in their fp32 values; names and layouts
follow transformers' conversions (``mapping``) or GGUF (``gguf_experts``).

A function that takes the folder of a checkpoint also takes a GGUF file, the first of its parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from torch_mesh import _C
from torch_mesh.errors import UnsupportedModelError
from torch_mesh.formats import FORMATS, format_of_layer
from torch_mesh.models.families import (
    ExpertsLayer,
    ExpertTensors,
    common_activation,
    common_geometry,
    find_experts,
    unpooled_layers,
)
from torch_mesh.store import gguf_model
from torch_mesh.store.codes import KeptCodes, kept_codes
from torch_mesh.store.gguf import gguf_files, is_gguf, read_gguf
from torch_mesh.store.gguf_experts import OF_GGUF, GgufStacks
from torch_mesh.store.header import Header, Tensor, read_header, read_range, store_error, utf8_path
from torch_mesh.store.manifest import Shape, is_store
from torch_mesh.store.mapping import ParameterStacks
from torch_mesh.store.sources import check_unquantized, method_of, nearest, own_quantization, source_of
from torch_mesh.store.sources.layout import Nearest, Weight, nearest_to
from torch_mesh.store.store_plan import Piece
from torch_mesh.store.views import PARTS, expert_extents
from torch_mesh.store.weight_files import check_folder, weight_files

if TYPE_CHECKING:
    from torch_mesh._C import RawView

TORCH_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_Stacks = ParameterStacks | GgufStacks
# Parts of a file's data that its identity includes, evenly spaced from its beginning on.
_SAMPLES, _SAMPLE_BYTES = 8, 4096


@dataclass(frozen=True)
class CheckpointExperts:
    """The located experts of a checkpoint.

    ``extents`` is int64 [layers, experts, pieces, 3] of (index in ``files``, offset, bytes); ``raw_views`` locates
    gate, up, down and biases in those pieces, equally for all experts. ``modules`` are the paths of the experts
    modules, ``names`` the tensors that hold experts; ``other_tensors`` are all others, by file.

    For a quantized checkpoint, ``weights`` are all weights, and ``extents`` refer to them as if they were fp32;
    ``kept`` locates codes and scales, or values in bf16, if a record can hold them.
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
    quantization: Mapping[str, Any] | None = None
    weights: tuple[Weight, ...] = ()
    kept: KeptCodes | None = None
    key_mapping: Mapping[str, str] | None = None

    @property
    def format(self) -> str:
        if not self.weights:
            return self.dtype
        experts = self._of_experts()
        quantized = [weight for weight in experts if not weight.is_plain]  # the others are biases
        return ", ".join(sorted({weight.layout.title for weight in quantized or experts}))

    @property
    def read_dtype(self) -> str:
        """The dtype of unquantized values in the files."""
        return self.dtype if self.kept is None else self.kept.dtype

    @property
    def expert_bytes(self) -> int:
        return self.all_experts_bytes // (self.extents.shape[0] * self.extents.shape[1])

    @property
    def all_experts_bytes(self) -> int:
        if not self.weights:
            return int(self.extents[..., 2].sum())
        return sum(weight.stored_bytes for weight in self._of_experts())

    @property
    def reads_per_expert(self) -> int:
        if self.kept is not None:
            return int(self.kept.extents.shape[2])
        pieces = self.extents[0, 0, :, 0].tolist()
        return sum(len(self.weights[index].parts) for index in pieces) if self.weights else len(pieces)

    @property
    def own_records(self) -> tuple[str, int] | None:
        """The format and group size of records that can be read from the files without a conversion."""
        if not self.weights:
            return "bf16", 0
        return None if self.kept is None else (self.kept.weights, self.kept.group_size)

    def reads_as(self, weights: str, group_size: int) -> bool:
        """Whether such records can be read from the files without a conversion; smaller groups than the files' repeat
        scales."""
        if self.kept is None:
            return (weights, group_size) == self.own_records
        return weights == self.kept.weights and group_size in self.kept.groups

    @property
    def rest_is_quantized(self) -> bool:
        """Whether other weights than the experts' are quantized, or have other names and values than in transformers,
        as in GGUF files."""
        if is_gguf(self.folder):
            return True
        of_experts = {weight.name for weight in self._of_experts()} if self.weights else set()
        return any(not weight.is_plain and weight.name not in of_experts for weight in self.weights)

    @property
    def expert_files(self) -> tuple[Path, ...]:
        return tuple(header.path for header in self.headers if not self.names.isdisjoint(header.tensors))

    def nearest(self) -> Nearest:
        """The format of ours nearest to that of the experts."""
        if self.kept is not None and not FORMATS[self.kept.weights].holds_bf16:
            rounded = f"with scales rounded to bf16, by about {self.kept.error:.2%}"
            scales = rounded if self.kept.error else "and scales as they are"
            return Nearest(
                self.kept.weights, self.kept.group_size, self.kept.error, f"which holds their codes {scales}"
            )
        return self.rounded()

    def rounded(self) -> Nearest:
        """The format to which their values are best rounded."""
        return nearest(self._of_experts()) if self.weights else nearest_to(self.dtype)

    @property
    def fits_bf16(self) -> bool:
        """Whether bf16 represents every value exactly."""
        choice = self.rounded()
        return choice.exact and choice.weights == "bf16"

    def _of_experts(self) -> list[Weight]:
        return [self.weights[index] for index in sorted(set(self.extents[..., 0].flatten().tolist()))]

    @property
    def other_tensors(self) -> list[tuple[Header, list[Tensor]]]:
        """Tensors without routed experts, by file and in the file's order."""
        by_file = [
            (header, [t for t in header.tensors.values() if t.name not in self.names]) for header in self.headers
        ]
        return [(header, sorted(tensors, key=lambda t: t.offset)) for header, tensors in by_file if tensors]

    @cached_property
    def fingerprint(self) -> str:
        return checkpoint_fingerprint((header.path for header in self.headers), self.quantization, self.key_mapping)

    def source_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``torch_mesh._C.Source``. A raw checkpoint has no checksums: first reads set them."""
        kept = self.kept
        return {
            "files": [(utf8_path(path), size) for path, size in self.files],
            "extents": self.extents if kept is None else kept.extents,
            "checksums": None,
            "store_id": bytes(16),
            "raw_dtype": self.dtype if kept is None else kept.dtype,
            "raw_views": [self.raw_views] if kept is None else kept.raw_views,
            "raw_views_of": None if kept is None else kept.raw_views_of,
        }

    def pack_kept(self, layer: int, expert: int, group_size: int) -> torch.Tensor:
        """Read one expert's codes and scales into a record. Raises ``StoreError`` for invalid ones."""
        kept = self.kept
        assert kept is not None
        extents = kept.extents[layer, expert].tolist()
        pieces = [read_range(self.files[file][0], offset, size) for file, offset, size in extents]
        try:
            views = kept.views_of(layer, expert)
            own = format_of_layer(kept.weights, layer)
            record = _C.pack_raw(pieces, kept.dtype, views, own, group_size, *self.shape.sizes)
        except ValueError as problem:
            file, offset, _ = extents[0]
            where = f"expert {expert} of layer {layer}"
            raise store_error(self.files[file][0], f"{where}: {problem}", offset) from None
        # Records of other layers may be larger.
        record += bytes(self.shape.record_bytes(kept.weights, group_size) - len(record))
        return torch.frombuffer(record, dtype=torch.uint8)

    def read_expert(self, layer: int, expert: int) -> ExpertTensors:
        """Read one expert's weights in the checkpoint's dtype; ``gate``, ``up`` and ``down`` are views of one
        buffer."""
        pieces = [self._read_piece(*extent) for extent in self.extents[layer, expert].tolist()]
        tensors = {part: self._view(pieces, part) for part in PARTS}
        return ExpertTensors(**tensors)  # type: ignore[arg-type]  # up and down are always there

    def pieces(self, layer: int, expert: int) -> list[Piece]:
        """The ranges of files that ``read_expert`` and ``pack_kept`` read."""
        extents = self.extents[layer, expert].tolist()
        if not self.weights:
            return [(self.headers[file].path, offset, size) for file, offset, size in extents]
        return [p for extent in extents for p in self.weights[extent[0]].pieces(self._index_in_stack(*extent))]

    def _read_piece(self, file: int, offset: int, size: int) -> torch.Tensor:
        if not self.weights:
            return torch.frombuffer(read_range(self.files[file][0], offset, size), dtype=TORCH_DTYPES[self.dtype])
        return self.weights[file].read(self._index_in_stack(file, offset, size)).flatten()

    def _index_in_stack(self, file: int, offset: int, size: int) -> int | None:
        """The index of the expert at an extent of a quantized weight; None if the weight is no stack of experts."""
        return offset // size if size < 4 * math.prod(self.weights[file].shape) else None

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
    architectures = getattr(config, "architectures", None) or [""]
    model_class = getattr(transformers, architectures[0], None)
    if model_class is None and hasattr(config, "auto_map"):
        raise _own_code_error(architectures[0])
    with torch.device("meta"):
        try:
            return (model_class or transformers.AutoModelForCausalLM.from_config)(config)
        except Exception as problem:  # transformers raises anything for inconsistent sizes
            raise UnsupportedModelError(
                f"{type(config).__name__} describes no causal language model: {problem}"
            ) from problem


def _own_code_error(architecture: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The model class {architecture!r} is code of the checkpoint; torch_mesh only runs models of transformers."
    )


def shape_of(layers: Sequence[ExpertsLayer]) -> Shape:
    geometry = common_geometry(layers)
    return Shape(
        layers=len(layers),
        experts=geometry.num_experts,
        top_k=max(layer.top_k for layer in layers),
        **geometry.sizes._asdict(),
        activation=common_activation(layers),
    )


def find_checkpoint_experts(
    folder: str | os.PathLike[str], model: transformers.PreTrainedModel, key_mapping: Mapping[str, str] | None = None
) -> CheckpointExperts:
    """Locate the experts of ``model`` in the checkpoint in ``folder``.

    ``key_mapping`` renames tensors first, as in ``from_pretrained``. ``model`` may be on the meta device, but needs its
    expert parameters. Raises ``UnsupportedModelError`` for unsupported quantization, mixed dtypes, and layouts that
    strides cannot describe; ``StoreError`` for damaged or incomplete files.
    """
    folder = Path(folder)
    if is_gguf(folder):
        return _experts_of(folder, find_experts(model), GgufStacks(folder))
    stacks = ParameterStacks(folder, model, find_quantization(folder, model.config), key_mapping)
    if stacks.quantization is None:
        check_unquantized(folder, stacks.headers)
    return dataclasses.replace(_experts_of(folder, find_experts(model), stacks), key_mapping=key_mapping)


def find_unpooled(
    folder: str | os.PathLike[str], model: transformers.PreTrainedModel, key_mapping: Mapping[str, str] | None = None
) -> list[tuple[ExpertsLayer, CheckpointExperts]]:
    """Each layer of experts that no pool takes, and its experts in the folder, which may be a converted checkpoint.

    Raises as ``find_checkpoint_experts`` does.
    """
    layers = unpooled_layers(model)
    if not layers:
        return []
    folder = Path(folder)
    stacks: _Stacks = (
        GgufStacks(folder)
        if is_gguf(folder)
        else ParameterStacks(
            folder, model, None if is_store(folder) else find_quantization(folder, model.config), key_mapping
        )
    )
    return [(layer, _experts_of(folder, [layer], stacks)) for layer in layers]


def _experts_of(folder: Path, layers: Sequence[ExpertsLayer], stacks: _Stacks) -> CheckpointExperts:
    names = stacks.names_of(layers)
    dtype = stacks.common_dtype(names)
    placed = [stacks.layer_views(layer) for layer in layers]
    extents, raw_views = expert_extents(folder, layers, placed)
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
        quantization=stacks.quantization,
        weights=stacks.weights,
        kept=kept_codes(stacks.weights, headers, extents, raw_views) if stacks.weights else None,
    )


def checkpoint_fingerprint(
    files: Iterable[Path],
    quantization: Mapping[str, Any] | None = None,
    key_mapping: Mapping[str, str] | None = None,
) -> str:
    """Hex digest of the files' names, sizes, modification times, headers and samples of their data, and of how they
    are to be read. Copies keep a modification time, and images set all to one, so that it alone tells too little."""
    return fingerprint_of_files(map(_identity_of, sorted(files)), quantization, key_mapping)


def fingerprint_of_files(
    identities: Iterable[bytes], quantization: Mapping[str, Any] | None, key_mapping: Mapping[str, str] | None
) -> str:
    """Hex digest of what identifies each file, and of how they are to be read."""
    digest = hashlib.blake2b(digest_size=16)
    if quantization is not None:
        digest.update(json.dumps(quantization, sort_keys=True).encode())
    if key_mapping:
        digest.update(json.dumps([*key_mapping.items()]).encode())  # order matters
    for identity in identities:
        digest.update(identity)
    return digest.hexdigest()


def _identity_of(path: Path) -> bytes:
    header = read_gguf(path).header if is_gguf(path) else read_header(path)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        raw = file.read(header.data_start)
        samples = []
        for number in range(_SAMPLES):
            file.seek(len(raw) + (status.st_size - len(raw)) * number // _SAMPLES)
            samples.append(file.read(_SAMPLE_BYTES))
    about = f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0{len(raw)}\0"
    return os.fsencode(about) + raw + b"".join(samples)


def find_quantization(folder: Path, config: Any = None) -> Mapping[str, Any] | None:
    """The quantization of the checkpoint in ``folder`` by another tool, from its own config.json or else ``config``;
    None without any.

    Raises ``UnsupportedModelError`` for a store, and for unsupported quantization.
    """
    if is_gguf(folder):
        return OF_GGUF
    declared = own_quantization(folder)
    if declared is None and config is not None and not (folder / "config.json").is_file():
        declared = getattr(config, "quantization_config", None)
        declared = declared if declared is None or isinstance(declared, dict) else declared.to_dict()
    if declared is None:
        return None
    if method_of(declared) != "mesh":
        source_of(declared, str(folder))
        return declared
    if is_store(folder):
        raise UnsupportedModelError(f"{folder} is a converted store already; open it without converting it again.")
    return None  # the config of a patched model, and ordinary weights


def checkpoint_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The weight files of a checkpoint. Raises ``StoreError`` if some are missing."""
    return gguf_files(folder) if is_gguf(folder) else weight_files(folder)


# What transformers raises for configs with wrong values.
_REFUSALS = (ValueError, TypeError, AttributeError, KeyError, ArithmeticError, StrictDataclassError)


def read_config(folder: str | os.PathLike[str]) -> transformers.PretrainedConfig:
    """The folder's config, whatever its quantization; runs no code of the checkpoint.

    Raises UnsupportedModelError if transformers refuses it, or has no such config.
    """
    if is_gguf(folder):
        return gguf_model.read_config(Path(folder))
    check_folder(folder)
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise store_error(folder, "has no config.json: not a Hugging Face checkpoint")
    with contextlib.suppress(ValueError, RecursionError):  # transformers names these, and reads other encodings
        if not isinstance(content := json.loads(path.read_bytes()), dict):
            raise store_error(path, f"is not a config: {content!r:.80} is not an object")
    try:
        table, _ = transformers.PretrainedConfig.get_config_dict(folder)
        if "AutoConfig" in (table.get("auto_map") or ()) and table.get("model_type") not in transformers.CONFIG_MAPPING:
            raise _own_code_error((table.get("architectures") or [""])[0])
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except RecursionError as problem:
        raise store_error(path, "is not valid JSON: it nests too deep") from problem
    except _REFUSALS as problem:
        raise UnsupportedModelError(
            f"{folder}: transformers {transformers.__version__} refuses its config: {type(problem).__name__}: {problem}"
        ) from problem
