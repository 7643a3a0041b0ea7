"""A thread that works for an engine until the engine is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundThread(threading.Thread):
    """Runs ``work`` at once. No process waits for it to end, so whoever closes the engine joins it: else Python could end under it and abort."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self.start()

    def end(self) -> None:
        """Waits for the thread, which has been told to end, or whose engine has been closed."""
        if threading.current_thread() is not self:  # the garbage collector runs wherever it likes
            self.join(timeout=5.0)
