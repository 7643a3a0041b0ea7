"""Which experts of a prompt are computed on the device though they have no slot there: a function of its routing and of constants.

What is resident and how long this call takes do not enter, so that the same prompt takes the same way and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Costs(NamedTuple):
    """Seconds, as measured once for a placement or given in ``MeshConfig.gpu.streaming``."""

    copy: float  # of one record to the device
    row: float  # of the CPU for one more row of an expert
    expert: float  # of the CPU for an expert, beside its rows


def choose_streamed(rows: Sequence[int], copy_seconds: float, row_seconds: float, expert_seconds: float) -> list[int]:
    """The experts whose records go up, those with most rows first; the CPU computes the others.

    ``rows``: of each of a layer's experts, 0 for those that nobody routed or that have a slot on the device. Copies and the CPU go on
    beside each other, so what takes longer of the two is made as short as it gets. Products on the device count as free.
    """
    order = sorted(
        (expert for expert, count in enumerate(rows) if count > 0), key=lambda expert: (-rows[expert], expert)
    )
    host = sum(expert_seconds + rows[expert] * row_seconds for expert in order)
    chosen, shortest = 0, host
    for count, expert in enumerate(order, start=1):
        host -= expert_seconds + rows[expert] * row_seconds
        if max(count * copy_seconds, host) < shortest:
            chosen, shortest = count, max(count * copy_seconds, host)
    return order[:chosen]
