"""Progress bars: on a terminal and in a notebook, and nowhere else."""

from __future__ import annotations

import io
import sys
from types import ModuleType

import pytest

from torch_mesh.store.progress import progress_bar


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("terminal", "notebook", "show", "drawn"),
    [(True, False, True, True), (False, False, True, False), (False, True, True, True), (True, True, False, False)],
)
def test_a_bar_is_drawn_on_a_terminal_or_in_a_notebook(
    terminal: bool, notebook: bool, show: bool, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    if notebook:  # a notebook without widgets
        monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", ModuleType("ipykernel.zmqshell"))
    else:
        monkeypatch.delitem(sys.modules, "ipykernel.zmqshell", raising=False)
    with progress_bar("Converting tiny to int8", show=show) as progress:
        for done in (0, 10**6, 3 * 10**6):
            progress(done, 3 * 10**6)
    shown = stream.getvalue()
    assert ("Converting tiny to int8: 100%" in shown) == drawn and bool(shown) == drawn
    assert not drawn or "3.00M/3.00M" in shown


def test_no_bar_is_drawn_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Stream(True))
    with progress_bar("Converting tiny to int8"):
        pass
    assert stream.getvalue() == ""
