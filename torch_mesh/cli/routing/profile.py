"""``torch-mesh routing profile``: expert uses of recorded routing, for ``MeshConfig(profile=)``."""

from __future__ import annotations

import argparse

from torch_mesh.cli.routing.simulate import parse_prompts
from torch_mesh.routing.profiles import FORMAT, profile_of_trace, write_profile
from torch_mesh.routing.traces import load_trace
from torch_mesh.system.atomic_files import check_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Counts the experts that a trace (torch_mesh.record_trace) used. torch_mesh.save_profile writes the same for a "
        "running model."
    )
    parser.add_argument("trace", help="an .npz file")
    parser.add_argument("out", help="the profile, a JSON file")
    parser.add_argument("--prompts", help="FIRST:END, the sequences to count (default: all)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check_results((arguments.out, f'{{"format": "{FORMAT}"'))
    profile = profile_of_trace(load_trace(arguments.trace), parse_prompts(arguments.prompts))
    write_profile(profile, arguments.out)
    print(f"{arguments.out}: {profile.shape}; {profile.tokens[0]} tokens")
    return 0
