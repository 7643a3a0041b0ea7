"""Modes of decode steps that trade exactness for fewer waits, each off by default.

Prompts, forwards of more than 16 rows, grad mode and training mode are exact: reentrant checkpointing runs a training
forward without grad mode first.

- ``deferred_experts``: a token's cold experts of least weight are added one MoE layer later. After KTransformers'
  expert deferral (SOSP 2025).
- ``routing_bias``: routing prefers resident experts, after the cache prior of arXiv 2412.00099.
- ``fallback``: cold experts are computed from records of fewer bits; see fallback.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_mesh.config_fields import LossyFields
from torch_mesh.errors import UnsupportedModelError
from torch_mesh.models.families import ExpertsLayer, router_module
from torch_mesh.modules.experts import change_class, mixed_class, restore_class

# Tests check the list.
#: Model types with routers that ``lossy.routing_bias`` supports.
ROUTING_BIAS_FAMILIES: tuple[str, ...] = (
    "aria_text",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "beam",
    "cohere2_moe",
    "deepseek_ocr2_text",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "diffusion_gemma_text",
    "dots1",
    "dots3_note_text",
    "ernie4_5_moe",
    "ernie4_5_vl_moe_text",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe_text",
    "glm5_next_text",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v4",
    "hy_v4_vl_text",
    "inkling2_loop_text",
    "inkling2_text",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lara_mini",
    "mellum",
    "mimo_v2_flash",
    "minimax",
    "minimax_m3_vl_text",
    "mistral4",
    "mistral_large4_text",
    "mixtral",
    "muse_spark_text",
    "nemotron_h",
    "olmoe",
    "openai_privacy_filter",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_omni_moe_talker_text",
    "qwen3_omni_moe_text",
    "qwen3_vl_moe_text",
    "qwen4_exp_text",
    "solar_open",
    "unlimited_ocr_text",
)


class Selection(TorchFunctionMode):
    """Intercepts the ``topk`` by which a router selects ``top_k`` of ``experts``."""

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.experts = experts
        self.top_k = top_k

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not torch.Tensor.topk:
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.dim() != 2 or scores.size(-1) != self.experts or result[1].size(-1) != self.top_k:
            return result  # another topk: of groups, or within them
        return self.selected(scores, *result)

    def selected(self, scores: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> Any:
        """Replacement for ``values`` and ``ids`` [tokens, top_k], chosen by scores [tokens, experts]."""
        raise NotImplementedError


class _Probe(Selection):
    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__(experts, top_k)
        self.seen = 0

    def selected(self, scores: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> Any:
        self.seen += 1
        return torch.return_types.topk((values, ids))


class _BiasedSelection(Selection):
    def __init__(self, experts: int, top_k: int, handle: torch.Tensor, bias: float) -> None:
        super().__init__(experts, top_k)
        self.handle = handle
        self.bias = bias

    def selected(self, scores: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> Any:
        ids = torch.ops.torch_mesh.route(scores, ids, self.handle, self.bias, kept_choices(self.top_k))
        return torch.return_types.topk((scores.gather(-1, ids), ids))


def kept_choices(top_k: int) -> int:
    """How many of a token's first choices ``routing_bias`` never replaces."""
    return max(1, top_k // 4)


class ResidencyBiasedRouter(nn.Module):
    """Mixed into the class of a router: its selection prefers resident experts.

    The router weights the selected experts as usual.
    """

    _mesh_selection: tuple[int, int, torch.Tensor, float]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or self.training:
            return super().forward(*args, **kwargs)
        with _BiasedSelection(*self._mesh_selection):
            return super().forward(*args, **kwargs)


def check_lossy(model: nn.Module, layers: Sequence[ExpertsLayer], lossy: LossyFields) -> None:
    """Raises ValueError or UnsupportedModelError if ``model`` cannot run with these modes."""
    top_k = max(layer.top_k for layer in layers)
    if lossy.deferred_experts:
        _check_deferred(model, layers, lossy.deferred_experts, top_k)
    if lossy.routing_bias and top_k == 1:
        raise ValueError(
            f"lossy.routing_bias={lossy.routing_bias} has no effect: a token of this model uses one expert, "
            "and the first choice is never replaced. Set lossy.routing_bias to 0."
        )
    if lossy.routing_bias:
        for layer in layers:
            _selecting_router(model, layer, lossy.routing_bias)


def _check_deferred(model: nn.Module, layers: Sequence[ExpertsLayer], count: int, top_k: int) -> None:
    given = f"lossy.deferred_experts={count}"
    if count > top_k:
        raise ValueError(f"{given}, but a token of this model uses {top_k} experts: give 0 to {top_k}.")
    if len(layers) == 1:
        raise ValueError(
            f"{given} needs a later layer to defer to, and this model has one layer of experts: set "
            "lossy.deferred_experts to 0."
        )
    kinds = sorted({layer.kind for layer in layers})
    if layers[0].fused_activation is None:
        why = "its experts run unfused, since the fused kernel lacks their activation"
    elif len(kinds) > 1:
        why = f"a token may skip layers of experts ({' and '.join(kinds)}), and deferred products could be lost"
    else:
        return
    raise UnsupportedModelError(
        f"{given} is unsupported for {type(model).__name__}: {why}. Set lossy.deferred_experts to 0."
    )


def install_lossy(model: nn.Module, layers: Sequence[ExpertsLayer], lossy: LossyFields) -> None:
    """Enable lossy modes in a patched model."""
    modules: list[Any] = [layer.module for layer in layers]
    for module, following in zip(modules, [*modules[1:], None], strict=True):
        module._mesh_deferred = lossy.deferred_experts
        # The op finds the next layer by its number in the pool.
        module._mesh_defers = following is not None and following._mesh_layer == module._mesh_layer + 1
    if lossy.routing_bias:
        for layer, module in zip(layers, modules, strict=True):
            router: Any = _selecting_router(model, layer, lossy.routing_bias)
            router._mesh_selection = (layer.num_experts, layer.top_k, module._mesh_handle, lossy.routing_bias)
            change_class(router, mixed_class(ResidencyBiasedRouter, type(router)))


def uninstall_lossy(model: nn.Module) -> None:
    """Restore the routers' classes."""
    for module in model.modules():
        if isinstance(module, ResidencyBiasedRouter):
            restore_class(module)


def _selects(router: nn.Module, layer: ExpertsLayer) -> bool:
    probe = _Probe(layer.num_experts, layer.top_k)
    weight = next(router.parameters())  # on the meta device while a model is loaded
    hidden = weight.size(-1) if weight.dim() == 2 else layer.hidden  # some see other states than their experts
    try:
        with torch.no_grad(), probe:
            given = router(torch.ones(2, hidden, dtype=weight.dtype, device=weight.device))
    except (TypeError, RuntimeError):  # its forward needs more than hidden states
        return False
    outputs = given if isinstance(given, tuple) else (given,)
    ids = [output for output in outputs if isinstance(output, torch.Tensor) and not output.is_floating_point()]
    return probe.seen == 1 and [tuple(output.shape) for output in ids] == [(2, layer.top_k)]


def _selecting_router(model: nn.Module, layer: ExpertsLayer, bias: float) -> nn.Module:
    """The router of a layer, if it selects experts by one topk over all of them and returns the result."""
    router = router_module(model, layer)
    if router is not None and _selects(router, layer):
        return router
    raise UnsupportedModelError(
        f"lossy.routing_bias={bias} is unsupported for {type(model).__name__}: {layer.path} has no router beside it "
        f"that selects {layer.top_k} of {layer.num_experts} experts by one topk. Supported model types: "
        f"{', '.join(ROUTING_BIAS_FAMILIES)}."
    )
