"""Prints the requirements that pyproject.toml and requirements.txt state, one a line: requirements.py
{build,run,test,gpu,wheel,style,docs}."""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib


def requirements(group: str) -> list[str]:
    root = Path(__file__).parents[1]
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    groups = {
        "build": pyproject["build-system"]["requires"],
        "run": [line for line in (root / "requirements.txt").read_text().splitlines() if not line.startswith("#")],
        **pyproject["project"]["optional-dependencies"],
        "gpu": pyproject["dependency-groups"]["gpu"],
    }
    if group not in groups:
        raise SystemExit(f"unknown group of requirements {group!r}; there are {', '.join(groups)}")
    return groups[group]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
