"""Choose the experts of a prompt that are streamed to the device: a function of the prompt's routing and of constants.

The choice depends neither on residency nor on timing, so one prompt always gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Costs(NamedTuple):
    """Seconds each."""

    copy: float  # one record to the device
    row: float  # one more row of an expert on the CPU
    expert: float  # an expert on the CPU, excluding its rows


def choose_streamed(rows: Sequence[int], copy_seconds: float, row_seconds: float, expert_seconds: float) -> list[int]:
    """The experts to stream, those with most rows first; the CPU computes the others.

    ``rows``: per expert of a layer; 0 for experts that were not routed or have a slot on the device. Copies and the CPU
    run concurrently, so the choice minimizes the longer of the two. Products on the device count as free.
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
