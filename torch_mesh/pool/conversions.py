"""Where the conversions of a checkpoint's experts are, and whether mirrors can serve them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch_mesh.config import MeshConfig
from torch_mesh.formats import FORMATS
from torch_mesh.pool.secondary_pool import packed_format
from torch_mesh.store.disk_cache import cache_folder
from torch_mesh.store.manifest import is_store


def cached_conversion(name: str, source: str, weights: str) -> Path:
    """The folder in the cache for a conversion of ``source``. A dot at its start would mark it as unfinished."""
    return cache_folder() / "stores" / f"{name.lstrip('.')}-{_digest(source, weights)}"


def source_of_conversion(fingerprint: str, weights: str, group_size: int) -> str:
    """What a conversion in the cache was made of, and how."""
    return f"{fingerprint} {weights} {group_size}"


def refuse_mirrors(folder: Path, mirrors: tuple[str, ...]) -> None:
    """Raise ValueError if there are ``mirrors``, since the experts of ``folder`` are still to be converted."""
    if mirrors:
        raise ValueError(
            f"mirrors={mirrors!r} need files that are read as they are, and the experts of {folder} would be "
            "converted now: convert first (torch-mesh convert), then copy the converted folder to the other drives, "
            "and open it with mirrors."
        )


def check_converted_for_mirrors(
    folder: Path, config: MeshConfig, fingerprint: str, weights: str, group_size: int
) -> None:
    """``refuse_mirrors``, unless the experts were converted. A conversion counts under any name of the model."""
    if not config.mirrors:
        return
    if config.store is not None:
        stores = [Path(config.store)]
    else:
        packed = packed_format(weights)
        if not FORMATS[packed].chosen_groups:
            group_size = config.group_size  # as the cache names formats that choose their groups themselves
        digest = _digest(source_of_conversion(fingerprint, packed, group_size), packed)
        stores = list((cache_folder() / "stores").glob(f"*-{digest}"))
    if not any(map(is_store, stores)):
        refuse_mirrors(folder, config.mirrors)


def _digest(source: str, weights: str) -> str:
    return hashlib.blake2b(f"{FORMATS[weights].version} {source}".encode(), digest_size=8).hexdigest()
