"""``torch-mesh run``: answers to a file of requests, many computed at once."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from torch_mesh.cli.options import add_config_arguments, add_model_argument, given_config, positive
from torch_mesh.cli.serve import OF_SERVERS, add_server_arguments, given_options
from torch_mesh.errors import MeshError
from torch_mesh.system.atomic_files import locked

# Options that do not apply to requests from a file.
_LEFT_OUT = OF_SERVERS | {"compile", "continuous_batching", "prefix_cache"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answers the requests of a file: many at once, so that an expert that was read serves every prompt that needs "
        "it. A line is one of OpenAI's batch files (custom_id, method, url, body), or a body alone: an object with "
        "messages, prompt or input, and perhaps a custom_id. All lines are checked before any is computed. Each answer "
        "is added to the second file as it comes. Repeat an interrupted command to continue; the status is 1 if some "
        "requests have failed, which a repetition computes again."
    )
    add_model_argument(parser)
    parser.add_argument("requests", type=Path, metavar="REQUESTS", help="file of requests, one JSON object a line")
    parser.add_argument("answers", type=Path, metavar="ANSWERS", help="file of answers, in OpenAI's batch format")
    parser.add_argument(
        "--at-once",
        type=positive,
        metavar="N",
        help="answers that are computed together, if memory has room for their KV cache (default: 32)",
    )
    add_server_arguments(parser, without=_LEFT_OUT)
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import asyncio

    from torch_mesh.serving import offline
    from torch_mesh.store.progress import progress_bar

    config, options = given_config(arguments), given_options(arguments)
    name = offline.check_arguments(arguments.model, options)
    requests = offline.read_requests(arguments.requests)
    arguments.interrupted = "interrupted: repeat the command to continue"
    failed = 0
    with _only_writer(arguments.answers):
        left = offline.unanswered(requests, arguments.answers, name)
        if left:
            at_once = arguments.at_once or offline.DEFAULT_AT_ONCE
            with offline.open_service(
                arguments.model, config, options, arguments.at_once, arguments.speculation
            ) as service:
                offline.check(service, left, arguments.requests)
                with progress_bar("Answering", unit="request") as progress:
                    failed = asyncio.run(offline.answer(service, left, arguments.answers, at_once, progress))
    print(f"{len(requests) - failed} of {len(requests)} requests are answered in {arguments.answers}")
    return 1 if failed else 0


@contextlib.contextmanager
def _only_writer(answers: Path) -> Iterator[None]:
    """Keep other runs from writing the same answers.

    Raises ValueError for a pipe, a device or a folder, MeshError while another run has the answers, and OSError if no
    file can be made beside them.
    """
    if answers.exists() and not answers.is_file():
        raise ValueError(f"{answers} is not a regular file: name one, from which a repeated command can continue")
    real = Path(os.path.realpath(answers))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(real.with_name(f".{real.name}.lock")))
        except BlockingIOError as error:
            message = f"{answers}: another torch-mesh run is writing it: wait until it has ended, or name another file"
            raise MeshError(message) from error
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(answers)) from error
        yield
