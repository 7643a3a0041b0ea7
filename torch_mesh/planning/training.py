"""Predict what training adapters takes, before anything is loaded: memory by part, reads and seconds of a step.

PEFT counts adapters on a meta model. Activations are estimated from the widths of the model's layers.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_mesh.config import MeshConfig
from torch_mesh.models.families import find_experts
from torch_mesh.planning.plan import Plan, plan
from torch_mesh.planning.sizes import Sizes
from torch_mesh.planning.token_time import Speeds
from torch_mesh.store.checkpoint import meta_model, read_config
from torch_mesh.system.memory import anonymous_bytes, available_bytes

_ADAM_MOMENTS = 2
_FP32 = 4
# Elements that a decoder layer saves for its backward, counted on Qwen3-MoE and gpt-oss with sdpa attention, in
# multiples of its hidden size and of its linear layers' outputs. Norms save fp32 copies.
_KEPT_HIDDEN = 8
_KEPT_OUT = 2
_KEPT_LOGITS = 12  # bytes of each logit at the peak: itself, in fp32 for the loss, saved by the loss, and its gradient


@dataclass(frozen=True)
class TrainingPlan:
    """Bytes, unless noted. ``plan`` is for the memory that training leaves."""

    plan: Plan
    rank: int
    tokens: int  # tokens of a forward: sequences times their length
    targets: tuple[str, ...]
    gradient_checkpointing: bool
    trained_parameters: int
    adapter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # AdamW: two moments in fp32
    activation_bytes: int  # with gradient_checkpointing as given
    activation_bytes_kept: int  # without it
    activation_bytes_checkpointed: int
    backward_bytes: int  # rows of the experts whose backward runs at one time
    peak_bytes: int | None
    experts_per_step: float  # distinct experts of a forward, over all layers
    reads_per_step: float | None  # reads of experts
    read_bytes_per_step: int | None
    reading_seconds: float | None
    computing_seconds: float | None
    step_seconds: tuple[float, float] | None  # if computing hides reads, and if they add up

    def to_dict(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "plan"}
        return {"training": own}


def plan_training(
    folder: Path,
    config: MeshConfig,
    sizes: Sizes,
    *,
    rank: int,
    tokens: int,
    targets: Sequence[str] = (),
    gradient_checkpointing: bool = False,
    memory: int | None = None,
    speeds: Speeds | None = None,
    flops: float | None = None,
) -> TrainingPlan:
    """Plan a training step. ``targets``: PEFT's target_modules and target_parameters together; by default both
    projections of the experts. ``flops``: operations per second.

    Raises ValueError for targets that the model does not have, and for a rank above the widths of its experts, and
    whatever ``plan`` raises.
    """
    if sizes.dense_bytes is None:
        raise ValueError(f"{folder} has no config.json, so that its model is unknown: give a folder with one.")
    shape = sizes.shape
    model = meta_model(read_config(folder))
    width = _Widths.of(model)
    targets = tuple(targets) or _projections(model)
    if rank > max(shape.hidden, shape.intermediate):
        raise ValueError(
            f"rank={rank} (--lora-rank) is more than the widths of the experts, {shape.hidden} and "
            f"{shape.intermediate}: such adapters are larger than the experts."
        )
    trained, inputs = _adapters(model, rank, targets)
    adapters = _FP32 * trained
    kept = tokens * (width.kept_per_token + _FP32 * inputs + width.logits_per_token)
    per_layer = (width.kept_per_token + _FP32 * inputs) / width.layers
    checkpointed = round(tokens * (width.hidden_per_token + per_layer + width.logits_per_token))
    rows = tokens * shape.top_k
    at_once = min(1.0, 2 * torch.get_num_threads() / shape.experts)  # twice the mean, since experts differ
    backward = min(round(rows * at_once * _FP32 * (3 * shape.hidden + 10 * shape.intermediate)), config.workspace_bytes)
    activations = checkpointed if gradient_checkpointing else kept
    beside = adapters * (2 + _ADAM_MOMENTS) + activations + backward
    whole = memory if memory is not None else anonymous_bytes() + available_bytes()
    planned = plan(folder, config, memory=whole - beside, speeds=speeds)
    passes = 3 if gradient_checkpointing else 2
    used = shape.layers * shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
    reads = None if planned.resident_fraction is None else passes * used * (1 - planned.resident_fraction)
    read_bytes = None if reads is None else round(reads * sizes.expert_bytes)
    reading = None if read_bytes is None or speeds is None else read_bytes / speeds.disk
    computing = None
    if speeds is not None and flops is not None:
        computing = _operations(sizes, width, rows, tokens, rank, passes) / flops + _dequantizing(sizes, used, speeds)
    both = None if reading is None or computing is None else (max(reading, computing), reading + computing)
    return TrainingPlan(
        plan=dataclasses.replace(planned, memory_bytes=whole),
        rank=rank,
        tokens=tokens,
        targets=targets,
        gradient_checkpointing=gradient_checkpointing,
        trained_parameters=trained,
        adapter_bytes=adapters,
        gradient_bytes=adapters,
        optimizer_bytes=_ADAM_MOMENTS * adapters,
        activation_bytes=activations,
        activation_bytes_kept=kept,
        activation_bytes_checkpointed=checkpointed,
        backward_bytes=backward,
        peak_bytes=None if planned.peak_bytes is None else planned.peak_bytes + beside,
        experts_per_step=used,
        reads_per_step=reads,
        read_bytes_per_step=read_bytes,
        reading_seconds=reading,
        computing_seconds=computing,
        step_seconds=both,
    )


@dataclass(frozen=True)
class _Widths:
    layers: int
    kept_per_token: int
    hidden_per_token: int
    logits_per_token: int

    @classmethod
    def of(cls, model: Any) -> _Widths:
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        size = (config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16).itemsize
        linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
        layers, hidden = config.num_hidden_layers, config.hidden_size
        kept = size * (_KEPT_HIDDEN * layers * hidden + _KEPT_OUT * sum(module.out_features for module in linears))
        return cls(layers, kept, size * layers * hidden, _KEPT_LOGITS * config.vocab_size)


def _projections(model: nn.Module) -> tuple[str, ...]:
    layers = find_experts(model)
    ends = {tuple(layer.path.split(".")[-2:]): layer.parameter_names[:2] for layer in layers}
    return tuple(".".join([*end, name]) for end, names in ends.items() for name in names)


def _ends_any(names: Sequence[str], target: str) -> bool:
    return any(f".{name}".endswith(f".{target}") for name in names)


def _unknown(target: str, model: Any) -> ValueError:
    return ValueError(f"--targets {target}: no module or parameter of {type(model).__name__} has this name")


def _adapters(model: Any, rank: int, targets: Sequence[str]) -> tuple[int, int]:
    """Parameters that PEFT would train, and elements per token that adapters on linear layers save."""
    # Raises if PEFT is missing.
    from torch_mesh.adapters.folder import LoraConfig, NoMatchingPeftModuleError, PeftModel, lora, put_placeholders

    parameters = [name for name, _ in model.named_parameters()]
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    of_parameters = [target for target in targets if _ends_any(parameters, target) and not _ends_any(linears, target)]
    names = [target for target in targets if target not in of_parameters]
    modules: Any = "all-linear" if names == ["all-linear"] else names
    put_placeholders(model)
    try:
        config = LoraConfig(r=rank, target_modules=modules, target_parameters=of_parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that PEFT itself has converted
            peft: Any = PeftModel(model, config, low_cpu_mem_usage=True)
    except NoMatchingPeftModuleError as problem:
        raise _unknown(names[0], model) from problem
    except ValueError as problem:
        raise ValueError(f"--targets {' '.join(targets)}: {problem}") from problem
    # PEFT takes names of experts' projections out of target_modules, and adapts parameters in their place.
    left = peft.peft_config["default"].target_modules or ()
    for target in names:
        if target in left and not _ends_any(peft.base_model.targeted_module_names, target):
            raise _unknown(target, model)
    wrapped: list[Any] = [module for module in peft.modules() if isinstance(module, lora.Linear)]
    return sum(p.numel() for p in peft.parameters() if p.requires_grad), sum(module.in_features for module in wrapped)


def _operations(sizes: Sizes, width: _Widths, rows: int, tokens: int, rank: int, passes: int) -> float:
    """Each forward multiplies with experts and other weights; a backward multiplies with the experts again, and
    computes the gradients of both."""
    shape = sizes.shape
    matrices = 3 if shape.gated else 2
    experts = 2 * rows * shape.layers * (matrices * shape.hidden * shape.intermediate)
    adapters = 2 * rows * shape.layers * rank * (2 * shape.hidden + matrices * shape.intermediate)
    dense = tokens * (sizes.dense_bytes_per_token or 0)  # two operations per weight of two bytes
    return (passes - 1) * (experts + adapters + dense) + 2 * experts + 4 * adapters + dense


def _dequantizing(sizes: Sizes, used: float, speeds: Speeds) -> float:
    """Seconds of dequantizing each used expert to fp32 in the backward, estimated as moving so many bytes."""
    shape = sizes.shape
    return math.ceil(used) * _FP32 * (3 if shape.gated else 2) * shape.hidden * shape.intermediate / speeds.experts
