"""Find a model's experts: which modules hold them, in what layout, and which kernel path computes them.

transformers marks experts modules with ``use_experts_implementation``, whose attributes describe their layout. What
else is special about a family is an entry of a table here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from torch import nn
from transformers import activations

from torch_mesh.errors import MeshError, UnsupportedModelError
from torch_mesh.formats import ExpertSizes
from torch_mesh.hf.compat import default_apply_gate, gate_definer, own_gate
from torch_mesh.models.activations import gate_named, limit_before_silu, softcap, swiglu
from torch_mesh.models.expert_range import EXPERT_RANGE, ExpertRange

# Config attributes with the number of experts per token, in the order in which they are tried.
_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")

_Entry = TypeVar("_Entry")

# Dtypes in which experts may be loaded.
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Attributes that use_experts_implementation sets on every instance.
_LAYOUT_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def _swiglu(limit: float) -> str:
    return swiglu(1.0, 0.0, limit, limit)


def _softcapped(module: Any) -> str:
    return softcap(module.act_fn.gate_softcap.softcap, module.act_fn.up_softcap.softcap)


# What a class's own gate (``gate_definer``) computes, as the fused kernel's activation; None if it is none of these.
# Keyed by the class that defines it, so that an override is not mistaken for its base. An unlisted gate runs itself,
# between two calls of grouped_linear.
ADAPTERS: dict[str, Callable[[Any], str | None]] = {
    # The default gate computed in float32, as the fused kernel does anyway.
    "BeamExperts": lambda module: _activation_name(module.act_fn),
    "DeepseekV4Experts": lambda module: _swiglu(module.limit) if _is_silu(module.act_fn) else None,
    "GatedExperts": lambda module: module.gate.name,
    "Glm5NextTextExperts": lambda module: _swiglu(module.swiglu_limit),
    "GptOssExperts": lambda module: swiglu(module.alpha, 1.0, module.limit, module.limit),
    "HYV4Experts": lambda module: _swiglu(module.swiglu_limit),
    "HYV4VLExperts": lambda module: _swiglu(module.swiglu_limit),
    "Inkling2Experts": _softcapped,
    "Inkling2LoopExperts": _softcapped,
    "MiniMaxM3VLExperts": lambda module: swiglu(module.swiglu_alpha, 1.0, module.swiglu_limit, module.swiglu_limit),
    "OpenAIPrivacyFilterExperts": lambda module: swiglu(module.alpha, 1.0, module.limit, module.limit),
    # It clamps the output of silu, which equals silu of a clamped gate.
    "Step3p7Experts": lambda module: (
        swiglu(1.0, 0.0, limit_before_silu(module.limit), module.limit) if _is_silu(module.act_fn) else None
    ),
}


@dataclass(frozen=True)
class Unmarked:
    """Experts of the decorated layout, gate and up in halves and without biases, that transformers does not mark.

    ``top_k`` of the module around them. ``block``: the module around them has its own calling convention and is
    replaced too (``modules.experts.BLOCKS``).
    """

    family: str
    top_k: Callable[[Any], int]
    is_transposed: bool = False
    block: bool = False


# By class name.
UNMARKED: dict[str, Unmarked] = {
    "Llama4TextExperts": Unmarked("llama4", lambda block: block.top_k, is_transposed=True, block=True),
    "LongcatFlashExperts": Unmarked("longcat_flash", lambda block: block.router.top_k),
    "Step3p7Experts": Unmarked("step3p7", lambda block: block.gate.top_k),
}


@dataclass(frozen=True)
class RouterAdapter:
    """Where a router has the matrix [experts, hidden] that scores the experts' input, or why it has none.

    ``matrix``: the linear layer with the weight, empty for the router itself; rows beyond the experts' are ignored.
    ``experts_norm``: the module that normalizes the experts' input; the router normalizes its own input without a
    weight and scales it. ``scoring``: of ``SCORINGS``, applied before the correction (``_CORRECTIONS``); a router's
    ``score_fn`` names it too.
    """

    matrix: str = ""
    experts_norm: str | None = None
    scoring: str = "sigmoid"
    unsupported_reason: str = ""


_GEMMA_ROUTER = RouterAdapter(matrix="proj", experts_norm="pre_feedforward_layernorm_2")

# By class name of the router beside the experts. Other routers are the one module there whose weight is [experts,
# hidden].
ROUTERS: dict[str, RouterAdapter] = {
    "AfmoeTokenChoiceRouter": RouterAdapter(matrix="gate"),
    "DeepseekV4HashRouter": RouterAdapter(unsupported_reason="the experts follow from the token's id"),
    "DiffusionGemmaTextRouter": _GEMMA_ROUTER,
    "Ernie4_5_MoeTopKRouter": RouterAdapter(scoring="softmax"),
    "Ernie4_5_VLMoeMoeTopKRouter": RouterAdapter(scoring="softmax"),
    "Gemma4TextRouter": _GEMMA_ROUTER,
    "HunYuanMoEV1Gate": RouterAdapter(matrix="wg"),
    "InklingTopkRouter": RouterAdapter(),
    "Kolibri1TopKRouter": RouterAdapter(scoring="logits"),
    "LongcatFlashTopkRouter": RouterAdapter(matrix="classifier", scoring="softmax"),
    "MuseSparkTopkRouter": RouterAdapter(unsupported_reason="the router sees other hidden states than the experts"),
    "ZayaRouter": RouterAdapter(unsupported_reason="the router is several matrices with activations between them"),
}

# Types of models whose linear attention can continue from its state with several tokens at once. Jamba's would start
# from an empty state.
CONTINUED_STATES = frozenset(
    {
        "bailing_hybrid",
        "granitemoehybrid",
        "kimi_linear",
        "lara_mini",
        "lfm2_moe",
        "nemotron_h",
        "qwen3_5_moe_text",
        "qwen3_next",
        "qwen4_exp_text",
    }
)

# Names of the correction that is added to the scores for selection only: an attribute of the router, of a module in it,
# or of the block around it.
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")

# Named as in the op ``lookahead``.
SCORINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "logits": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: torch.softmax(logits, -1),
    "sqrtsoftplus": lambda logits: nn.functional.softplus(logits).sqrt(),
}
_SCORE_FUNCTIONS: dict[type[nn.Module], str] = {
    nn.Sigmoid: "sigmoid",
    activations.SqrtSoftplusActivation: "sqrtsoftplus",
}

# Families with unsupported experts, by their folder of transformers.models, and the reason.
UNDECORATED: dict[str, str] = {
    "dbrx": "its experts are stacked into matrices without an expert dimension, which no checkpoint reader here knows",
    "doge": "its experts are rows of embedding tables, two vectors each, and its models fit into any memory",
    "jetmoe": (
        "half of its experts are projections of attention, and its only model has 8 billion parameters, which "
        "fit in memory"
    ),
    "nllb_moe": "transformers calls two of its experts alone, whatever its router chooses",
    "switch_transformers": (
        "its experts are separate modules with ReLU, which no kernel computes, and drop tokens beyond a capacity"
    ),
}


@dataclass(frozen=True)
class Geometry:
    """The sizes that all experts of one pool have in common."""

    num_experts: int
    hidden: int
    intermediate: int
    has_gate: bool
    has_bias: bool
    fused: bool  # else layers run unfused, by grouped_linear

    @property
    def sizes(self) -> ExpertSizes:
        return ExpertSizes(self.hidden, self.intermediate, self.has_gate, self.has_bias)

    @property
    def gate_up_features(self) -> int:
        """Columns of projection 0 of ``grouped_linear``."""
        return self.intermediate * (2 if self.has_gate else 1)


class ExpertTensors(NamedTuple):
    """One expert as ``torch.ops.torch_mesh.pack`` takes it: views, not copies.

    ``gate`` (None without a gate) and ``up`` are [intermediate, hidden], ``down`` is [hidden, intermediate]; the biases
    are vectors, or None.
    """

    gate: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def on_cpu(self) -> ExpertTensors:
        """Detached, on the CPU."""
        on_cpu: Any = (None if part is None else part.detach().cpu() for part in self)
        return ExpertTensors(*on_cpu)

    def copy_(self, values: ExpertTensors) -> None:
        """Write ``values`` of the same expert, in this one's dtype."""
        for own, value in zip(self, values, strict=True):
            if own is not None and value is not None:
                own.copy_(value)


@dataclass(frozen=True)
class ExpertsLayer:
    """The experts of one layer. Sizes are those of one expert, without padding."""

    path: str  # as in model.named_modules()
    module: nn.Module = field(repr=False)
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool  # weights are [experts, in, out]
    is_concatenated: bool  # gate and up are halves of gate_up; else its even and odd columns
    activation: str | None  # the fused kernel's, by name; None: the layer runs unfused, with its own activation
    has_post_expert_norm: bool = False
    block: nn.Module | None = field(default=None, repr=False)  # around it, if that is replaced too
    expert_range: ExpertRange | None = None  # this rank's part of the model's experts; None: all

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            self.num_experts,
            self.hidden,
            self.intermediate,
            self.has_gate,
            self.has_bias,
            fused=self.fused_activation is not None,
        )

    @property
    def routed_experts(self) -> int:
        """The number of experts that the router chooses from."""
        return self.num_experts if self.expert_range is None else self.expert_range.routed

    @property
    def fused_activation(self) -> str | None:
        """The activation of the fused op; None if the layer runs unfused."""
        return None if self.has_post_expert_norm else self.activation

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[self.parameter_names[0]].dtype

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's expert parameters, by name."""
        owned: dict[str, Any] = self.module._parameters
        return {name: owned[name] for name in self.parameter_names}

    @property
    def identities(self) -> int:
        """Identity experts: router ids beyond ``num_experts`` that return their input."""
        return self.parameters[self.parameter_names[0]].size(0) - self.num_experts

    @property
    def kind(self) -> str:
        """The path without numbers. Each token runs through all layers of a kind or none."""
        return re.sub(r"(?<=\.)\d+(?=\.)", "*", self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of the expert parameters, unpacked."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The module's expert parameters, which are replaced while it is patched."""
        names = ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")
        return names + tuple(f"{name}_bias" for name in names) if self.has_bias else names

    def expert(self, index: int, parameters: Mapping[str, torch.Tensor] | None = None) -> ExpertTensors:
        """Views of one expert's weights in the module's parameters, or in ``parameters`` of the same names and
        shapes."""
        tensors = self.parameters if parameters is None else parameters
        gate_up_name, down_name = self.parameter_names[:2]
        gate, up = self.split_gate_up(self._oriented(tensors[gate_up_name][index]))
        gate_bias = up_bias = down_bias = None
        if self.has_bias:
            gate_bias, up_bias = self.split_gate_up(tensors[f"{gate_up_name}_bias"][index])
            down_bias = tensors[f"{down_name}_bias"][index]
        return ExpertTensors(gate, up, self._oriented(tensors[down_name][index]), gate_bias, up_bias, down_bias)

    def split_gate_up(self, stacked: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Gate and up rows of one expert's [rows, ...] gate_up, in this module's order."""
        if not self.has_gate:
            return None, stacked
        if self.is_concatenated:
            return stacked[: self.intermediate], stacked[self.intermediate :]
        return stacked[0::2], stacked[1::2]

    def _oriented(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t() if self.is_transposed else weight


def named_in(table: Mapping[str, _Entry], cls: type) -> _Entry | None:
    """The entry of a table by the names of classes, for this one or the next of its bases."""
    return next((table[base.__name__] for base in cls.__mro__ if base.__name__ in table), None)


def apply_gate(module: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """The input of down, [rows, intermediate], by an experts module's own gate or activation.

    ``gate_up`` is [rows, 2 * intermediate] with the gate in the first half, or up alone for experts without a gate.
    Missing attributes of the decorator default to the common layout.
    """
    if not getattr(module, "has_gate", True):
        return module.act_fn(gate_up)
    if not getattr(module, "is_concatenated", True):  # its own gate expects its own column order
        gate_up = gate_up.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)
    gate = own_gate(module)
    return default_apply_gate(module, gate_up) if gate is None else gate(gate_up)


class InPool:
    """Base of the classes of patched experts modules: their weights are in a pool."""


def check_model(model: object) -> None:
    """Raises TypeError unless ``model`` is a loaded model."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{model!r:.80} is a {type(model).__name__}, not a loaded model (torch.nn.Module): open a folder or a "
            "model id with from_pretrained(..., quantization_config=torch_mesh.MeshConfig(...))."
        )


def find_experts(model: nn.Module) -> list[ExpertsLayer]:
    """The experts layers of ``model`` that go into a pool, in order of registration.

    A pool's slots have one size. If layers differ in geometry, these are the layers of the geometry with most bytes, or
    in a patched model those that are patched; the others are ``unpooled_layers``. Raises UnsupportedModelError,
    listing the supported families, if there are none or one is unsupported.
    """
    check_model(model)
    layers = list(_all_layers(model))
    if not layers:
        raise UnsupportedModelError(_no_experts_message(model))
    patched = [layer for layer in layers if isinstance(layer.module, InPool)]
    if patched:
        return patched
    kinds: dict[Geometry, list[ExpertsLayer]] = {}
    for layer in layers:
        kinds.setdefault(layer.geometry, []).append(layer)
    return max(kinds.values(), key=lambda alike: sum(layer.nbytes for layer in alike))


def has_experts(model: nn.Module) -> bool:
    """Whether ``find_experts`` would find any."""
    return any(True for _ in _all_layers(model))


def unpooled_layers(model: nn.Module) -> list[ExpertsLayer]:
    """The experts layers that stay in memory unpacked."""
    pooled = {layer.path for layer in find_experts(model)}
    return [layer for layer in _all_layers(model) if layer.path not in pooled]


def check_recordable(layers: Sequence[ExpertsLayer]) -> None:
    """Raises MeshError if calls of the experts modules do not show a token's experts and hidden states."""
    for layer in layers:
        if layer.block is not None and not isinstance(layer.module, InPool):
            raise MeshError(f"{layer.path} is called with all tokens for all of its experts: patch the model first.")
        if layer.identities:
            raise MeshError(
                f"{layer.path} has {layer.identities} identity experts, which compute nothing and are never read: "
                "traces and fitted predictors do not support them."
            )


def describe_unpooled(layers: Sequence[ExpertsLayer]) -> str:
    """The layers outside the pool and their bytes, for a message; empty without layers."""
    kinds: dict[str, list[ExpertsLayer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    return ", ".join(
        f"{kind} ({len(alike)} layers, {sum(layer.nbytes for layer in alike):,} bytes)" for kind, alike in kinds.items()
    )


@dataclass(frozen=True)
class Router:
    """The router of a layer.

    Holds modules instead of their weights, which ``.to()`` may replace.
    """

    module: nn.Module
    matrix: Any  # the module with the weight
    num_experts: int
    biased: tuple[Any, str] | None  # the module with the bias, and its name there
    scoring: str  # of SCORINGS: applied before the bias

    @property
    def weight(self) -> torch.Tensor:
        """[experts, hidden], for the experts' input. See ``ranking``."""
        weight: torch.Tensor = self.matrix.weight
        return weight if weight.size(0) == self.num_experts else weight[: self.num_experts]

    @property
    def bias(self) -> torch.Tensor | None:
        """[experts]"""
        return None if self.biased is None else getattr(*self.biased).view(-1)[: self.num_experts]


def ranking(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scoring: str) -> torch.Tensor:
    """hidden [tokens, hidden] -> [tokens, experts] in float32 on the device of ``hidden``; larger values are chosen
    first, ignoring group masks. Equals what the op ``lookahead`` computes."""
    logits = hidden.float() @ weight.to(hidden.device, torch.float32).T
    return logits if bias is None else SCORINGS[scoring](logits) + bias.to(hidden.device, torch.float32)


def find_router(model: nn.Module, layer: ExpertsLayer) -> Router | None:
    """The router beside the experts; None if no matrix ranks them, see ``router_unsupported_reason``."""
    found = _router(model, layer)
    return found if isinstance(found, Router) else None


def router_unsupported_reason(model: nn.Module, layer: ExpertsLayer) -> str:
    """Why ``find_router`` finds none."""
    found = _router(model, layer)
    assert isinstance(found, str)
    return found


def router_adapter(module: nn.Module) -> RouterAdapter | None:
    return named_in(ROUTERS, type(module))


def router_module(model: nn.Module, layer: ExpertsLayer) -> nn.Module | None:
    """The module that chooses the experts, whether or not a matrix ranks them; None if unknown."""
    parent = model.get_submodule(layer.path.rpartition(".")[0])
    beside = [child for child in parent.children() if child is not layer.module]
    wanted = (layer.routed_experts, layer.hidden)
    routers = [child for child in beside if router_adapter(child) is not None] or [
        child for child in beside if _shape(child) == wanted
    ]
    return routers[0] if len(routers) == 1 else None


def _router(model: nn.Module, layer: ExpertsLayer) -> Router | str:
    module = router_module(model, layer)
    if module is None:
        return f"no single module beside the experts has a weight of {[layer.routed_experts, layer.hidden]}"
    adapter = router_adapter(module) or RouterAdapter()
    return adapter.unsupported_reason or _adapted(
        module, adapter, model.get_submodule(layer.path.rpartition(".")[0]), layer
    )


def _adapted(router: Any, adapter: RouterAdapter, parent: nn.Module, layer: ExpertsLayer) -> Router | str:
    matrix: Any = router.get_submodule(adapter.matrix)
    if adapter.experts_norm is not None:
        # Dividing by the experts' norm gives what the router scales. A copy: only hints depend on its being current.
        norm: Any = parent.get_submodule(adapter.experts_norm)
        with torch.no_grad():
            weight = norm.weight.float()
            scale = torch.where(weight == 0, 0.0, router.scale.float() * router.scalar_root_size / weight)
            matrix = _Matrix((matrix.weight.float() * scale).to(matrix.weight.dtype))
    corrections = [
        (owner, name)
        for owner in (*router.modules(), parent)
        for name in _CORRECTIONS
        if isinstance(getattr(owner, name, None), torch.Tensor)
    ]
    if corrections:
        scoring = _SCORE_FUNCTIONS.get(type(router.score_fn)) if hasattr(router, "score_fn") else adapter.scoring
        if scoring is None:
            return f"the router corrects scores of {type(router.score_fn).__name__}, which lookahead does not support"
        return Router(router, matrix, layer.routed_experts, corrections[0], scoring)
    own = (matrix, "bias") if isinstance(getattr(matrix, "bias", None), torch.Tensor) else None
    return Router(router, matrix, layer.routed_experts, own, "logits")


@dataclass(frozen=True)
class _Matrix:
    weight: torch.Tensor


def _shape(module: nn.Module) -> tuple[int, ...] | None:
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, torch.Tensor) else None


def common_geometry(layers: Sequence[ExpertsLayer]) -> Geometry:
    geometry = layers[0].geometry
    assert all(layer.geometry == geometry for layer in layers), "layers of one pool have one geometry"
    return geometry


def common_activation(layers: Sequence[ExpertsLayer]) -> str | tuple[str, ...] | None:
    """The fused kernel's activation of such layers, one for each if they differ; None if they run unfused."""
    names = tuple(layer.fused_activation for layer in layers if layer.fused_activation is not None)
    if not names:
        return None
    return names[0] if len(set(names)) == 1 else names


def pool_activations(layers: Sequence[ExpertsLayer], layer_indices: Sequence[int], count: int) -> list[str] | None:
    """Activations of a pool's ``count`` layers, of which only ``layer_indices`` are used."""
    named = common_activation(layers)
    if named is None or isinstance(named, str):
        return None if named is None else [named] * count
    by_index = dict(zip(layer_indices, named, strict=True))
    return [by_index.get(layer, named[0]) for layer in range(count)]


def supported_families() -> list[str]:
    """Folders of transformers.models whose experts can be in a pool, in the installed transformers."""
    models = Path(transformers.__file__).parent / "models"
    names = "|".join(UNMARKED)
    known = re.compile(rf"^@use_experts_implementation|^class ({names})\(", re.MULTILINE)
    return sorted(
        {
            source.parent.name
            for source in models.glob("*/modeling_*.py")
            if known.search(source.read_text(encoding="utf-8"))
        }
    )


def _all_layers(model: nn.Module) -> Iterator[ExpertsLayer]:
    for path, module in model.named_modules():
        if all(flag in module.__dict__ for flag in _LAYOUT_FLAGS):
            flags = {flag: vars(module)[flag] for flag in _LAYOUT_FLAGS}
            top_k = _top_k(path, module.config)
            post_norm = getattr(module, "has_post_expert_norm", False)
            yield _layer(path, module, flags, top_k, has_post_expert_norm=post_norm)
        elif module._parameters.get("gate_up_proj") is not None and (unmarked := named_in(UNMARKED, type(module))):
            transposed = unmarked.is_transposed
            flags = {"has_gate": True, "has_bias": False, "is_transposed": transposed, "is_concatenated": True}
            block = model.get_submodule(path.rpartition(".")[0])
            top_k = min(unmarked.top_k(block), module.down_proj.size(0))
            yield _layer(path, module, flags, top_k, block=block if unmarked.block else None)


def _layer(path: str, module: Any, flags: Mapping[str, Any], top_k: int, **about: Any) -> ExpertsLayer:
    rows, hidden = (module.gate_up_proj if flags["has_gate"] else module.up_proj).shape[1:]
    if flags["is_transposed"]:
        rows, hidden = hidden, rows
    experts = module.down_proj.size(0)  # gate_up may have rows of identity experts too
    expert_range = vars(module).get(EXPERT_RANGE)
    routed = experts if expert_range is None else expert_range.routed
    if not 1 <= top_k <= routed:
        raise UnsupportedModelError(f"The config gives each token {top_k} of the {routed} experts of {path}.")
    return ExpertsLayer(
        path=path,
        module=module,
        num_experts=experts,
        top_k=top_k,
        hidden=hidden,
        intermediate=rows // 2 if flags["has_gate"] else rows,
        activation=_activation(module),
        expert_range=expert_range,
        **flags,
        **about,
    )


def _top_k(path: str, config: Any) -> int:
    for name in _TOP_K_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, list):  # one per layer: the pool must hold the largest
            return max(value)
    raise UnsupportedModelError(
        f"The number of experts per token of {path} is unknown: {type(config).__name__} has none of {_TOP_K_NAMES}."
    )


def _activation(module: Any) -> str | None:
    owner = gate_definer(type(module))
    adapted = next((each.__name__ for each in type(module).__mro__ if _is_adapted(each)), None)
    if owner is None and adapted is not None:
        raise UnsupportedModelError(
            f"{adapted} of transformers {transformers.__version__} has no gate of its own where torch_mesh expects "
            "one: upgrade torch_mesh, or install another version of transformers."
        )
    if owner is None or not getattr(module, "has_gate", True):
        return _activation_name(module.act_fn)
    named = ADAPTERS[owner.__name__](module) if _is_adapted(owner) else None
    if named is not None:
        with contextlib.suppress(ValueError):  # the config has limits that no kernel supports
            gate_named(named)
            return named
    return None


def _is_adapted(kind: type) -> bool:
    """Whether ``kind`` is the class that an entry of ``ADAPTERS`` means, not a program's own of the same name."""
    return kind.__name__ in ADAPTERS and kind.__module__.partition(".")[0] in ("transformers", "torch_mesh")


def _is_silu(function: Any) -> bool:
    return function is nn.functional.silu or isinstance(function, (nn.SiLU, activations.SiLUActivation))


def _activation_name(function: Any) -> str | None:
    if _is_silu(function):
        return "silu"
    if isinstance(function, activations.ReLUSquaredActivation):
        return "relu2"
    if isinstance(function, (activations.GELUTanh, activations.NewGELUActivation)):
        return "gelu_tanh"
    if isinstance(function, activations.GELUActivation):
        return "gelu"
    if isinstance(function, nn.GELU):
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    return None


def _no_experts_message(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    name = type(model).__name__ if model_type is None else f"{type(model).__name__} (model type {model_type!r})"
    # Model types differ between the parts of a family, and from the folder's name.
    folder = type(config).__module__.rpartition(".")[0].rpartition(".")[2]
    reason = UNDECORATED.get(folder, "it has no module with the experts layout of transformers")
    return f"torch_mesh cannot run {name}: {reason}. Supported families: {', '.join(supported_families())}."
