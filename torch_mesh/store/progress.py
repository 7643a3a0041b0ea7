"""A progress bar on standard error or in a notebook, with rate and remaining time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch_mesh.store.store_plan import Progress


@contextlib.contextmanager
def progress_bar(description: str, show: bool = True, unit: str = "B") -> Iterator[Progress]:
    """A callback for ``write_store``, ``verify`` and ``offline.answer``. Draws nothing without a terminal or notebook,
    or without ``show``."""
    from tqdm.auto import tqdm  # late: slow to import, and few commands need it

    # None: only on a terminal, which a notebook is not; without widgets it shows a terminal's bar.
    disable = False if "ipykernel.zmqshell" in sys.modules else None
    bar: tqdm | None = None

    def progress(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:  # only now, so that there is no bar if everything exists already
            bar = tqdm(
                desc=description, total=total, unit=unit, unit_scale=unit == "B", disable=disable if show else True
            )
        bar.update(done - bar.n)

    try:
        yield progress
    finally:
        if bar is not None:
            bar.close()
