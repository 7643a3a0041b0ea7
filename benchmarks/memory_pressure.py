"""Claim: when the memory limit of a generating process halves, the pool shrinks in time, and grows back afterwards.

A process with ``resident="auto"`` decodes in a memory group of its own. Version 1 of the controller: the soft limit,
which the guard observes, halves, and a hard limit of that size is requested until the kernel grants it. Version 2:
``memory.high`` halves and ``memory.max`` follows five seconds later. Later both return to their first value. The tokens
are compared with those of a process without a limit whose experts are all resident. Needs root.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import isolation
import synthetic
from harness import Report, Row

LIMIT = 3_200_000_000  # more than all experts, the rest of the process and auto's margin take
GRANT_SECONDS = 10.0
HALVED_SECONDS = 5.0
PROMPT, SEED = 16, 20260101


def worker(model_path: str, resident: str, tokens: int) -> None:
    """Decode greedily until standard input ends, or ``tokens`` tokens if not 0. Print a line of JSON for each token."""
    import torch
    from transformers import AutoModelForCausalLM

    import torch_mesh

    config = torch_mesh.MeshConfig(resident=resident if resident == "auto" else float(resident))
    model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=config, dtype=torch.bfloat16)
    inputs = torch.randint(synthetic.Shape.vocab, (1, PROMPT), generator=torch.Generator().manual_seed(SEED))
    cache, count = None, 0
    with torch.inference_mode():
        while count < tokens if tokens else not select.select([sys.stdin], [], [], 0)[0]:
            out = model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache, inputs, count = out.past_key_values, out.logits[:, -1:].argmax(-1), count + 1
            stats = torch_mesh.stats(model)
            print(json.dumps({"token": inputs.item(), "slots": stats.slots, "most": stats.max_slots}), flush=True)


def start(model: Path, resident: str, tokens: int, group: isolation.MemoryGroup | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", str(model), resident, str(tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=group.enter if group else None,  # noqa: PLW1509 -- this process has no other threads
    )


def reports(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line) | {"time": time.monotonic()}
    if process.wait() != 0:
        raise SystemExit(f"the decoding process ended with {process.returncode}")


class Limits:
    """The hard and the soft limit of a group. ``set_hard`` returns whether the kernel has granted the limit."""

    def __init__(self, group: isolation.MemoryGroup) -> None:
        self.group = group
        self._hard, self._soft = (
            ("memory.limit_in_bytes", "memory.soft_limit_in_bytes")
            if group.version == 1
            else ("memory.max", "memory.high")
        )

    def set_soft(self, limit: int) -> None:
        (self.group.path / self._soft).write_text(str(limit))

    def set_hard(self, limit: int) -> bool:
        try:
            (self.group.path / self._hard).write_text(str(limit))
        except OSError:  # EBUSY: version 1 cannot bring the group under it; version 2 would kill
            return False
        return True

    def restore(self, limit: int) -> None:
        memsw = self.group.path / "memory.memsw.limit_in_bytes"
        if memsw.exists():
            memsw.write_text(str(limit))
        self.set_hard(limit)
        self.set_soft(limit)


def halve_limit(model: Path, limit: int) -> dict[str, Any]:
    """Halve the limit while a process decodes, restore it, and return times, slots and tokens."""
    with isolation.memory_group(limit) as group:
        limits = Limits(group)
        process = start(model, "auto", 0, group)
        steps, past_steps = reports(process), []
        for step in steps:  # until the pool is full and the speed steady
            past_steps.append(step)
            if len(past_steps) == 64:
                break
        first_slots = past_steps[-1]["slots"]
        limits.set_soft(limit // 2)
        begin = time.monotonic()
        granted = restored_at = grown_at = None
        slowest = 0.0
        for step in steps:
            slowest = max(slowest, step["time"] - past_steps[-1]["time"])
            past_steps.append(step)
            elapsed = time.monotonic() - begin
            if granted is None:
                due = group.version == 1 or elapsed >= HALVED_SECONDS
                if due and limits.set_hard(limit // 2):
                    granted = elapsed
                elif elapsed > GRANT_SECONDS + HALVED_SECONDS:
                    raise SystemExit(f"no hard limit of {limit // 2} bytes after {elapsed:.1f} s")
            elif restored_at is None and elapsed > granted + HALVED_SECONDS:
                min_slots, restored_at = step["slots"], elapsed
                limits.restore(limit)
            elif restored_at is not None and (step["slots"] == first_slots or elapsed > restored_at + 30):
                grown_at = elapsed
                break
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.close()
        past_steps += steps
        killed = group.killed()
    if granted is None or restored_at is None or grown_at is None:
        raise SystemExit("the decoding process ended before the limits were back")
    return {
        "tokens": [step["token"] for step in past_steps],
        "before": first_slots,
        "squeezed": min_slots,
        "after": past_steps[-1]["slots"],
        "granted_seconds": granted,
        "grown_seconds": grown_at - restored_at,
        "slowest_seconds": slowest,
        "killed": killed,
    }


def main() -> int:
    if "--worker" in sys.argv:
        model, resident, tokens = sys.argv[sys.argv.index("--worker") + 1 :]
        worker(model, resident, int(tokens))
        return 0
    parser = harness.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a store, such as benchmarks/synthetic.py makes")
    parser.add_argument("--limit", type=int, default=LIMIT, help="bytes of the memory group at first")
    arguments = parser.parse_args()
    run = halve_limit(arguments.model, arguments.limit)
    expected = [step["token"] for step in reports(start(arguments.model, "1.0", len(run["tokens"])))]
    wrong_tokens = sum(token != expected_token for token, expected_token in zip(run["tokens"], expected, strict=True))
    report = Report("A memory limit that halves under a generating process")
    report.add(Row("half of the limit is granted after", run["granted_seconds"], "s", "at most", GRANT_SECONDS, 1.0))
    report.add(Row("slots under half of the limit", run["squeezed"], "", "before", run["before"]))
    report.add(Row("slots afterwards", run["after"], "", "before", run["before"], at_least=1.0))
    report.add(Row("slots are back after", run["grown_seconds"], "s"))
    report.add(Row("slowest token meanwhile", run["slowest_seconds"], "s"))
    report.add(Row("tokens as without a limit", len(expected) - wrong_tokens, "", "of", len(expected), at_least=1.0))
    report.add(Row("processes killed", float(run["killed"]), ""))
    report.details |= run
    return report.finish(arguments.json) or int(run["killed"])


if __name__ == "__main__":
    sys.exit(main())
