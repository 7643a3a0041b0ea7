"""Expert use counts of a model, saved for the next process. docs/profiles.md describes the file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_mesh.errors import MeshError
from torch_mesh.routing.traces import Trace
from torch_mesh.system.atomic_files import new_file

if TYPE_CHECKING:
    from torch_mesh.models.expert_range import ExpertRange
    from torch_mesh.models.families import ExpertsLayer

FORMAT = "torch_mesh profile"
VERSION = 1
_MAX_FILE_BYTES = 256 * 2**20
_MAX_SIZE = 65536
# Older counts are scaled down to this many tokens of a layer, so that they fade.
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class Profile:
    """``tokens`` int64 [layers]: tokens seen by each layer; ``uses`` int64 [layers, experts]; ``top_k`` experts of a
    token."""

    tokens: npt.NDArray[np.int64]
    uses: npt.NDArray[np.int64]
    top_k: int

    @property
    def layers(self) -> int:
        return self.uses.shape[0]

    @property
    def experts(self) -> int:
        return self.uses.shape[1]

    @property
    def shape(self) -> str:
        return f"{self.layers} layers of {self.experts} experts, {self.top_k} of them for each token"

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self.tokens, self.uses


def profile_of_trace(trace: Trace, prompts: slice | None = None) -> Profile:
    """The uses in a trace, or in some of its sequences. Raises ValueError if there are none."""
    ids = trace.ids[slice(*trace.token_range(prompts))]
    uses = np.stack([np.bincount(ids[:, layer].ravel(), minlength=trace.experts) for layer in range(trace.layers)])
    return Profile(np.full(trace.layers, len(ids), np.int64), uses.astype(np.int64), trace.top_k)


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile atomically."""
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "layers": profile.layers,
        "experts": profile.experts,
        "top_k": profile.top_k,
        "tokens": profile.tokens.tolist(),
        "uses": profile.uses.tolist(),
    }
    with new_file(path, "w") as file:
        json.dump(fields, file)


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile. Raises MeshError for an invalid file; OSError if it cannot be read."""
    path = Path(path)
    try:
        size = path.stat().st_size
    except OSError as error:
        advice = (
            "name a file that torch_mesh.save_profile or torch-mesh routing profile has written, or leave profile out"
        )
        raise OSError(error.errno, f"{error.strerror}: {advice}", os.fspath(path)) from error
    if size > _MAX_FILE_BYTES:
        raise MeshError(f"{path} has {size} bytes; a profile has at most {_MAX_FILE_BYTES}.")
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise MeshError(f"{path} is not a profile (a JSON file, see docs/profiles.md): {error}") from error
    return _checked(path, fields)


def _checked(path: Path, fields: Any) -> Profile:
    def refuse(message: str) -> MeshError:
        return MeshError(f"{path}: {message}; docs/profiles.md has the format.")

    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise refuse(f"'format' must be {FORMAT!r}")
    if fields.get("version") != VERSION:
        raise refuse(f"'version' is {fields.get('version')!r}; this torch_mesh reads {VERSION}")
    for name in ("layers", "experts", "top_k"):
        value = fields.get(name)
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise refuse(f"{name!r} must be an integer from 1 to {_MAX_SIZE}; it is {value!r}")
    layers, experts, top_k = fields["layers"], fields["experts"], fields["top_k"]
    if top_k > experts:
        raise refuse(f"'top_k' is {top_k}; allowed: 1 to {experts}, the experts of a layer")
    tokens = _counts(fields.get("tokens"), (layers,))
    uses = _counts(fields.get("uses"), (layers, experts))
    if tokens is None:
        raise refuse(f"'tokens' must be {layers} integers, 0 or more")
    if uses is None:
        raise refuse(f"'uses' must be {layers} lists of {experts} integers, 0 or more")
    if too_many := np.argwhere(uses > tokens[:, None]).tolist():
        layer, expert = too_many[0]
        raise refuse(
            f"'uses' has {uses[layer, expert]} for expert {expert} of layer {layer}; allowed: 0 to {tokens[layer]}, "
            "its 'tokens'"
        )
    return Profile(tokens, uses, top_k)


def _counts(value: Any, shape: tuple[int, ...]) -> npt.NDArray[np.int64] | None:
    """``value`` as int64 of ``shape``; None unless it holds that many integers in the range of int64."""
    rows = value if len(shape) == 2 else [value]
    if not isinstance(rows, list) or len(rows) != (shape[0] if len(shape) == 2 else 1):
        return None
    for row in rows:
        if not isinstance(row, list) or len(row) != shape[-1]:
            return None
        if not all(type(count) is int and 0 <= count < 2**62 for count in row):
            return None
    return np.array(rows, dtype=np.int64).reshape(shape)


def check_profile(path: str | None, layers: Sequence[ExpertsLayer], stored_layers: int) -> None:
    """Raise before a conversion what opening the pool would raise later: MeshError or OSError for a profile that does
    not fit. ``stored_layers``: those of the records; 0: as many as run, or more."""
    if path is not None:
        top_k = max(layer.top_k for layer in layers)
        profile = load_profile(path)
        count = stored_layers or max(profile.layers, len(layers))
        check_fits(profile, path, count, layers[0].routed_experts, top_k)


def pool_profile(
    path: str | None,
    layers: int,
    experts: int,
    top_k: int,
    layer_indices: Sequence[int] | None = None,
    expert_range: ExpertRange | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """The initial counts of a pool's engine: the profile in ``path``, with old tokens faded; None without one.

    ``layer_indices``: the layers that run, if not all of the store's. ``expert_range``: the experts of this rank.
    """
    if path is None:
        return None
    profile = load_profile(path)
    if expert_range is not None:  # there may be fewer than top_k to keep
        experts, top_k = expert_range.routed, profile.top_k
    check_fits(profile, path, layers, experts, top_k)
    shrink = np.maximum(1, -(-profile.tokens // _MAX_TOKENS))  # an integer factor, so that uses stay below tokens
    tokens, uses = profile.tokens // shrink, profile.uses // shrink[:, None]
    if layer_indices is not None:
        idle = np.isin(np.arange(layers), layer_indices, invert=True)
        tokens[idle], uses[idle] = 0, 0
    return tokens, uses if expert_range is None else uses[:, expert_range.own].copy()


def check_fits(profile: Profile, path: str, layers: int, experts: int, top_k: int) -> None:
    """Raises MeshError for a profile of another shape."""
    wanted = (layers, experts, top_k)
    if (profile.layers, profile.experts, profile.top_k) != wanted:
        raise MeshError(
            f"{path} is the profile of another model: it has {profile.shape}; this model has {layers} layers of "
            f"{experts}, {top_k} for each token. Save one with torch_mesh.save_profile, or leave profile out."
        )
