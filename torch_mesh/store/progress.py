"""A progress bar on standard error or in a notebook, with rate and time left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch_mesh.store.store_plan import Progress


@contextlib.contextmanager
def progress_bar(description: str, show: bool = True) -> Iterator[Progress]:
    """Yields a callback for ``write_store`` and ``verify``. Draws nothing where standard error is neither a terminal nor a notebook's, or without ``show``."""
    from tqdm.auto import tqdm  # here: it takes a while, and few commands need it

    # None asks whether there is a terminal, which a notebook is not; without widgets it shows the bar of a terminal.
    disable = False if "ipykernel.zmqshell" in sys.modules else None
    bar: tqdm | None = None

    def progress(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:  # now, and not before: what is there already is not made again, and has no bar
            bar = tqdm(desc=description, total=total, unit="B", unit_scale=True, disable=disable if show else True)
        bar.update(done - bar.n)

    try:
        yield progress
    finally:
        if bar is not None:
            bar.close()
