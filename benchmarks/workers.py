"""Contenders in their own processes, which are measured alternately.

A process is stopped while another is measured, so that no idle thread pool uses the other's cores. All stay open, since
opening a model takes far longer than measuring it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "contenders"


class WorkerFailedError(RuntimeError):
    """A contender's process ended. The message has the end of its error output."""


class Worker:
    """One contender (contenders/serve.py). ``facts`` is its first reply, after opening."""

    def __init__(self, python: Path, script: str, **setup: Any) -> None:
        if not python.exists():
            raise SystemExit(f"{python} is missing: run benchmarks/peers.sh first")
        self._name = script
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        # Our own contenders import op_layer.py from this folder.
        path = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [str(python), str(FOLDER / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        self.facts = self._ask(setup)
        self._process.send_signal(signal.SIGSTOP)

    def measure(self, **request: Any) -> dict[str, Any]:
        self._process.send_signal(signal.SIGCONT)
        reply = self._ask(request)
        self._process.send_signal(signal.SIGSTOP)
        return reply

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its error output has the reason
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            errors = self._errors.read()[-4000:]
            raise WorkerFailedError(f"{self._name} ended with status {status}:\n{errors}")
        return json.loads(line)
