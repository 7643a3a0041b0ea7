"""``torch-mesh chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_mesh.cli.options import add_config_arguments, add_model_argument, given_config
from torch_mesh.cli.serve import OF_SERVERS, add_kept_keys, add_server_arguments, given_options

_LOOPBACK = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Opens a model, serves it to this machine on a free port, and talks with it as transformers chat "
        "does. !help lists the commands, !exit ends it."
    )
    add_model_argument(parser)
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="NAME=VALUE",
        help="option of generate, such as max_new_tokens=500 or do_sample=False; directly after the model",
    )
    parser.add_argument("--system-prompt", help="system message of the conversation")
    parser.add_argument("--save-folder", default="./chat_history/", help="folder of !save (default: %(default)s)")
    add_kept_keys(parser)
    add_server_arguments(parser, without=OF_SERVERS | {"fetch_media"})  # messages are text
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from transformers.cli.chat import Chat, parse_generate_flags

    from torch_mesh.serving.server import Server

    config = given_config(arguments)
    _check_flags(arguments.flags, parse_generate_flags)
    options = given_options(arguments) | {"host": _LOOPBACK, "port": 0}
    with (
        _reach_loopback(),  # before there are threads, as it changes the environment
        Server(arguments.model, config, arguments.keep_keys, options, must_chat=True) as server,
        contextlib.suppress(EOFError),
    ):
        Chat(  # ends at !exit only
            server.model,
            server.address,
            arguments.flags,
            system_prompt=arguments.system_prompt,
            save_folder=arguments.save_folder,
        )
    return 0


@contextlib.contextmanager
def _reach_loopback() -> Iterator[None]:
    """Let the client of transformers chat reach the server of this process.

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


def _check_flags(flags: Sequence[str], parse: Callable[[list[str]], dict[str, Any]]) -> None:
    """Check before the model is opened; transformers would after that."""
    from transformers import GenerationConfig

    from torch_mesh.serving.generate_options import check_options

    known = vars(GenerationConfig())
    for flag in flags:
        name, given, _ = flag.partition("=")
        if not given or name not in known:
            raise ValueError(
                f"{flag!r} is not NAME=VALUE with the name of one of generate's options, such as max_new_tokens=500"
            )
    try:
        options = parse(list(flags))
        check_options(options)
        for name in ("num_beams", "num_return_sequences"):  # transformers would answer each turn with an error
            if options.get(name) not in (None, 1):
                raise ValueError(f"{name} is {options[name]!r}: a chat shows one answer as it is made; give 1.")
        GenerationConfig(**options).validate()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{' '.join(flags)!r} is not possible: {error}") from error
