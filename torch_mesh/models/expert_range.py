"""The experts of each layer that a rank has, where several ranks divide them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_mesh.system.collectives import gathered, this_machine
from torch_mesh.system.memory import available_bytes

EXPERT_RANGE = "_mesh_expert_range"  # the attribute of an experts module with its ExpertRange
OPENING = "the opening of the model"  # where its collective calls are


@dataclass(frozen=True)
class ExpertRange:
    """The experts of each layer on a rank: the range ``experts`` out of ``routed``.

    ``neighbours`` ranks, this one included, are on this machine and share its memory.
    """

    rank: int
    ranks: int
    routed: int
    neighbours: int

    @property
    def count(self) -> int:
        return self.routed // self.ranks

    @property
    def experts(self) -> range:
        return range(self.rank * self.count, (self.rank + 1) * self.count)

    @property
    def own(self) -> slice:
        """The slice of an array over all experts that has this rank's."""
        return slice(self.experts.start, self.experts.stop)

    def __str__(self) -> str:
        return f"experts {self.experts[0]} to {self.experts[-1]} of {self.routed}, rank {self.rank} of {self.ranks}"

    def to_dict(self) -> dict[str, int]:
        return {"rank": self.rank, "ranks": self.ranks, "first_expert": self.experts[0], "experts": self.count}

    def free_bytes(self) -> int | None:
        """Bytes that the ranks on this machine may take together: the minimum over what they see; None if one of them
        cannot see it. A collective call."""
        try:
            own = available_bytes()
        except OSError:
            own = None
        here = this_machine()
        seen = [free for machine, free in gathered((here, own), OPENING) if machine == here]
        return None if None in seen else min(seen)

    def source_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Restrict the arguments of a ``Source`` with all experts to this rank's."""
        own = self.own
        of_experts = {name: arguments.get(name) for name in ("checksums", "raw_views_of")}
        return {
            **arguments,
            "extents": arguments["extents"][:, own].copy(),
            **{name: None if values is None else values[:, own].copy() for name, values in of_experts.items()},
            "first_expert": self.experts.start,
            "routed_experts": self.routed,
        }

    def own_file(self, path: str) -> str:
        """``stats.rank1.jsonl`` for ``stats.jsonl``: ranks may share a folder."""
        whole = Path(path)
        return str(whole.with_name(f"{whole.stem}.rank{self.rank}{whole.suffix}"))
