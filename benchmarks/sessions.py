"""Run one session of a contender in its own process, with cold files and limited memory."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import isolation

NO_LIMIT = 1 << 40
TIME_LIMIT_SECONDS = 1800


def run(python: Path, script: str, model: Path, limit: int, request: dict[str, Any]) -> dict[str, Any]:
    """Return the contender's report (contenders/session.py), its limit, and its control group's peak in bytes."""
    isolation.evict([model])
    with tempfile.TemporaryDirectory() as folder:
        request_path, result_path = Path(folder) / "request.json", Path(folder) / "result.json"
        request_path.write_text(json.dumps({"model": str(model), **request}))
        program = Path(__file__).parent / "contenders" / script
        command = [str(python), str(program), str(request_path), str(result_path)]
        peak = isolation.run_limited(command, limit, TIME_LIMIT_SECONDS)
        return {**json.loads(result_path.read_text()), "group_peak": peak, "limit": limit}


def without_logits(results: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each system without their logits, for the report."""
    return {
        name: [{k: v for k, v in run.items() if k != "prompt_logits"} for run in runs] for name, runs in results.items()
    }
