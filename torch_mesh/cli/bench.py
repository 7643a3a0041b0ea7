"""``torch-mesh bench``: the measured speed of a model."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal as format_bytes
from rich.table import Table
from rich.text import Text

from torch_mesh.cli.options import CPU_FIELDS, add_config_arguments, add_model_argument, given_config, positive, size
from torch_mesh.store.text import read_documents
from torch_mesh.system.atomic_files import check_results, new_file

if TYPE_CHECKING:
    from torch_mesh.planning.bench import Measured, Miss

_MIN_PROMPT = 17  # one more than _C.MAX_DECODE_ROWS

# Where the time of a decode step goes, with the keys of Counters.time_per_forward().
TIMES = (
    ("  computing experts", "computing"),
    ("  waiting for reads", "waiting"),
    ("  waiting for prefetches", "prefetching"),
    ("  outside of the experts", "outside"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures the disk and the memory, opens a model on the CPU, runs a prompt and generates. Prints the result "
        "beside the machine's limits and the prediction of torch-mesh plan. The first opening converts "
        "weights in another format than the checkpoint's, and its time includes that."
    )
    add_model_argument(parser)
    parser.add_argument("--tokens", type=positive, default=64, help="tokens to generate (default: %(default)s)")
    parser.add_argument(
        "--prompt-tokens", type=positive, default=128, help="length of the prompt, 17 or more (default: %(default)s)"
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="the prompt is the beginning of this file (default: the source of torch.nn.functional)",
    )
    parser.add_argument("--memory", type=size, help="total memory of the process, for --resident auto")
    parser.add_argument("--json", metavar="OUT", help="also write everything to this file")
    parser.add_argument(
        "--timeline",
        metavar="OUT",
        help="also write a table (CSV) of when each cold expert of a decode step was claimed, read, handed over and "
        "computed, in microseconds",
    )
    add_config_arguments(parser, CPU_FIELDS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from torch_mesh.hf.open_model import open_model, open_tokenizer
    from torch_mesh.planning.bench import Miss, default_text, measure
    from torch_mesh.store.hub import local_folder

    config = given_config(arguments)
    if arguments.tokens < 2:
        raise ValueError("--tokens is 1; the first token ends the prompt, so that at least 2 are needed")
    if arguments.prompt_tokens < _MIN_PROMPT:
        raise ValueError(
            f"--prompt-tokens is {arguments.prompt_tokens}: give at least {_MIN_PROMPT}, since forwards of fewer are "
            "counted as decoding"
        )
    check_results((arguments.json, '{\n "folder": '), (arguments.timeline, ",".join(Miss._fields)))
    text = "\n\n".join(read_documents([arguments.text])) if arguments.text else default_text()
    folder = local_folder(arguments.model)
    prompt = open_tokenizer(folder)(text, verbose=False)["input_ids"][: arguments.prompt_tokens]
    if len(prompt) < arguments.prompt_tokens:
        raise ValueError(
            f"the text has {len(prompt)} tokens, and --prompt-tokens is {arguments.prompt_tokens}: give a longer --text"
        )
    measured = measure(folder, config, open_model, prompt, arguments.tokens, memory=arguments.memory)
    _print_table(measured)
    if arguments.json:
        with new_file(arguments.json, "w") as file:
            file.write(json.dumps(measured.to_dict(), indent=1) + "\n")
    if arguments.timeline:
        _write_timeline(measured, arguments.timeline)
    return 0


def _times_of_misses(misses: Sequence[Miss]) -> Iterator[tuple[str, float]]:
    """The successive waits of a cold expert: median seconds."""
    for name, begin, end in (
        ("a cold expert: queued", "claimed", "begun"),
        ("  being read", "begun", "landed"),
        ("  ready, not taken", "landed", "handed"),
        ("  being computed", "handed", "computed"),
    ):
        times = [(getattr(miss, begin), getattr(miss, end)) for miss in misses]
        known = [max(0.0, after - before) for before, after in times if before is not None and after is not None]
        if known:
            yield name, statistics.median(known)


def _write_timeline(measured: Measured, path: str) -> None:
    from torch_mesh.planning.bench import Miss

    with new_file(path, "w") as file:
        table = csv.writer(file)
        table.writerow(Miss._fields)
        for layer, expert, *times in measured.misses:
            table.writerow((layer, expert, *("" if each is None else round(1e6 * each) for each in times)))


def _print_table(measured: Measured) -> None:
    planned, limits = measured.plan, measured.limits
    table = Table(
        "", "measured", "beside it", "", "ratio", title=Text(measured.folder, "table.title"), title_justify="left"
    )

    def add(name: str, value: str, beside: str = "", other: str = "", ratio: float | None = None) -> None:
        table.add_row(name, value, beside, other, "" if ratio is None else f"{ratio:.2f}")

    add("seconds to open", f"{measured.open_seconds:.1f}")
    add(f"prompt of {measured.prompt_tokens}", f"{measured.prefill_tokens_per_second:.1f} tokens/s")
    add("waiting for the disk", f"{measured.prefill_stall_fraction:.1%}")
    speed = measured.tokens_per_second
    spread = f"{measured.tokens_per_second_p10:.2f} to {measured.tokens_per_second_p90:.2f}"
    value = f"{speed:.2f} tokens/s ({spread})"
    if planned.tokens_per_second is not None and planned.tokens_per_second_range is not None:
        low, high = planned.tokens_per_second_range
        other = f"{planned.tokens_per_second:.2f} ({low:.2f} to {high:.2f})"
        add(f"decoding {measured.decoded_tokens}", value, "plan", other, measured.ratio_to_plan)
    else:
        add(f"decoding {measured.decoded_tokens}", value)
    for name, limit in (("memory", limits.memory), ("disk", limits.disk)):
        if limit is not None:
            add("", "", f"the {name} allows", f"{limit:.2f}", speed / limit)
    times = measured.stats.decode.time_per_forward() or {}
    for name, key in TIMES:
        if key in times:
            add(name, f"{times[key]:.2f} ms of a step")
    for name, seconds in _times_of_misses(measured.misses):
        add(name, f"{1e3 * seconds:.2f} ms, median")
    rate = "-" if measured.hit_rate is None else f"{measured.hit_rate:.1%}"
    if planned.hit_rate is None:
        add("hit rate", rate)
    else:
        add("hit rate", rate, "plan, before prefetch", f"{planned.hit_rate.expected:.1%}")
    add("read per token", format_bytes(int(measured.bytes_per_token)))
    if planned.peak_bytes is None:
        add("memory at the peak", format_bytes(measured.peak_bytes))
    else:
        ratio = measured.peak_bytes / planned.peak_bytes
        add("memory at the peak", format_bytes(measured.peak_bytes), "plan", format_bytes(planned.peak_bytes), ratio)
    if (speeds := planned.speeds) is not None:
        table.add_section()
        add("disk", "", "measured", f"{format_bytes(int(speeds.disk))}/s")
        add("memory, experts", "", "measured", f"{format_bytes(int(speeds.experts))}/s")
        add("memory, the rest", "", "measured", f"{format_bytes(int(speeds.dense))}/s")
    Console(width=120).print(table, markup=False)
    if measured.stats.lossy:
        print(f"lossy: {measured.stats.lossy}")
