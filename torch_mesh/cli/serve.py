"""``torch-mesh serve``: a model behind an API like OpenAI's."""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
import threading
from typing import Any, NoReturn

from torch_mesh.cli.options import add_config_arguments, add_model_argument, given_config, size_or_zero
from torch_mesh.errors import MeshError
from torch_mesh.system.background import Flag

END = 15  # seconds after a signal within which the process ends, even during a computation
_FREEING = 3  # seconds of END for the kernel to free the process's memory
# Options that control who may reach a server, and options for requests that torch_mesh's own clients do not send.
OF_SERVERS = frozenset({"allow_anyone", "api_key", "default_tokens", "enable_cors", "host", "port"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Opens a model and serves /v1/chat/completions, /v1/completions, /v1/responses and /v1/models of OpenAI's API, "
        "/v1/messages of Anthropic's, and /metrics for Prometheus. Only this machine can reach it unless --host says "
        f"otherwise, which needs a key or --allow-anyone. Ctrl-C and SIGTERM end it within {END} seconds; running "
        "requests have five, and then get status 503. A second Ctrl-C ends it at once."
    )
    add_model_argument(parser)
    add_kept_keys(parser)
    add_server_arguments(parser)
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> NoReturn:
    """Serve until a signal arrives, then end the process."""
    from torch_mesh.serving.server import Server
    from torch_mesh.serving.server_options import API_KEY_VARIABLE

    config, options = given_config(arguments), given_options(arguments)
    if key := os.environ.get(API_KEY_VARIABLE):
        options.setdefault("api_key", key)
    with Server(arguments.model, config, arguments.keep_keys, options, speculation=arguments.speculation) as server:
        print(f"{server.model} answers at {server.address}/v1, and counts at {server.address}/metrics", flush=True)
        stop_requested = Flag()

        def stop(number: int, _: Any) -> None:
            if number == signal.SIGINT and stop_requested.is_set():
                os._exit(128 + number)
            stop_requested.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        while server.is_alive() and not stop_requested.wait(0.5):
            pass
        if not stop_requested.is_set():
            raise MeshError("the server stopped unexpectedly; its log is above")
        _end_within(END - _FREEING)
    _end_now()


def _end_within(seconds: float) -> None:
    """End the process after ``seconds``. The attention of a long prompt, or a stalled disk, cannot be interrupted."""
    timer = threading.Timer(seconds, os._exit, [0])
    timer.daemon = True
    timer.start()


def _end_now() -> NoReturn:
    """End the process without Python's finalization.

    That collects the garbage of torch and transformers several times: half a minute on a busy machine.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def add_kept_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep-keys",
        type=size_or_zero,
        metavar="SIZE",
        help="memory for the KV cache of the last conversations, so that a turn computes only what is new; 0 "
        "keeps none (default: 1GiB)",
    )


def add_server_arguments(parser: argparse.ArgumentParser, without: frozenset[str] = frozenset()) -> None:
    from torch_mesh.serving.server_options import OPTIONS

    group = parser.add_argument_group("how it is served")
    for option in OPTIONS:
        if option.name in without:
            continue
        name = f"--{option.name.replace('_', '-')}"
        about = option.about.replace("%", "%%")
        if option.kind is bool:
            group.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=about)
        else:
            group.add_argument(
                name,
                type=option.kind,
                choices=option.choices or None,
                metavar=None if option.choices else "VALUE",
                help=about if option.default is None else f"{about} (default: {option.default})",
            )


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    from torch_mesh.serving.server_options import OPTIONS

    given = ((option.name, getattr(arguments, option.name, None)) for option in OPTIONS)
    return {name: value for name, value in given if value is not None}
