"""One layer of experts without a model, to embed the engine."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from transformers.activations import ACT2FN

from torch_mesh.config import MeshConfig, with_fields
from torch_mesh.hf.compat import default_apply_gate
from torch_mesh.models.activations import FUNCTIONS, Gate, gate_named
from torch_mesh.models.families import find_experts
from torch_mesh.modules.async_forward import PendingExperts, submit
from torch_mesh.modules.experts import MeshExperts
from torch_mesh.patching.api import patch
from torch_mesh.patching.expert_source import RecordSource
from torch_mesh.patching.pipeline import assemble, check
from torch_mesh.pool.secondary_pool import Records
from torch_mesh.store.manifest import Shape, open_store

# By their names in transformers.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}
assert set(_ACTIVATIONS) == set(FUNCTIONS)


class Experts(nn.Module):
    """The routed experts of one layer: ``sum over k of weight * down(act(gate(x)) * up(x))``.

    Args:
        gate_up: [experts, 2 * intermediate, hidden], gate rows first; bf16, fp16 or fp32.
        down: [experts, hidden, intermediate].
        gate_up_bias: [experts, 2 * intermediate], together with ``down_bias`` or not at all.
        down_bias: [experts, hidden].
        activation: "silu", "gelu", "gelu_tanh" or "relu2"; or a gate that replaces ``act(gate) * up``:
            "swiglu(alpha=1,offset=0,gate=10,up=10)": ``(clamp(up, -10, 10) + 0) * g * sigmoid(1 * g)`` with ``g =
            min(gate, 10)``; by default alpha is 1, offset 0, and there are no limits. "swigluoai": gpt-oss's
            "swiglu(alpha=1.702,offset=1,gate=7,up=7)". "softcap(gate=4,up=25)": ``4 * tanh(gate / 4) * sigmoid(gate) *
            25 * tanh(up / 25)``.
        top_k: experts per token; the smallest pool has as many slots.
        expert_map: int [ids]; maps the ids that ``forward`` gets to experts. Other ids raise ValueError.
        config: a MeshConfig; ``fields`` are its fields (``weights="int4"``, ``resident="2GiB"`` ...) and override it.

    The tensors are packed and not kept. Raises ValueError for mismatched shapes and unknown activations.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        activation: str = "silu",
        top_k: int = 1,
        expert_map: torch.Tensor | None = None,
        config: MeshConfig | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        _check_shapes(gate_up, down, gate_up_bias, down_bias)
        self.experts = standard_experts((gate_up, down, gate_up_bias, down_bias), activation, top_k)
        self._set_expert_map(expert_map)
        patch(self, config, **fields)

    @classmethod
    def from_store(
        cls,
        store: str | os.PathLike[str],
        layer: int = 0,
        *,
        expert_map: torch.Tensor | None = None,
        config: MeshConfig | None = None,
        **fields: Any,
    ) -> Experts:
        """Open layer ``layer`` of a converted folder, which is read as experts are used.

        Raises StoreError for a damaged store or another folder; ValueError for a layer, a format or a group size that
        the store does not have, and for fields that apply to whole models.
        """
        opened = open_store(store)
        shape = opened.manifest.shape
        if not 0 <= layer < shape.layers:
            raise ValueError(f"layer={layer} is not in {store}, which has the layers 0 to {shape.layers - 1}.")
        if not shape.gated:
            raise ValueError(f"The experts in {store} have no gate: open the model instead.")
        activation = shape.activation_of(layer)
        if activation is None:
            raise ValueError(
                f"{store} names no activation: its experts have a gate of their own, or were converted by a build that "
                "did not know theirs. Open the model instead, or convert the checkpoint again (torch-mesh convert "
                "--force)."
            )
        config = with_fields(config, fields)
        _check_single_layer(config)
        opened.manifest.check_format(opened.folder, config.weights, config.given_group_size)
        config = config.replace(prefill="off")  # a window would read the next layer, which never runs
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.experts = standard_experts(_meta_parameters(shape), activation, shape.top_k)
        self._set_expert_map(expert_map)
        layers = find_experts(self)
        source = RecordSource(exact=False)
        # The pool knows all layers, since checksums of records cover their layer; only this one is read.
        source.set_records(Records.of_store(opened, [layer]), config.mirrors)
        source.counted = 1
        check(self, layers, config, source)
        assemble(self, layers, config, source)
        return self

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Compute x [tokens, hidden], topk_ids [tokens, k] int, topk_weights [tokens, k] -> [tokens, hidden] in x's
        dtype."""
        return self.experts(x, self._mapped(topk_ids), topk_weights)

    def submit(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> PendingExperts:
        """Start ``forward`` and return at once; ``.result()`` waits and returns the output.

        If a GPU holds experts of the layer, both parts are ordered after the current stream. ``x``, ids and weights
        must not change before ``.result()``, which raises the errors of the forward. Raises ValueError at once for
        tensors that require gradients: use ``forward``.
        """
        return submit(cast(MeshExperts, self.experts), x, self._mapped(topk_ids), topk_weights)

    def _mapped(self, topk_ids: torch.Tensor) -> torch.Tensor:
        if self.expert_map is None:
            return topk_ids
        count = self.expert_map.numel()
        unknown = (topk_ids < 0) | (topk_ids >= count)
        if topk_ids.is_cpu and not torch.compiler.is_compiling() and unknown.any():
            raise ValueError(
                f"topk_ids has {int(topk_ids[unknown][0])}, and expert_map gives the experts of ids in [0, {count}): "
                "leave out the choices of other experts."
            )
        # Indexing would count ids below 0 from the end. -1 is outside of the experts for the op too.
        return self.expert_map[topk_ids.clamp(0, count - 1)].masked_fill(unknown, -1)

    def _set_expert_map(self, expert_map: torch.Tensor | None) -> None:
        if expert_map is not None:
            count = self.experts.num_experts
            no_integers = expert_map.dtype == torch.bool or expert_map.is_floating_point() or expert_map.is_complex()
            if expert_map.dim() != 1 or no_integers:
                raise ValueError(
                    f"expert_map must be a vector of integers; it is {expert_map.dtype} {list(expert_map.shape)}."
                )
            if expert_map.numel() == 0 or expert_map.min() < 0 or expert_map.max() >= count:
                raise ValueError(f"expert_map must hold experts in [0, {count}).")
            expert_map = expert_map.long()
        self.expert_map: torch.Tensor | None
        self.register_buffer("expert_map", expert_map, persistent=False)


class StandardExperts(nn.Module):
    """Experts in the layout that transformers' decorator marks, and that patching recognizes."""

    has_post_expert_norm = False
    _is_expert_parallel = False
    _apply_gate = default_apply_gate

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        activation: str,
        top_k: int,
    ) -> None:
        super().__init__()
        named = _ACTIVATIONS.get(activation)
        self.num_experts = gate_up.size(0)
        if not 1 <= top_k <= self.num_experts:
            raise ValueError(f"top_k={top_k} must be in [1, {self.num_experts}], the number of experts.")
        self.has_gate, self.is_concatenated, self.is_transposed = True, True, False
        self.has_bias = gate_up_bias is not None
        self.config = SimpleNamespace(num_experts_per_tok=top_k)
        self.act_fn = None if named is None else ACT2FN[named]
        self.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
        self.down_proj = nn.Parameter(down, requires_grad=False)
        if gate_up_bias is not None and down_bias is not None:
            self.gate_up_proj_bias = nn.Parameter(gate_up_bias, requires_grad=False)
            self.down_proj_bias = nn.Parameter(down_bias, requires_grad=False)


class GatedExperts(StandardExperts):
    """``StandardExperts`` with a gate that is a function of gate and up."""

    gate: Gate

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.gate(gate, up)


def standard_experts(
    parameters: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], activation: str, top_k: int
) -> StandardExperts:
    """Make experts of gate_up, down and their biases. Raises ValueError for an unknown activation."""
    gate = gate_named(activation)
    if gate is None:
        return StandardExperts(*parameters, activation, top_k)
    experts = GatedExperts(*parameters, activation, top_k)
    experts.gate = gate
    return experts


def _check_single_layer(config: MeshConfig) -> None:
    of_models = {
        "gpu.experts": config.gpu.experts not in (0, "auto"),
        "gpu.weights": config.gpu.weights != "auto",
        "gpu.placement": config.gpu.placement != "static",
        "a predictor in prefetch": config.predictor is not None,
        "dense": config.dense not in ("auto", "none"),
        "lossy.fallback": config.lossy.fallback != "none",
        "max_error": config.max_error is not None,
        "store": config.store is not None,
        "tables": config.tables not in ("auto", "off"),
        'prefill="window"': config.prefill == "window",
    }
    if refused := [name for name, given in of_models.items() if given]:
        raise ValueError(f"{', '.join(refused)}: for whole models, not for one layer of a store: leave it out.")


def _meta_parameters(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    def meta(*sizes: int) -> torch.Tensor:
        return torch.empty(shape.experts, *sizes, dtype=torch.bfloat16, device="meta")

    gate_up, down = meta(2 * shape.intermediate, shape.hidden), meta(shape.hidden, shape.intermediate)
    return gate_up, down, *((meta(2 * shape.intermediate), meta(shape.hidden)) if shape.bias else (None, None))


def _check_shapes(
    gate_up: torch.Tensor, down: torch.Tensor, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None
) -> None:
    if gate_up.dim() != 3 or gate_up.size(1) % 2:
        raise ValueError(f"gate_up must be [experts, 2 * intermediate, hidden]; it is {list(gate_up.shape)}.")
    experts, rows, hidden = gate_up.shape
    expected: dict[str, tuple[torch.Tensor | None, list[int]]] = {"down": (down, [experts, hidden, rows // 2])}
    if gate_up_bias is not None or down_bias is not None:
        expected |= {"gate_up_bias": (gate_up_bias, [experts, rows]), "down_bias": (down_bias, [experts, hidden])}
    for name, (tensor, sizes) in expected.items():
        if tensor is None or list(tensor.shape) != sizes:
            given = "missing" if tensor is None else list(tensor.shape)
            raise ValueError(f"{name} must be {sizes} beside gate_up {list(gate_up.shape)}; it is {given}.")
