"""Collective calls among the ranks of a job, and the error that they raise once another rank is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torch_mesh.errors import LostRankError, MeshError

# Part of gloo's error messages: gloo raises plain RuntimeErrors that name its source file.
_OF_GLOO = "gloo"


def this_machine() -> str:
    """An identifier that containers and processes on one machine share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def this_rank() -> str:
    return f"Rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()}"


def gathered(value: Any, where: str) -> list[Any]:
    """The values of all ranks, by rank. A collective call; ``where`` is for errors."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    with lost_ranks(where):
        torch.distributed.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def lost_ranks(where: str) -> Iterator[None]:
    """Within the block, collectives raise LostRankError if another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, MeshError) or not (  # torch_mesh's own messages may name a path with that word
            isinstance(error, torch.distributed.DistError) or _OF_GLOO in str(error)
        ):
            raise
        first = str(error).splitlines()[0]
        raise LostRankError(
            f"{this_rank()}, in {where}: another rank has ended, or has not answered within the process group's "
            f"time-out ({first}). See the first errors of the other ranks, end all ranks and restart them."
        ) from error
