"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def new_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Opens a file that takes the name ``path`` when the block ends; when it raises, nothing is left."""
    path = Path(path)
    with tempfile.NamedTemporaryFile(mode, dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # as files are that hold no secrets; a temporary one is its owner's alone
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
