"""The site of docs/ builds without a warning and loads nothing from other hosts. Generated pages are up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import transformers

import torch_mesh

REPOSITORY = Path(__file__).parents[2]
NEWEST = (REPOSITORY / "tools" / "tested.txt").read_text().splitlines()[-1].split()


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    build = pytest.importorskip("sphinx.cmd.build")
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    site = tmp_path / "site"
    arguments = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    assert build.main([*arguments, str(REPOSITORY / "docs"), str(site)]) == 0
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe|link)[^>]*(?:src|href)=\"([^\"]+)", page.read_text())
        assert not [place for place in loaded if re.match(r"(https?:)?//", place)], page
    assert "torch_mesh.patch" in (site / "api.html").read_text()


def test_every_public_name_is_in_the_reference() -> None:
    reference = (REPOSITORY / "docs" / "api.md").read_text()
    errors = {name for name in torch_mesh.__all__ if name.endswith("Error")}
    for name in set(torch_mesh.__all__) - errors - {"__version__"}:
        assert re.search(rf"^\.\. auto(function|class):: {name}$", reference, re.MULTILINE), name
    assert "automodule:: torch_mesh.errors" in reference


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_begins_with_its_subject(page: Path) -> None:
    """It does not begin with the script that writes it, which readers of the site do not have."""
    assert not re.search(r"tools/\w+\.py", re.sub("<!--.*?-->", "", page.read_text()[:2000], flags=re.DOTALL))


@pytest.mark.skipif(
    f"transformers=={transformers.__version__}" not in NEWEST,
    reason="the page has the options of the newest transformers",
)
def test_the_commands_page_is_up_to_date() -> None:
    tool = runpy.run_path(str(REPOSITORY / "tools" / "commands_page.py"))
    assert tool["PAGE"].read_text() == tool["page"](), "run tools/commands_page.py"
