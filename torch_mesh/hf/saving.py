"""``save_pretrained`` of a patched model, and its quantizer for transformers.

Exact weights are written as an ordinary checkpoint. Rounded experts are saved as they are: the folder is like one of
``torch-mesh convert``, with the current values of all other weights.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import HfApi
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import create_and_tag_model_card

from torch_mesh.errors import MeshError, StoreError
from torch_mesh.formats import FORMATS, format_of_layer, is_passthrough, name_of_layers, short_name
from torch_mesh.hf.compat import has_own_adapters
from torch_mesh.hf.model_config import patched_models, without_config_metadata
from torch_mesh.hf.streaming_save import LazyTensor, PackedPart, Unpacking, being_saved, wrap_saving
from torch_mesh.hf.wrapping import wrap
from torch_mesh.models.families import ExpertsLayer, find_experts, unpooled_layers
from torch_mesh.modules.dense import packed_linears
from torch_mesh.modules.experts import MeshExperts, patched_modules, pools_of, unpacked_parameters
from torch_mesh.modules.tables import PackedTableWeight, check_room, table_modules
from torch_mesh.pool.expert_pool import ExpertPool
from torch_mesh.store.convert import plan_of_model
from torch_mesh.store.dense_codes import Matrix, files_of_codes, is_codes_file
from torch_mesh.store.dense_weights import mesh_config, plain_config
from torch_mesh.store.folders import check_free_space, full_disk_as_store_error
from torch_mesh.store.manifest import (
    MANIFEST_NAME,
    Manifest,
    OtherFile,
    Store,
    described,
    is_record_file,
    is_store,
    open_store,
    read_manifest,
)
from torch_mesh.store.progress import progress_bar
from torch_mesh.store.table_files import is_table_file
from torch_mesh.store.weight_files import variant_in
from torch_mesh.store.writer import write_store
from torch_mesh.system.atomic_files import new_file, new_file_mode, scratch_folder

_COPY_BYTES = 64 << 20
_READABLE = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_STAGING_PREFIX = ".torch_mesh-saving-"
_ASIDE_PREFIX = ".torch_mesh-replaced-"


class PatchedModelQuantizer(HfQuantizer):
    """The ``hf_quantizer`` of a patched model."""

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor] | None, dict]:
        """The state dict that transformers writes: lazy tensors for packed weights, nothing for rounded experts."""
        if has_own_adapters(model):
            return None, {}  # only adapters are saved
        unpacking = being_saved.get()
        if unpacking is None:
            raise MeshError(
                f"{type(model).__name__} is patched: save it with model.save_pretrained(folder), not with a copy of "
                "that method from before torch_mesh was imported."
            )
        return dict(unpacking.state), {}


def attach_quantizer(model: nn.Module, quantizer: PatchedModelQuantizer) -> None:
    """Give ``model`` and inner models ``quantizer``, by which ``save_pretrained`` knows that they are patched."""
    for module in patched_models(model):
        module.hf_quantizer = quantizer


def detach_quantizer(model: nn.Module) -> None:
    for module in patched_models(model):
        if isinstance(vars(module).get("hf_quantizer"), PatchedModelQuantizer):
            del module.hf_quantizer


def _save_any(theirs: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(vars(model).get("hf_quantizer"), PatchedModelQuantizer):
        return _save_pretrained(theirs, model, *args, **kwargs)
    with without_config_metadata(model):
        return theirs(model, *args, **kwargs)


# Not an attribute of each model: a bound method there would keep the model alive.
wrap("transformers.modeling_utils.PreTrainedModel", "save_pretrained", _save_any)


def _save_pretrained(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    call = inspect.signature(original).bind(model, *args, **kwargs)
    call.apply_defaults()
    folder = call.arguments["save_directory"]
    adapters_only = has_own_adapters(model)
    expert_range = next((module._mesh_pool.expert_range for module in patched_modules(model)), None)
    if expert_range is not None and not adapters_only:
        raise MeshError(
            f"{type(model).__name__} is distributed, and this process has {expert_range}: open it whole in one "
            "process to save it, or copy the folder that it was opened from."
        )
    if adapters_only or os.path.isfile(folder):
        return original(*call.args, **call.kwargs)
    if not _saves_here(call.arguments["is_main_process"]):
        return os.makedirs(folder, exist_ok=True)
    upload = None
    if call.arguments["push_to_hub"]:
        upload = _Upload(model, Path(folder), call.arguments)
        call.arguments["push_to_hub"] = False
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pool = _rounded_pool(model)
    unpacking = _unpacking(
        model,
        call.arguments["state_dict"],
        with_experts=pool is None,
        original_format=call.arguments["save_original_format"],
    )
    write_plainly = functools.partial(_write_plainly, original, call)
    names = _write_folder(model, folder, unpacking, pool, call.arguments["variant"], write_plainly)
    if upload is not None:
        upload.run(names)


def _saves_here(is_main_process: bool) -> bool:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_main_process and not (distributed and torch.distributed.get_rank())


def _rounded_pool(model: nn.Module) -> ExpertPool | None:
    """The pool of experts that were rounded, which have to be saved as a store."""
    pools = pools_of(model)
    if all(pool.exact for pool in pools):
        return None
    if len(pools) > 1:
        raise MeshError(
            f"{type(model).__name__} has rounded experts in {len(pools)} pools, but a folder holds one: save the "
            "inner models one by one, or call torch_mesh.unpatch(model, lossy=True) first."
        )
    return pools[0]


def _unpacking(
    model: Any, given: Mapping[str, torch.Tensor] | None, *, with_experts: bool, original_format: bool
) -> Unpacking:
    state = dict(model.state_dict() if given is None else given)
    parts = []
    separate: dict[str, torch.Tensor] = {}
    with_others = bool(unpooled_layers(model))  # a family's own layout may join experts of both kinds
    for layer in _patched_layers(model):
        shapes = {f"{layer.path}.{name}": layer.parameters[name] for name in layer.parameter_names}
        if with_experts:
            parts.append(_part(shapes, state, functools.partial(_unpacked_experts, layer)))
            continue
        for name, like in shapes.items():
            if with_others:
                separate[name] = torch.empty(like.shape, dtype=like.dtype, device="meta")
            if name in state and _has_values(state.pop(name)):
                raise MeshError(
                    f"state_dict has values of {name}, but rounded experts are saved as they are: leave them out, or "
                    "call torch_mesh.unpatch(model, lossy=True) first."
                )
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    for path, linear in packed_linears(model):
        name = f"{path}.weight"
        if tied.get(name) in state:  # a head is packed on its own, and the embedding is saved
            state.pop(name, None)
            continue
        part = _part({name: linear.weight}, state, functools.partial(_unpacked_one, name, linear.unpacked_weight))
        parts.append(part)
        if part.weights and not linear.exact:
            rounded = linear._mesh_format
            warnings.warn(
                f"Linear layers that dense= rounded to {rounded} are saved as ordinary weights with their rounded "
                "values.",
                stacklevel=4,
            )
    for path, table in table_modules(model):
        name, weight = f"{path}.weight", cast(Any, table.weight)
        parts.append(_part({name: weight}, state, functools.partial(_unpacked_one, name, weight.unpacked)))
        if not parts[-1].weights:
            continue
        check_room(weight)
        if isinstance(weight, PackedTableWeight) and not weight.exact:
            warnings.warn(
                f"{path}, an embedding table whose rows were rounded to {weight.format}, is saved as an ordinary "
                "weight with its rounded values.",
                stacklevel=4,
            )
    return Unpacking(model, state, parts, original_format, separate)


def _part(shapes: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], unpack: Any) -> PackedPart:
    """The weights in ``state`` without values: a caller's state dict may omit or replace some."""
    packed = [name for name in shapes if name in state and not _has_values(state[name])]
    return PackedPart({n: torch.empty(shapes[n].shape, dtype=shapes[n].dtype, device="meta") for n in packed}, unpack)


def _has_values(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta


def _patched_layers(model: nn.Module) -> list[ExpertsLayer]:
    return [layer for layer in find_experts(model) if isinstance(layer.module, MeshExperts)]


def _unpacked_experts(layer: ExpertsLayer) -> dict[str, torch.Tensor]:
    return {f"{layer.path}.{name}": value for name, value in unpacked_parameters(layer, torch.device("cpu")).items()}


def _unpacked_one(name: str, unpack: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: unpack()}


def _write_plainly(original: Any, call: inspect.BoundArguments, unpacking: Unpacking, folder: Path) -> None:
    """transformers' own save_pretrained of the weights in ``unpacking``."""
    wrap_saving()
    call.arguments.update(save_directory=folder, state_dict=None)
    token = being_saved.set(unpacking)
    try:
        original(*call.args, **call.kwargs)
    finally:
        being_saved.reset(token)
        unpacking.state.clear()  # its tensors refer to it


def _write_folder(
    model: nn.Module,
    folder: Path,
    unpacking: Unpacking,
    pool: ExpertPool | None,
    variant: str | None,
    write_plainly: Callable[[Unpacking, Path], None],
) -> list[str]:
    """Write ``folder`` and return the names of the files. All files are complete before any is moved into place."""
    # Within the folder, to be on its file system.
    full = full_disk_as_store_error(folder, "What was there is as it was; free some room, or choose another folder")
    with scratch_folder(folder, _STAGING_PREFIX) as staging, full:
        manifest = None
        kept: list[OtherFile] = []
        matrices = _codes(model, unpacking.state)
        if pool is None:
            check_free_space(folder, unpacking.nbytes)
            _warn_of_lost_codes(model, matrices)
        else:
            codes = files_of_codes(matrices)
            manifest = _place_records(model, pool, staging, unpacking.nbytes + sum(file.size for file in codes))
            for file in codes:
                with new_file(staging / file.name) as writing:
                    writing.writelines(file.chunks())
        write_plainly(unpacking, staging)
        _set_quantization(staging / "config.json", model, manifest)
        if manifest is not None:
            kept = _kept(folder, manifest, variant)
            _write_manifest(staging, manifest, kept)
        return _move_into_place(staging, folder, variant, {file.name for file in kept})


def _codes(model: Any, state: Mapping[str, torch.Tensor]) -> list[Matrix]:
    """The codes that ``dense="codes"`` holds of linear layers whose own values are in ``state``."""
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    matrices = []
    for path, linear in packed_linears(model):
        name = f"{path}.weight"
        saved = state.get(name)
        if saved is None and name in tied:  # a head, whose embedding is saved, and may have been trained
            name = tied[name]
            saved = state.get(name)
        if saved is None or not is_passthrough(linear._mesh_format):
            continue
        if isinstance(saved, LazyTensor) or _equal(saved.detach().cpu(), linear.unpacked_weight()):
            packed = functools.partial(_chunks, linear._mesh_packed)
            matrices.append(Matrix(name, linear._mesh_format, linear._mesh_group_size, linear._mesh_shape, packed))
    return matrices


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _chunks(packed: torch.Tensor) -> list[memoryview]:
    return [packed.numpy().data]


def _warn_of_lost_codes(model: nn.Module, matrices: Sequence[Matrix]) -> None:
    if matrices:
        formats = ", ".join(sorted({matrix.format for matrix in matrices}))
        warnings.warn(
            f"{len(matrices)} linear layers of {type(model).__name__} hold a GGUF file's codes ({formats}). They are "
            "saved as ordinary weights with the same values, since only a folder with records of rounded experts has "
            'room for codes: to open the model with dense="codes" again, give the GGUF file.',
            stacklevel=5,
        )


def _place_records(model: nn.Module, pool: ExpertPool, staging: Path, beside: int) -> Manifest:
    """Put all records of ``pool`` into ``staging``: as hard links to the store where possible, else as copies.

    A link has the permissions of the store's file; if a new file's would differ, it is a copy. ``beside``: bytes that
    will be written in addition.
    """
    store = _store_of(model, pool)
    if store is None:
        return _write_records(model, pool, staging, beside)
    manifest = store.manifest
    sources = [(store.folder / file.name).resolve() for file in manifest.record_files]
    targets = [staging / file.name for file in manifest.record_files]
    mode = new_file_mode(staging)
    if all(_link(source, target, mode) for source, target in zip(sources, targets, strict=True)):
        check_free_space(staging, beside)
    else:
        for target in targets:
            target.unlink(missing_ok=True)
        check_free_space(staging, beside + sum(file.bytes for file in manifest.record_files))
        for source, target in zip(sources, targets, strict=True):
            _copy(source, target)
    # The same records, but not a conversion of that source: weights may have been trained, and tables are ordinary.
    fingerprint = f"{manifest.source_fingerprint.removesuffix(' saved')} saved"
    return replace(manifest, source_fingerprint=fingerprint, tables="")


def _store_of(model: nn.Module, pool: ExpertPool) -> Store | None:
    """The pool's store, if it is still in place and has the records that this model should save.

    Layers that were moved or removed since have other names there, or more of them are there.
    """
    if pool.store is None:
        return None
    layers = _patched_layers(model)
    try:
        now = open_store(pool.store.folder)
        as_named = [now.layer_of(layer.path) for layer in layers]
    except (StoreError, OSError):
        return None
    manifest = now.manifest
    same = manifest.store_id == pool.store.manifest.store_id and manifest.shape.layers == len(layers)
    return now if same and as_named == [layer.module._mesh_layer for layer in layers] else None


def _write_records(model: nn.Module, pool: ExpertPool, staging: Path, beside: int) -> Manifest:
    """Write experts that no store has under the names of this model's layers."""
    layers = _patched_layers(model)
    modules: list[Any] = [layer.module for layer in layers]
    weights = name_of_layers([format_of_layer(pool.weights, module._mesh_layer) for module in modules])
    group_sizes = FORMATS[weights].group_sizes  # of one format other ones than of a mixture with it
    group_size = pool.group_size if pool.group_size in group_sizes else group_sizes[0]
    plan = plan_of_model(model, layers, weights, group_size)
    check_free_space(staging, beside + plan.shape.layers * plan.shape.experts * plan.record_bytes)

    def record(layer: int, expert: int) -> torch.Tensor:
        module = modules[layer]
        whole = torch.from_numpy(module._mesh_pool.engine.read_record(module._mesh_layer, expert))
        return whole[: plan.record_bytes]  # the pool may have had larger records of other layers

    with progress_bar(f"Writing experts in {short_name(weights)}") as progress:
        store = write_store(staging / "records", plan, record, private=True, progress=progress).store
    for file in store.manifest.record_files:
        (store.folder / file.name).rename(staging / file.name)
    shutil.rmtree(store.folder)
    return store.manifest


def _link(source: Path, target: Path, mode: int) -> bool:
    """Try to link; False if ``source`` has other readers than ``mode``, or more writers."""
    try:
        own = source.stat().st_mode
        if (own ^ mode) & _READABLE or own & ~mode & _WRITABLE:
            return False
        os.link(source, target)
    except OSError:  # another file system, no hard links, or another user's file
        return False
    return True


def _copy(source: Path, target: Path) -> None:
    """Copy in the kernel, which shares blocks if the file system can."""
    with source.open("rb") as reading, target.open("xb") as writing:
        rest = os.fstat(reading.fileno()).st_size
        try:
            while rest and (count := os.copy_file_range(reading.fileno(), writing.fileno(), min(rest, _COPY_BYTES))):
                rest -= count
        except OSError as problem:
            if problem.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        shutil.copyfileobj(reading, writing, _COPY_BYTES)  # the remainder


def _set_quantization(path: Path, model: nn.Module, manifest: Manifest | None) -> None:
    text = path.read_text(encoding="utf-8")
    if manifest is None:
        text = plain_config(text)
    else:
        modules = [layer.path for layer in _patched_layers(model)]
        text = mesh_config(text, model, modules, manifest.weights, manifest.group_size)
    path.write_text(text, encoding="utf-8")


def _kept(folder: Path, manifest: Manifest, variant: str | None) -> list[OtherFile]:
    """The weights of other variants in ``folder`` that stay: those of a store with the same records.

    Rows of tables are replaced by ordinary weights, which the other variants lack.
    """
    if not is_store(folder):
        return []
    with contextlib.suppress(StoreError):
        files = (earlier := read_manifest(folder)).other_files
        if earlier.store_id == manifest.store_id and not any(is_table_file(file.name) for file in files):
            others = [file for file in files if variant_in(file.name) not in (None, variant or "")]
            return [file for file in others if (folder / file.name).is_file()]
    return []


def _write_manifest(staging: Path, manifest: Manifest, kept: Sequence[OtherFile]) -> None:
    records = {file.name for file in manifest.record_files}
    others = sorted(path for path in staging.iterdir() if path.name not in records)
    other_files = (*(described(path, manifest.store_id) for path in others), *kept)
    (staging / MANIFEST_NAME).write_text(replace(manifest, other_files=other_files).to_json(), encoding="utf-8")


def _move_into_place(staging: Path, folder: Path, variant: str | None, kept: Container[str]) -> list[str]:
    """Move files into place; what they replace, except for ``kept``, is moved aside and back if anything fails.

    The manifest leaves first and comes last: a partly replaced folder is no store.
    """
    names = sorted((path.name for path in staging.iterdir()), key=lambda name: (name == MANIFEST_NAME, name))
    replaced = [name for name in _outdated(folder, variant) if name not in kept]
    outdated = {name for name in [*replaced, *names] if os.path.lexists(folder / name)}
    # Outside the staging folder, which is removed: files that cannot be moved back are kept.
    aside = Path(tempfile.mkdtemp(prefix=_ASIDE_PREFIX, dir=folder))
    steps = [(folder / name, aside / name) for name in sorted(outdated, key=lambda name: (name != MANIFEST_NAME, name))]
    steps += [(staging / name, folder / name) for name in names]
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in steps:
            done.append((source, target))
            source.rename(target)
    except BaseException:
        for source, target in reversed(done):
            with contextlib.suppress(OSError):
                if not os.path.lexists(source):  # the last step may not have been taken
                    target.rename(source)
        try:
            aside.rmdir()
        except OSError:
            warnings.warn(f"Files of {folder} could not be moved back: they are in {aside}.", stacklevel=3)
        raise
    shutil.rmtree(aside)
    return names


def _outdated(folder: Path, variant: str | None) -> list[str]:
    """Files of an earlier save in ``folder`` that would be read with the new files, or instead of them; of a store all,
    whose other variants have no experts without its records."""
    outdated = [path.name for path in folder.iterdir() if variant_in(path.name) == (variant or "")]
    if not is_store(folder):
        return outdated
    with contextlib.suppress(StoreError):  # a damaged index may name any file
        manifest = read_manifest(folder)
        outdated += [file.name for file in manifest.record_files if is_record_file(file.name)]
        others = [file.name for file in manifest.other_files]
        outdated += [name for name in others if is_codes_file(name) or is_table_file(name)]
        outdated += [name for name in others if variant_in(name) is not None]
    return [MANIFEST_NAME, *outdated]


class _Upload:
    """``push_to_hub=True``. The repository is created first, so that missing permissions fail before the model is
    written."""

    def __init__(self, model: Any, folder: Path, arguments: dict[str, Any]) -> None:
        options = dict(arguments.get("kwargs", {}))
        self._folder = folder
        self._message = options.pop("commit_message", None) or f"Upload {type(model).__name__}"
        self._create_pr = options.pop("create_pr", False)
        self._tags = model.model_tags
        self._token = arguments["token"]
        name = options.pop("repo_id", folder.name)
        self._repository = HfApi().create_repo(name, exist_ok=True, token=self._token, **options).repo_id

    def run(self, names: Sequence[str]) -> None:
        create_and_tag_model_card(self._repository, self._tags, token=self._token).save(self._folder / "README.md")
        HfApi().upload_folder(
            repo_id=self._repository,
            folder_path=self._folder,
            allow_patterns=[*names, "README.md"],
            commit_message=self._message,
            create_pr=self._create_pr,
            token=self._token,
        )
