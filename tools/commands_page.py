"""Writes docs/commands.md, the reference of the command line, from the parser of `torch-mesh`."""

import argparse
from pathlib import Path

from torch_mesh.cli import COMMANDS, _parser
from torch_mesh.config import FIELDS

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
_HEAD = """\
# The command line
`python -m torch_mesh` is `torch-mesh` where that is not on the path. `torch-mesh --version` says which,
`torch-mesh --debug COMMAND ...` where an error comes from. The exit status is 0, 1 for a failure, 2 for
wrong usage, 130 after Ctrl-C. Where a command takes fields of `MeshConfig`, they are those of
[options](config.md): `--group-size`, `--gpu-experts`.
"""
_TAIL = """
<!-- `python tools/commands_page.py` writes this page from the parser of `torch-mesh`; a test compares them. -->
"""


def page() -> str:
    """The text of docs/commands.md."""
    return _HEAD + "".join(_command(name, parser) for name, parser in _commands().items()) + _TAIL


def _commands() -> dict[str, argparse.ArgumentParser]:
    [commands] = [action for action in _parser(COMMANDS)._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(commands.choices)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    fields = [
        action for action in actions if action.option_strings and action.dest in FIELDS and action.metavar == "VALUE"
    ]
    rows = [_row(action) for action in actions if action not in fields]
    if len(fields) == len(FIELDS):
        rows.append("| `--FIELD VALUE` | every field of `MeshConfig` |")
    elif fields:
        rows.append(f"| {', '.join(f'`{action.option_strings[0]}`' for action in fields)} | fields of `MeshConfig` |")
    table = "\n".join(["| | |", "|---|---|", *rows]) if rows else ""
    return f"\n## torch-mesh {name}\n{_escaped(parser.description or '')}\n\n{table}\n"


def _row(action: argparse.Action) -> str:
    words = action.option_strings[-1] if action.option_strings else (action.metavar or action.dest)
    if action.nargs in ("+", "*"):
        words += f" [{words} ...]" if not action.option_strings else f" {action.metavar or action.dest.upper()} ..."
    elif action.option_strings and action.nargs != 0:
        words += f" {action.metavar or ('' if action.choices else action.dest.upper())}".rstrip()
    choices = f" One of {', '.join(f'`{choice}`' for choice in action.choices)}." if action.choices else ""
    about = (action.help or "") % {"default": action.default, "prog": "torch-mesh"}
    return f"| `{words}` | {_escaped(about)}{'.' if choices and about else ''}{choices}{' Required.' if action.required and action.option_strings else ''} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
