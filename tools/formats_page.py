"""Writes the table of docs/formats.md from torch_mesh/formats.py; the rest of the page is written by hand."""

from pathlib import Path

from torch_mesh import _C
from torch_mesh.formats import FORMATS

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"
_SHAPE = 2048, 768, True, False  # hidden, intermediate, gated, bias: an expert of Qwen3-30B-A3B
_WEIGHTS = 3 * 2048 * 768
_BEGIN = (
    "<!-- `python tools/formats_page.py` writes this table from `torch_mesh/formats.py`; a test compares them. -->\n"
)
_END = "<!-- end of the table -->\n"


def page() -> str:
    """The text of docs/formats.md."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return "".join([before, _BEGIN, *_table(), _END, after])


def _table() -> list[str]:
    lines = [
        "| `weights` | `group_size` | bits per weight | error, Gaussian weights | rows of tables | description |\n",
        "|---|---|---|---|---|---|\n",
    ]
    for name, each in FORMATS.items():
        groups = " / ".join(map(str, each.group_sizes)) if any(each.group_sizes) else "–"
        sizes = [8 * _C.record_bytes(name, group, *_SHAPE) / _WEIGHTS for group in each.group_sizes]
        bits = " / ".join(f"{size:.3g}" for size in sizes)
        errors = " / ".join(
            f"{100 * each.errors[group]:.{2 if each.bits == 8 else 1}f}" for group in each.group_sizes if each.errors
        )
        error = f"{errors} %" if any(each.errors.values()) else "none of bf16 weights" if each.errors else "none"
        rows = {None: "–", 0: "a scale per row"}.get(each.table_group, f"a scale per {each.table_group} values")
        lines.append(f"| `{name}` | {groups} | {bits} | {error} | {rows} | {each.description} |\n")
    return lines


if __name__ == "__main__":
    PAGE.write_text(page())
