"""Runs Python programs in processes of their own, without the seconds that torch and transformers take to import.

A server process has imported these, but nothing of torch_mesh. Each program is a fork of the server: it runs as
``__main__`` and ends as a program does. Tests of what is imported, and in which order, use ``subprocess`` instead.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from typing_extensions import Self

_IMPORTED = (
    "torch._dynamo",
    "safetensors.torch",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
_ENVIRONMENT = dict(os.environ)  # before any test has changed it
_REQUEST = 1 << 17  # bytes at most
_COMMAND = "import sys\nfrom torch_mesh.cli import main\nsys.exit(main(sys.argv[1:]))"


class Process:
    """A running program, with the part of the interface of ``subprocess.Popen`` that tests use."""

    def __init__(self, program: str, arguments: tuple[str, ...], env: Mapping[str, str] | None, cwd: Path | None):
        about = {"program": program, "arguments": arguments, "env": dict(os.environ if env is None else env)}
        request = json.dumps(about | {"path": sys.path, "cwd": os.fspath(cwd or Path.cwd())}).encode()
        assert len(request) <= _REQUEST
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        self._connection, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(_server(), [request], [its_end.fileno(), *theirs])
        its_end.close()
        for each in theirs:
            os.close(each)
        self.stdin: IO[str] = os.fdopen(pipes[0][1], "w", buffering=1)
        self.stdout: IO[str] = os.fdopen(pipes[1][0])
        self.stderr: IO[str] = os.fdopen(pipes[2][0])
        self.pid = int(self._connection.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(1e-6)
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(64))
            except TimeoutError:
                raise subprocess.TimeoutExpired("a warm program", timeout) from None
        return self.returncode

    def communicate(self, input: str = "", timeout: float = 300) -> tuple[str, str]:
        with ThreadPoolExecutor(2) as readers, self:
            printed = [readers.submit(each.read) for each in (self.stdout, self.stderr)]
            try:
                with contextlib.suppress(BrokenPipeError), self.stdin:
                    self.stdin.write(input)
                self.wait(timeout)
            except BaseException:
                self.kill()  # otherwise the readers wait for its end
                raise
            out, errors = (each.result() for each in printed)
        return out, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the program to end."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.wait()
        for each in (self.stdout, self.stderr, self._connection):
            each.close()


def start(program: str, *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Process:
    """Start a program as ``python -c`` does, with pipes."""
    return Process(program, tuple(map(str, arguments)), env, cwd)


def run(
    program: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    input: str = "",
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``python -c`` does, and wait for its end."""
    process = start(program, *arguments, env=env, cwd=cwd)
    out, errors = process.communicate(input, timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(["a warm program", *map(str, arguments)], process.returncode, out, errors)


def start_command(*arguments: object, env: Mapping[str, str] | None = None) -> Process:
    """Start ``python -m torch_mesh``."""
    return start(_COMMAND, *arguments, env=env)


@functools.cache
def _server() -> socket.socket:
    """The socket of the server, which takes one message for each program."""
    ours, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its_end:
        command = [sys.executable, __file__, str(its_end.fileno())]
        # With autoloading, torch would import torch_mesh together with transformers.
        environment = _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[its_end.fileno()])

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns the request in a child, and None in the parent once the requests are closed."""
    waits = selectors.DefaultSelector()
    waits.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in waits.select():
            if key.data is not None:  # a child has ended
                child, connection = key.data
                waits.unregister(key.fd)
                os.close(key.fd)
                with connection, contextlib.suppress(BrokenPipeError):
                    connection.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                continue
            message, descriptors, _, _ = socket.recv_fds(requests, _REQUEST, 4)
            if not message:
                return None
            connection = socket.socket(fileno=descriptors[0])
            child = os.fork()
            if child == 0:
                for at, each in enumerate(descriptors[1:]):
                    os.dup2(each, at)
                for other in list(waits.get_map().values()):
                    if other.data is not None:
                        os.close(other.fd)
                        other.data[1].close()
                waits.close()
                requests.close()
            for each in descriptors[1:]:
                os.close(each)
            if child == 0:
                connection.close()
                asked: dict[str, Any] = json.loads(message)
                return asked
            connection.send(b"%d" % child)
            waits.register(os.pidfd_open(child), selectors.EVENT_READ, (child, connection))


def _become(asked: dict[str, Any]) -> Any:
    """Set up this process as the request says. Returns the code of the program, which the caller executes."""
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.path[:] = asked["path"]
    sys.argv = ["-c", *asked["arguments"]]
    atexit.register(gc.unfreeze)  # nanobind reports what is never collected as leaks
    # This also makes a new thread pool in place of the parent's. Torch cannot do this in several threads at once.
    torch = importlib.import_module("torch")
    torch.set_num_threads(int(asked["env"].get("OMP_NUM_THREADS") or torch.get_num_threads()))
    return compile(asked["program"], "<string>", "exec")


if __name__ == "__main__":
    for _name in _IMPORTED:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a program writes to all these pages, and so copies them
    _asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _asked is not None:
        sys.modules["__main__"] = _main = types.ModuleType("__main__")
        exec(_become(_asked), _main.__dict__)  # noqa: S102  as python -c does
