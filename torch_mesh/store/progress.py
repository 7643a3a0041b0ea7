"""A progress bar on standard error, with rate and time left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import rich.progress
from rich.console import Console

from torch_mesh.store.writer import Progress


@contextlib.contextmanager
def progress_bar(description: str, show: bool = True) -> Iterator[Progress]:
    """Yields a callback for ``write_store`` and ``verify``. Draws nothing where standard error is no terminal, or without ``show``."""
    console = Console(stderr=True)
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        disable=not (show and console.is_terminal),
    )
    with bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
