"""Writes docs/commands.md, the reference of the command line, from the parser of `torch-mesh`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from torch_mesh.cli import COMMANDS, _parser
from torch_mesh.cli.options import MODEL
from torch_mesh.config_fields import FIELDS

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
_HEAD = f"""\
# The command line
`python -m torch_mesh` does the same as `torch-mesh`, where that is not on the path. `torch-mesh --version` prints the
version, `torch-mesh --debug COMMAND ...` an error's traceback. `torch-mesh --print-completion bash` (or `zsh`, `tcsh`)
prints a completion script for the shell; it needs `pip install "torch_mesh[completion]"`. The exit status is 0, 1 for a
failure, 2 for wrong usage, 130 after Ctrl-C. [Options](config.md) describes the fields of `MeshConfig` that commands
take, such as `--group-size` and `--gpu-experts`. The first argument of `inspect`, `plan`, `serve`, `chat`, `run`,
`bench` and `routing fit` is {MODEL}.
"""
_TAIL = """
<!-- `python tools/commands_page.py` writes this page from the parser of `torch-mesh`; a test compares them. -->
"""


def page() -> str:
    """The text of docs/commands.md."""
    commands = _commands("torch-mesh", _parser(COMMANDS))
    served: list[str] = []  # the rows of serve's options, which chat has too
    parts = []
    for name, parser in commands:
        parts.append(_command(name, parser, served))
        if name == "torch-mesh serve":
            served += [_row(action) for action in parser._actions if _is_option(action)]
    return "".join([_HEAD, *parts, _TAIL])


def _is_option(action: argparse.Action) -> bool:
    return bool(action.option_strings) and not isinstance(action, argparse._HelpAction)


def _commands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Names and parsers of the commands of ``parser``, each before its own commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield f"{name} {word}", command
                yield from _commands(f"{name} {word}", command)


def _command(name: str, parser: argparse.ArgumentParser, served: list[str]) -> str:
    """A section; options that are in ``served`` are only named."""
    left_out = argparse._HelpAction | argparse._SubParsersAction
    actions = [action for action in parser._actions if not isinstance(action, left_out) and action.help != MODEL]
    fields = [
        action for action in actions if action.option_strings and action.dest in FIELDS and action.metavar == "VALUE"
    ]
    rows = [_row(action) for action in actions if action not in fields]
    shared = [row for row in rows if row in served]
    if len(shared) > 2:
        rows = [row for row in rows if row not in shared]
        rows.append(
            f"| {', '.join(row.split(' | ')[0].removeprefix('| ') for row in shared)} | as for `torch-mesh serve` |"
        )
    absent = [f"`--{name.replace('_', '-')}`" for name in FIELDS if name not in {action.dest for action in fields}]
    if len(absent) < len(fields):
        but = f" but {', '.join(absent)}" if absent else ""
        rows.append(f"| `--FIELD VALUE` | every field of `MeshConfig`{but} |")
    elif fields:
        rows.append(f"| {', '.join(f'`{action.option_strings[0]}`' for action in fields)} | fields of `MeshConfig` |")
    table = "\n".join(["| argument | meaning |", "|---|---|", *rows]) if rows else ""
    level = "##" if name.count(" ") == 1 else "###"
    return "\n\n".join(filter(None, [f"\n{level} {name}\n{_escaped(parser.description or '')}", table])) + "\n"


def _row(action: argparse.Action) -> str:
    words = action.option_strings[-1] if action.option_strings else (action.metavar or action.dest)
    if isinstance(action, argparse.BooleanOptionalAction):
        words = f"--[no-]{action.option_strings[0].removeprefix('--')}"
    if action.nargs in ("+", "*"):
        words += f" [{words} ...]" if not action.option_strings else f" {action.metavar or action.dest.upper()} ..."
    elif action.option_strings and action.nargs != 0:
        words += f" {action.metavar or ('' if action.choices else action.dest.upper())}".rstrip()
    choices = f" One of {', '.join(f'`{choice}`' for choice in action.choices)}." if action.choices else ""
    about = (action.help or "") % {"default": action.default, "prog": "torch-mesh"}
    required = " Required." if action.required and action.option_strings else ""
    stop = "." if about and (choices or required) else ""
    return f"| `{words}` | {_escaped(about)}{stop}{choices}{required} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
