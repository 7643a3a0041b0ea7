"""Describe which experts train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from torch_mesh.adapters.factors import rank_of
from torch_mesh.errors import MeshError
from torch_mesh.modules.experts import MeshExperts, patched_modules


def describe_training(model: nn.Module) -> str:
    """A line that says in how many layers of a patched model experts train, which parameters, and what is frozen.

    Raises MeshError for a model that is not patched.
    """
    layers = list(patched_modules(model))
    if not layers:
        raise MeshError(f"{type(model).__name__} is not patched: see torch_mesh.patch.")
    trained: dict[str, set[int]] = {}  # the indices of experts modules, by trained parameter
    of_experts = 0
    modules: Iterator[Any] = model.modules()
    for wrapper in modules:
        parameter = getattr(wrapper, "parameter_name", None)
        experts = wrapper.get_base_layer() if parameter and hasattr(wrapper, "get_base_layer") else None
        if not isinstance(experts, MeshExperts):
            continue
        for adapter in wrapper.lora_A:
            factors = {"lora_A": wrapper.lora_A[adapter].weight, "lora_B": wrapper.lora_B[adapter].weight}
            training = {name: weight for name, weight in factors.items() if weight.requires_grad}
            if not training:
                continue
            of_experts += sum(weight.numel() for weight in training.values())
            rank = rank_of(factors["lora_A"], wrapper.num_experts, second=False, where=str(parameter))
            about = [] if adapter == "default" else [adapter]
            about += [f"only {name}" for name in training if len(training) == 1]
            noted = f" ({', '.join(about)})" if about else ""
            trained.setdefault(f"{parameter} with rank {rank}{noted}", set()).add(id(experts))
    everything = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
    others = sum(everything.values()) - of_experts
    base = ", ".join(dict.fromkeys(module._mesh_pool.weights for module in layers))
    if not trained:
        return (
            f"No experts train: those of all {len(layers)} layers are frozen ({base}). {others:,} other parameters "
            "train."
        )
    what = "; ".join(
        f"{parameter} in {len(modules)} of {len(layers)} layers" for parameter, modules in sorted(trained.items())
    )
    return (
        f"Experts train by adapters: {what}, {of_experts:,} parameters. Their own weights are frozen ({base}). "
        f"{others:,} other parameters train."
    )
