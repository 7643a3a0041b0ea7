"""``torch-mesh chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch_mesh.cli.options import add_config_arguments, add_model_argument, given_config
from torch_mesh.cli.serve import OF_SERVERS, add_kept_keys, add_server_arguments, given_options

_LOOPBACK = "127.0.0.1"
_DEFAULT_TOKENS = 4096  # of an answer with its reasoning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Opens a model, serves it to this machine on a free port, and talks with it as transformers chat "
        "does. !help lists the commands, Ctrl-C stops an answer, !exit ends the conversation."
    )
    add_model_argument(parser)
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="NAME=VALUE",
        help="option of generate, such as max_new_tokens=500 (default: "
        f"{_DEFAULT_TOKENS}, as far as positions and memory allow) or do_sample=False; directly after the model",
    )
    parser.add_argument("--system-prompt", help="system message of the conversation")
    parser.add_argument("--save-folder", default="./chat_history/", help="folder of !save (default: %(default)s)")
    add_kept_keys(parser)
    add_server_arguments(parser, without=OF_SERVERS | {"fetch_media"})  # messages are text
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from torch_mesh.cli.conversation import Conversation, parse_flags
    from torch_mesh.serving.server import Server

    config = given_config(arguments)
    generate_options = parse_flags(arguments.flags)  # before the model is opened
    options = given_options(arguments) | {"host": _LOOPBACK, "port": 0, "default_tokens": _DEFAULT_TOKENS}
    with (
        _reach_loopback(),  # before there are threads, as it changes the environment
        Server(
            arguments.model, config, arguments.keep_keys, options, must_chat=True, speculation=arguments.speculation
        ) as server,
    ):
        Conversation(
            server.model,
            server.address,
            generate_options,
            system_prompt=arguments.system_prompt,
            save_folder=arguments.save_folder,
        ).run()
    return 0


@contextlib.contextmanager
def _reach_loopback() -> Iterator[None]:
    """Let the conversation's client reach the server of this process.

    The client is the Hugging Face hub's, which refuses every address under HF_HUB_OFFLINE and follows the environment's
    proxy.
    """
    from huggingface_hub import get_async_session, set_async_client_factory

    names = ("no_proxy", "NO_PROXY")  # programs differ in which of the two they read first
    before = {name: os.environ.get(name) for name in names}
    without_proxy = ",".join([*filter(None, dict.fromkeys(before.values())), _LOOPBACK])
    os.environ.update(dict.fromkeys(names, without_proxy))
    given = get_async_session()
    hooks = {event: list(found) for event, found in given.event_hooks.items()}
    hooks["request"] = [_except_loopback(hook) for hook in hooks.get("request", ())]
    # For the rest of the process: the hub cannot tell which factory was set before.
    set_async_client_factory(lambda: type(given)(event_hooks=hooks, follow_redirects=True, timeout=None))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _except_loopback(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def hook_of_others(request: Any) -> None:
        if request.url.host != _LOOPBACK:
            await hook(request)

    return hook_of_others
