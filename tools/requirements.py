"""Prints the requirements that pyproject.toml states, one a line: requirements.py {build,run,test,style,docs}."""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib


def requirements(group: str) -> list[str]:
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    groups = {
        "build": pyproject["build-system"]["requires"],
        "run": pyproject["project"]["dependencies"],
        **pyproject["project"]["optional-dependencies"],
    }
    if group not in groups:
        raise SystemExit(f"unknown group of requirements {group!r}; there are {', '.join(groups)}")
    return groups[group]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
