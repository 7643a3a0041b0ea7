"""Which files hold a checkpoint's weights: one file, the shards of an index, or those of a variant."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from torch_mesh.store.header import check_inner_name, read_json_file, store_error

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Weight files, shards and indexes that transformers saves, with their variant.
_SAVED = re.compile(
    r"model(\.(?P<of_file>((?!-\d{5}-of-\d{5}\.)[^/])+))?(?P<shard>-\d{5}-of-\d{5})?\.safetensors"
    r"|model\.safetensors\.index(\.(?P<of_index>[^/]+))?\.json"
)


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Raises ``StoreError`` unless it is a folder."""
    if os.path.isdir(folder):
        return
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass
    except OSError as error:  # no permission for the folder above, or its disk does not answer
        raise store_error(folder, f"cannot be looked at: {error.strerror}") from error
    if os.path.exists(folder):
        raise store_error(folder, "is a file; the folder of a checkpoint or store is needed")
    if os.path.islink(folder):
        raise store_error(folder, f"is a link to {os.path.realpath(folder)}, which does not exist")
    raise store_error(folder, "there is no such folder")


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files of a checkpoint folder, in the order in which transformers reads them.

    That is the file or index that config.json names as ``transformers_weights``, or ``model.safetensors``, or
    ``model.safetensors.index.json``, or that of the folder's only variant. Raises ``StoreError`` if there is none of
    these, if the index is malformed, or if it names anything but files in that folder.
    """
    folder = Path(folder)
    check_folder(folder)
    name = _weights_name(folder)
    if name is not None:
        path = folder / name
        return [folder / file for file in sorted(set(read_index(path).values()))] if is_index(name) else [path]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise store_error(
            folder,
            "has only pickled weights; torch_mesh reads safetensors: save the loaded model with save_pretrained",
        )
    raise store_error(folder, f"has neither {SINGLE_NAME} nor {INDEX_NAME}")


def variant_of(folder: Path) -> str | None:
    """The ``variant=`` for transformers, if the folder only has files of one variant; else None.

    Raises ``StoreError`` as ``weight_files`` does.
    """
    name = _weights_name(folder)
    return None if name is None or named_in_config(folder) else next(iter(_variants([name])), None)


def _weights_name(folder: Path) -> str | None:
    return (
        named_in_config(folder)
        or next((usual for usual in (SINGLE_NAME, INDEX_NAME) if (folder / usual).is_file()), None)
        or only_variant(folder, (path.name for path in folder.iterdir()))
    )


def is_index(name: str) -> bool:
    return name.endswith(".json")


def named_in_config(folder: Path) -> str | None:
    """The weight file or index that config.json names as ``transformers_weights``, or None.

    Raises ``StoreError`` for a name outside of the folder.
    """
    path = folder / "config.json"
    try:
        # Not parse_json: a config may have NaN and infinities.
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # reading the config raises the error
    name = table.get("transformers_weights") if isinstance(table, dict) else None
    if not isinstance(name, str) or not name.endswith((".safetensors", ".safetensors.index.json")):
        return None
    check_inner_name(path, name, "the model")
    return name


def only_variant(where: str | os.PathLike[str], names: Iterable[str]) -> str | None:
    """The weight file or index of the only variant among ``names``, as ``save_pretrained(variant="fp16")`` writes it;
    None without one. Raises ``StoreError`` for several."""
    found = _variants(names)
    if len(found) > 1:
        raise store_error(
            where,
            f"has the weights of several variants and no {SINGLE_NAME}: {', '.join(sorted(found.values()))}. Put "
            "those of one into a folder of their own, with the config and the tokenizer",
        )
    return next(iter(found.values()), None)


def _variants(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in sorted(names, key=is_index, reverse=True):  # transformers looks for the single file first
        match = _SAVED.fullmatch(name)
        if match is None or match["shard"]:  # an index names the shards
            continue
        if variant := match["of_file"] or match["of_index"]:
            found[variant] = name
    return found


def variant_in(name: str) -> str | None:
    """The variant of a weight file, shard or index that ``save_pretrained`` writes, "" without one; None for others."""
    match = _SAVED.fullmatch(name)
    return None if match is None else match["of_file"] or match["of_index"] or ""


def read_index(path: str | os.PathLike[str]) -> dict[str, str]:
    """The ``weight_map`` of a sharded checkpoint: tensor names to files in the index's folder or below."""
    path = Path(path)
    table = read_json_file(path, floats=True)  # some writers give total_size as a float
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise store_error(path, "has no 'weight_map' object that names tensors and their files")
    for tensor, name in weight_map.items():
        check_inner_name(path, name, f"tensor {tensor!r}")
    return weight_map
