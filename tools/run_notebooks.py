"""Executes notebooks in a fresh kernel each, and stores their outputs in them: all of examples/, or those that are
named.

python tools/run_notebooks.py [--check] [NOTEBOOK ...]

With --check nothing is written. Ends with an error at the first cell that raises.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS_PER_CELL = 600


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run; raises nbclient's CellExecutionError where a cell does."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # stderr has progress, and warnings with paths of this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of examples/")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    for path in arguments.notebooks or sorted(EXAMPLES.glob("*.ipynb")):
        print(path, flush=True)
        notebook = execute(path)
        if not arguments.check:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
