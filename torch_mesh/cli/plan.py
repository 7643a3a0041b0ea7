"""``torch-mesh plan``: memory and speed of a model, before it is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal as format_bytes
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from torch_mesh.cli.options import add_config_arguments, add_model_argument, given_config, positive, size
from torch_mesh.formats import short_name
from torch_mesh.validators import parse_size

if TYPE_CHECKING:
    from pathlib import Path

    from torch_mesh.config import MeshConfig
    from torch_mesh.planning.plan import Plan
    from torch_mesh.planning.sizes import Sizes
    from torch_mesh.planning.token_time import Speeds
    from torch_mesh.planning.training import TrainingPlan

_FIELDS = (
    "resident",
    "weights",
    "max_error",
    "fallback",
    "dense",
    "group_size",
    "workspace",
    "mirrors",
    "prefetch",
    "gpu_experts",
    "gpu_weights",
    "gpu_placement",
)
_CUDA_ITSELF = 500_000_000
_STATUS_STYLE = {"ok": "green", "nothing to do": "green", "below recommended": "yellow", "too small": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts how many experts of a model fit into memory, its hit rate and its speed. Reads headers, config and "
        "manifest, also of a model id on the hub, and measures the disk and the memory for two seconds. Give "
        "--disk-speed if the model is not on this disk. Exits with 1 if the model cannot run or is not found."
    )
    add_model_argument(parser)
    parser.add_argument("--memory", type=size, help="total memory of the process (default: what is available here)")
    parser.add_argument("--disk-speed", type=_speed, help="bytes per second, or 1.5GB/s (default: measured)")
    parser.add_argument("--memory-speed", type=_speed, help="bytes per second, or 30GB/s (default: measured)")
    parser.add_argument(
        "--hit-rate", type=float, help="known hit rate, measured with prefetch='off' (default: predicted)"
    )
    parser.add_argument(
        "--overlap",
        type=float,
        help="fraction of a token's experts that the next token also uses, if known, such as 0.39 for "
        "Qwen3-30B-A3B: hits are then simulated",
    )
    parser.add_argument(
        "--gpu-memory",
        type=size,
        help="memory of a card, of which CUDA takes 0.5 GB (default: what is free on the card here); makes "
        "--gpu-experts auto by default",
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        default=1,
        help="number of processes that divide the experts (docs/scaleout.md); the plan and --memory are those of "
        "one of them",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    training = parser.add_argument_group("training", "low-rank adapters of PEFT in fp32, with AdamW in fp32")
    training.add_argument(
        "--train", action="store_true", help="plan a training step, and how many experts stay resident beside it"
    )
    training.add_argument("--lora-rank", type=positive, help="rank of the adapters (default: 8)")
    training.add_argument(
        "--tokens", type=positive, help="tokens of a forward: sequences times their length (default: 512)"
    )
    training.add_argument(
        "--targets",
        nargs="+",
        metavar="NAME",
        help="modules and parameters with adapters, as in PEFT's target_modules and target_parameters; a name that "
        "linear layers also have selects only them; write experts.down_proj to select the experts' projection "
        "(default: both projections of all experts)",
    )
    training.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="keep only the input of each layer, and compute the layer twice",
    )
    add_config_arguments(parser, _FIELDS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from torch_mesh.planning.formats import comparison_unsupported_reason
    from torch_mesh.planning.machine import measure_formats, measure_speeds
    from torch_mesh.planning.plan import plan
    from torch_mesh.planning.sizes import find_sizes
    from torch_mesh.store.convert import streamed_bytes
    from torch_mesh.store.gguf import is_gguf
    from torch_mesh.store.hub import outline_folder
    from torch_mesh.store.manifest import is_store

    if arguments.gpu_memory is not None and arguments.gpu_experts is None:
        arguments.gpu_experts = "auto"
    config = given_config(arguments)
    _check_arguments(arguments, config)
    card = _card(arguments.gpu_memory) if config.gpu.experts != 0 else None
    with outline_folder(arguments.model) as (folder, present):
        sizes = find_sizes(folder, config)
        disk = None
        if not present:  # nothing to read
            sizes = dataclasses.replace(sizes, files=())
            if not is_gguf(folder) and not is_store(folder):
                disk = streamed_bytes(folder, config.weights, config.given_group_size)
        speeds = measure_speeds(sizes, config, disk=arguments.disk_speed, memory=arguments.memory_speed)
        training = None
        formats = {}
        no_choice = comparison_unsupported_reason(
            folder, sizes, config, hit_rate=arguments.hit_rate, card=card is not None, ranks=arguments.ranks
        )
        if speeds is None:
            no_choice = no_choice or "there is nothing to measure the disk by: give --disk-speed"
        if arguments.memory is not None and not arguments.train and not no_choice:
            formats = measure_formats(sizes, config, memory=arguments.memory_speed)
        if arguments.train:
            training = _training(arguments, folder, config, sizes, speeds)
            planned = training.plan
        else:
            planned = plan(
                folder,
                config,
                memory=arguments.memory,
                speeds=speeds,
                hit_rate=arguments.hit_rate,
                overlap=arguments.overlap,
                card=card,
                ranks=arguments.ranks,
                format_speeds=formats,
            )
    if not present:
        planned = dataclasses.replace(
            planned, folder=arguments.model, sizes=dataclasses.replace(planned.sizes, files=())
        )
    if arguments.json:
        result = planned.to_dict() | (training.to_dict() if training is not None else {})
        if disk is not None:
            result["conversion_disk"] = {"store_bytes": disk[0], "weight_file_bytes": disk[1]}
        print(json.dumps(result))
    else:
        _print_table(planned, training, disk)
        if planned.format_choices:
            _print_formats(planned)
        elif arguments.max_error is not None:
            reason = no_choice or "one token's experts fit in no format: give more memory"
            Console().print(f"--max-error: no format is named, since {escape(reason)}.", soft_wrap=True)
    return 1 if planned.status == "too small" else 0


def _check_arguments(arguments: argparse.Namespace, config: MeshConfig) -> None:
    if arguments.hit_rate is not None and not 0 <= arguments.hit_rate <= 1:
        raise ValueError(f"--hit-rate {arguments.hit_rate} must be in [0, 1]")
    if arguments.max_error is not None and (arguments.memory is None or arguments.train):
        raise ValueError(
            "--max-error chooses among formats for an amount of memory: give --memory, and leave --train out"
        )
    if arguments.train and arguments.ranks > 1:
        raise ValueError(
            "--train plans one process: leave --ranks out. Each of several ranks takes as much for adapters, "
            "gradients and moments, and less for experts."
        )
    others = (
        ("hit_rate", "overlap") if arguments.train else ("lora_rank", "tokens", "targets", "gradient_checkpointing")
    )
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name) not in (None, False)]
    if given and arguments.train:
        raise ValueError(f"{given[0]} is for generating, but a training step reads all that it uses: leave it out")
    if given:
        raise ValueError(f"{given[0]} is for training: give --train too")
    if arguments.gpu_memory is not None and config.gpu.experts == 0:
        raise ValueError("--gpu-memory is for experts on a GPU, and --gpu-experts is 0: leave one of them out")
    hits = [name for name in ("--hit-rate", "--overlap") if getattr(arguments, name[2:].replace("-", "_")) is not None]
    if len(hits) > 1:
        raise ValueError("--hit-rate and --overlap exclude each other: leave one of them out")
    if hits and (config.gpu.experts != 0 or config.lossy.fallback != "none"):
        raise ValueError(
            f"{hits[0]} predicts hits, and none are predicted with experts on a GPU (--gpu-experts) or in two formats "
            "(--fallback): leave one of them out"
        )


def _training(
    arguments: argparse.Namespace, folder: Path, config: MeshConfig, sizes: Sizes, speeds: Speeds | None
) -> TrainingPlan:
    from torch_mesh.planning.machine import product_flops
    from torch_mesh.planning.training import plan_training

    if config.gpu.experts != 0 or config.lossy.fallback != "none":
        raise ValueError("--train: experts on a GPU and lossy.fallback do not support adapters: leave them out.")
    return plan_training(
        folder,
        config,
        sizes,
        rank=arguments.lora_rank or 8,
        tokens=arguments.tokens or 512,
        targets=arguments.targets or (),
        gradient_checkpointing=arguments.gradient_checkpointing,
        memory=arguments.memory,
        speeds=speeds,
        flops=product_flops(sizes.shape),
    )


def _card(given: int | None) -> tuple[int, int]:
    """Free and total bytes."""
    if given is not None:
        return given - _CUDA_ITSELF, given
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "--gpu-experts: torch sees no CUDA device here; give the memory of another machine's GPU with "
            "--gpu-memory 24GiB."
        )
    return torch.cuda.mem_get_info()


def _print_table(planned: Plan, training: TrainingPlan | None, disk: tuple[int, int] | None) -> None:
    """``disk``: bytes of the store that torch-mesh convert would write, and of the weight files beside it."""
    table = Table("", "", title=Text(planned.folder, "table.title"), title_justify="left", show_header=False)
    if planned.ranks is not None:
        ranks = planned.ranks
        table.add_row(
            "ranks",
            f"{ranks.ranks}; what follows is of one of them. Of a token's {planned.sizes.shape.top_k} experts, drawn "
            f"at random, {ranks.busiest:.1f} are on the busiest",
        )
    _add_sizes(table, planned.sizes, disk)
    _add_memory(table, planned)
    if training is not None:
        _add_training(table, training)
    else:
        table.add_row(
            "memory at the peak", f"{_bytes(planned.peak_bytes)}, without the KV cache and a prompt's activations"
        )
    _add_speed(table, planned, generates=training is None)
    style = _STATUS_STYLE.get(planned.status, "yellow")
    table.add_row("status", f"[{style}]{planned.status}[/]: {escape(planned.advice)}")
    Console().print(table)


def _add_sizes(table: Table, sizes: Sizes, disk: tuple[int, int] | None) -> None:
    shape = sizes.shape
    group = f", groups of {sizes.group_size}" if sizes.group_size else ""
    table.add_row(
        "experts",
        f"{shape.layers} layers of {shape.experts}, {shape.top_k} per token, {short_name(sizes.weights)}{group}",
    )
    table.add_row(
        "bytes", f"{format_bytes(sizes.expert_bytes)} an expert, {format_bytes(sizes.all_experts_bytes)} in all"
    )
    if sizes.unused_bytes:
        table.add_row(
            "of that, unused",
            f"{format_bytes(sizes.unused_bytes)}, {sizes.unused_bytes / sizes.all_experts_bytes:.1%}: layers differ in "
            "their types, and each expert has as many bytes as the largest",
        )
    if sizes.conversion:
        table.add_row("conversion", escape(sizes.conversion))
    if disk is not None:
        store, beside = map(format_bytes, disk)
        table.add_row(
            "disk of torch-mesh convert",
            f"{format_bytes(sum(disk))} at the peak: {store} of the store, {beside} of weight files beside it",
        )
    table.add_row("rest of the model", _bytes(sizes.dense_bytes))
    if sizes.unpooled:
        table.add_row("of that, experts outside the pool", escape(sizes.unpooled))
    if sizes.tables:
        in_memory = f"{format_bytes(sizes.table_memory_bytes)} in memory for rows"
        rounded = f" in {sizes.table_weights}" if sizes.table_weights else ""
        held = f"{format_bytes(sizes.table_bytes)}{rounded}"
        table.add_row("tables in files", f"{held}, {in_memory}: {escape(sizes.tables)}")
    if sizes.vocabularies:
        table.add_row("of those, since memory is short", escape(sizes.vocabularies))


def _add_memory(table: Table, planned: Plan) -> None:
    every = planned.sizes.shape.layers * planned.sizes.shape.experts
    table.add_row(
        "memory",
        f"{format_bytes(planned.memory_bytes)}, of which Python and torch take {format_bytes(planned.process_bytes)}",
    )
    if planned.margin_bytes is not None:
        table.add_row("margin", f"{format_bytes(planned.margin_bytes)}, which resident=auto leaves free")
    if planned.slots is not None and planned.pool_bytes is not None:
        fallback_slots = f" and {planned.fallback_slots} fallback experts" if planned.fallback_slots else ""
        text = (
            f"{planned.slots} experts, {planned.slots / every:.1%}{fallback_slots}, {format_bytes(planned.pool_bytes)}"
        )
        table.add_row("resident", text)
    if planned.gpu is not None:
        style = _STATUS_STYLE.get(planned.gpu.status, "yellow")
        text = f"{planned.gpu.placed} experts, {format_bytes(planned.gpu.expert_bytes)} with their buffers"
        table.add_row("on the card", f"{text}; [{style}]{planned.gpu.status}[/]: {escape(planned.gpu.advice)}")
    text = f"{planned.recommended_slots} experts, {planned.recommended_slots / every:.1%}"
    table.add_row("recommended", f"{text}, {format_bytes(planned.recommended_bytes)}")
    table.add_row("workspace", _workspace(planned))


def _add_speed(table: Table, planned: Plan, generates: bool) -> None:
    if generates and planned.hit_rate is not None:
        rate = planned.hit_rate
        spread = "" if rate.low == rate.high else f" ({rate.low:.0%} to {rate.high:.0%}, by how local its routing is)"
        table.add_row("hit rate", f"{rate.expected:.0%}{spread}")
    if planned.speeds is not None:
        speeds = planned.speeds
        table.add_row(
            "speeds",
            f"disk {format_bytes(int(speeds.disk))}/s, experts {format_bytes(int(speeds.experts))}/s, rest of the "
            f"model {format_bytes(int(speeds.dense))}/s, {speeds.layer_seconds * 1e3:.2f} ms overhead per layer",
        )
    if generates and planned.tokens_per_second is not None and planned.tokens_per_second_range is not None:
        low, high = planned.tokens_per_second_range
        spread = "" if low == high else f" ({low:.1f} to {high:.1f})"
        speed = f"{planned.tokens_per_second:.1f}{spread} without compilation{_network(planned)}"
        table.add_row("tokens per second", speed)
    for choice in planned.dense_choices:
        tokens = choice.tokens_per_second if generates else None
        speed = "" if tokens is None else f", {tokens:.1f} tokens per second"
        memory = f"rest of the model in {format_bytes(choice.bytes)}"
        text = f"{memory}{speed}; error of its weights {choice.weight_error:.1%}"
        table.add_row(f"with --dense {choice.dense}", text)


def _print_formats(planned: Plan) -> None:
    names = ("format", "bytes of the experts", "resident", "hit rate", "read per token", "tokens/s", "error of weights")
    table = Table(*names, title="The experts in other formats, in the same memory", title_justify="left")
    for choice in planned.format_choices:
        group = f" g{choice.group_size}" if choice.group_size else ""
        table.add_row(
            short_name(choice.weights) + group,
            format_bytes(choice.all_experts_bytes),
            f"{choice.resident_fraction:.1%}",
            f"{choice.hit_rate.expected:.0%}",
            format_bytes(round(choice.bytes_per_token)),
            f"{choice.tokens_per_second:.1f}",
            f"{choice.weight_error:.1%}",
            style="green" if choice.chosen else None,
        )
    Console().print(table)
    chosen = next((choice for choice in planned.format_choices if choice.chosen), None)
    if chosen is None:
        Console().print("None of them is within --max-error: allow more, or give more memory.")
        return
    own = planned.sizes.own_codes
    if own is not None and chosen.weights == own[0]:
        options, why = "--weights auto", f": keeps the checkpoint's codes in {short_name(own[0])}"
    else:
        group = f" --group-size {chosen.group_size}" if chosen.group_size else ""
        options, why = f"--weights {chosen.weights}{group}", ""
    Console().print(f"Fastest within --max-error: [green]{options}[/]{why}", soft_wrap=True)


def _add_training(table: Table, training: TrainingPlan) -> None:
    targets = ", ".join(training.targets)
    table.add_row("trains", f"rank {training.rank} on {escape(targets)}: {training.trained_parameters:,} parameters")
    table.add_row("adapters, fp32", format_bytes(training.adapter_bytes))
    table.add_row("their gradients, fp32", format_bytes(training.gradient_bytes))
    table.add_row("AdamW's two moments, fp32", format_bytes(training.optimizer_bytes))
    kept, checkpointed = (
        format_bytes(count) for count in (training.activation_bytes_kept, training.activation_bytes_checkpointed)
    )
    planned_for = "checkpointing is planned for" if training.gradient_checkpointing else "without it is planned for"
    table.add_row(
        f"activations of {training.tokens} tokens",
        f"about {kept}, with gradient checkpointing {checkpointed}; {planned_for}",
    )
    table.add_row("rows of the experts' backward", f"about {format_bytes(training.backward_bytes)}")
    table.add_row("memory at the peak", f"about {_bytes(training.peak_bytes)}")
    if training.reads_per_step is not None and training.read_bytes_per_step is not None:
        passes = "forward, its repetition and backward" if training.gradient_checkpointing else "forward and backward"
        table.add_row(
            "reads of a step",
            f"{training.reads_per_step:,.0f} of experts, {format_bytes(training.read_bytes_per_step)}: {passes}",
        )
    if training.step_seconds is not None:
        low, high = training.step_seconds
        table.add_row(
            "seconds of a step",
            f"{low:.2g} to {high:.2g}: {training.computing_seconds:.2g} computing, {training.reading_seconds:.2g} "
            "reading, which may overlap",
        )


def _network(planned: Plan) -> str:
    if planned.ranks is None:
        return ""
    sums = f"{planned.sizes.shape.layers} sums of {format_bytes(planned.ranks.sum_bytes)}"
    return f", and for each token the time in which the ranks add up {sums}, which depends on their network"


def _workspace(planned: Plan) -> str:
    text = format_bytes(planned.workspace_bytes)
    if planned.tokens_per_chunk is None:
        return text
    text += f": prompts are computed in chunks of {planned.tokens_per_chunk:,} tokens"
    if not planned.chunk_bytes:
        return text
    seconds = "" if planned.chunk_seconds is None else f", {planned.chunk_seconds:.1f} s"
    return f"{text}, each of which reads up to {format_bytes(planned.chunk_bytes)}{seconds}"


def _bytes(value: int | None) -> str:
    return "unknown" if value is None else format_bytes(value)


def _speed(text: str) -> float:
    try:
        return float(parse_size(re.sub(r"/s$", "", text.strip()), "speed"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed: give bytes per second, or 1.5GB/s") from None
