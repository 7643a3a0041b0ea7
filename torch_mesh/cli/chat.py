"""``torch-mesh chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import argparse

from torch_mesh.cli.options import add_config_arguments, given_config
from torch_mesh.cli.serve import add_kept_keys, add_server_arguments, given_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Opens a model, serves it to this machine alone on a port that is free, and talks with it as transformers chat does. !help says what "
        "can be typed, !exit ends it."
    )
    parser.add_argument(
        "model", help="a store or checkpoint folder, a GGUF file, or a model id on the Hugging Face hub"
    )
    parser.add_argument(
        "flags", nargs="*", metavar="NAME=VALUE", help="for generate, such as max_new_tokens=500 or do_sample=False"
    )
    parser.add_argument("--system-prompt", help="what the model is told before the conversation")
    parser.add_argument("--save-folder", default="./chat_history/", help="where !save writes to (default: %(default)s)")
    add_kept_keys(parser)
    add_server_arguments(parser, without=frozenset({"host", "port", "enable_cors"}))
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Talks until !exit; returns the exit code."""
    from transformers.cli.chat import Chat

    from torch_mesh.serving.server import Server

    config = given_config(arguments)
    options = given_options(arguments) | {"host": "127.0.0.1", "port": 0}
    with Server(arguments.model, config, arguments.keep_keys, options) as server:
        Chat(
            server.model,
            server.address,
            arguments.flags,
            system_prompt=arguments.system_prompt,
            save_folder=arguments.save_folder,
        )
    return 0
