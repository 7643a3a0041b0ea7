"""Finding a model's experts: which modules hold them, in what layout, and which kernel path computes them.

transformers marks the experts modules that share one calling convention with ``use_experts_implementation``; what that
decorator leaves on an instance describes its layout. Everything a family does beyond those flags is an entry of
``ADAPTERS``, so that supporting one more never edits the code that uses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import activations
from transformers.integrations import moe

from .errors import UnsupportedModelError

# Config attributes that hold the number of experts per token, in the order in which they are tried.
_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")

# What experts may be loaded in.
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# What use_experts_implementation leaves on every instance.
_LAYOUT_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


# Alpha and limit of the fused kernel's "swigluoai" (csrc/kernels/activation.h), the defaults of every config that has them.
SWIGLUOAI = (1.702, 7.0)


@dataclass(frozen=True)
class Adapter:
    """What an experts class's own ``_apply_gate`` computes, where the fused kernel may replace it.

    ``plain_gate``: act(gate) * up and nothing else. ``swigluoai``: (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g) of
    g = min(gate, limit), alpha and limit being the attributes of these names.
    """

    plain_gate: bool = False
    swigluoai: tuple[str, str] | None = None


# By the name of the class that defines ``_apply_gate``: one that overrides it is not taken for its base. A gate of a class that
# is not listed runs as it is, between two calls of grouped_linear.
ADAPTERS: dict[str, Adapter] = {
    # Its gate is the default one computed in float32, which is what the fused kernel does anyway.
    "BeamExperts": Adapter(plain_gate=True),
    "GptOssExperts": Adapter(swigluoai=("alpha", "limit")),
    "MiniMaxM3VLExperts": Adapter(swigluoai=("swiglu_alpha", "swiglu_limit")),
    "OpenAIPrivacyFilterExperts": Adapter(swigluoai=("alpha", "limit")),
    "SwigluOaiExperts": Adapter(swigluoai=("alpha", "limit")),
}


@dataclass(frozen=True)
class RouterAdapter:
    """Where a router has the matrix [experts, hidden] that scores what its experts take in, or why it has none.

    ``matrix``: the linear layer in it that has the weight, empty for the router itself; rows beyond the experts' are not theirs.
    ``experts_norm``: the router normalises its input without a weight, scales it and asks the matrix, where the experts' input is
    normalised by this module beside it.
    ``scoring``: what it makes of its logits before it corrects them (``_CORRECTIONS``), one of ``SCORINGS``; a ``score_fn`` says it too.
    """

    matrix: str = ""
    experts_norm: str | None = None
    scoring: str = "sigmoid"
    why_none: str = ""


_GEMMA_ROUTER = RouterAdapter(matrix="proj", experts_norm="pre_feedforward_layernorm_2")

# By the name of the router's class, which stands beside the experts. All others are the one module there whose weight is
# [experts, hidden]. The README names those that have none.
ROUTERS: dict[str, RouterAdapter] = {
    "AfmoeTokenChoiceRouter": RouterAdapter(matrix="gate"),
    "DeepseekV4HashRouter": RouterAdapter(why_none="the experts follow from the token's id"),
    "DiffusionGemmaTextRouter": _GEMMA_ROUTER,
    "Ernie4_5_MoeTopKRouter": RouterAdapter(scoring="softmax"),
    "Ernie4_5_VLMoeMoeTopKRouter": RouterAdapter(scoring="softmax"),
    "Gemma4TextRouter": _GEMMA_ROUTER,
    "HunYuanMoEV1Gate": RouterAdapter(matrix="wg"),
    "InklingTopkRouter": RouterAdapter(),
    "Kolibri1TopKRouter": RouterAdapter(scoring="logits"),
    "MuseSparkTopkRouter": RouterAdapter(why_none="the router sees other hidden states than the experts"),
    "ZayaRouter": RouterAdapter(why_none="the router is several matrices with activations between them"),
}

# What a router adds to its scores for the choice alone: an attribute of the router, of a module in it or of the block around it.
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")

# By the names that the op ``lookahead`` has for them.
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

# Families with experts that do not follow the decorated layout, by their folder of transformers.models: why not.
UNDECORATED: dict[str, str] = {
    "dbrx": "its experts are stacked into matrices without an expert dimension",
    "doge": "its experts are rows of embedding tables",
    "jetmoe": "its experts are spread over attention and feed-forward layers",
    "llama4": "its experts compute every token and weight their input, not their output",
    "longcat_flash": "some of its experts are identities",
    "nllb_moe": "its experts are separate modules with a capacity limit",
    "step3p7": "its experts class is not marked with the standard layout, and clamps in some layers only",
    "switch_transformers": "its experts are separate modules with a capacity limit",
}


@dataclass(frozen=True)
class Geometry:
    """What all experts of one pool have in common."""

    num_experts: int
    hidden: int
    intermediate: int
    has_gate: bool
    has_bias: bool
    activation: str | None  # of the fused kernel; None: layers go through grouped_linear

    @property
    def gate_up_features(self) -> int:
        """Columns that projection 0 of ``grouped_linear`` gives."""
        return self.intermediate * (2 if self.has_gate else 1)


@dataclass(frozen=True)
class ExpertTensors:
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
        """The same without gradients, copied to the CPU where it is elsewhere."""
        parts: dict[str, Any] = {part.name: getattr(self, part.name) for part in fields(self)}
        on_cpu: Any = {name: None if part is None else part.detach().cpu() for name, part in parts.items()}
        return ExpertTensors(**on_cpu)


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
    activation: str | None  # of the fused kernel, by name; None: the module's own gate or activation must run
    has_post_expert_norm: bool
    expert_parallel: bool  # router ids >= num_experts are sentinels to skip

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            self.num_experts, self.hidden, self.intermediate, self.has_gate, self.has_bias, self.fused_activation
        )

    @property
    def fused_activation(self) -> str | None:
        """The activation of the fused op; None where the layer must go through grouped_linear."""
        return None if self.has_post_expert_norm else self.activation

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.parameters[self.parameter_names[0]].dtype

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's expert parameters, by name."""
        owned: dict[str, Any] = self.module._parameters
        return {name: owned[name] for name in self.parameter_names}

    @property
    def kind(self) -> str:
        """Its path without numbers, which layers of one kind share: each token runs through all of them or none."""
        return re.sub(r"(?<=\.)\d+(?=\.)", "*", self.path)

    @property
    def nbytes(self) -> int:
        """Of the expert parameters, unpacked."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The module's expert parameters, which leave it while it is patched."""
        names = ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")
        return names + tuple(f"{name}_bias" for name in names) if self.has_bias else names

    def expert(self, index: int, parameters: Mapping[str, torch.Tensor] | None = None) -> ExpertTensors:
        """Views of one expert's weights in the module's parameters, or in ``parameters`` of the same names and shapes."""
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


class InPool:
    """Base of the classes that patched experts modules have: what says that a layer's weights are in a pool."""


def find_experts(model: nn.Module) -> list[ExpertsLayer]:
    """The experts layers of ``model`` that go into a pool, in the order in which its modules are registered.

    A pool's slots have one size: of layers that differ in geometry these are the ones whose geometry has most bytes, of a patched
    model those that are patched. All others are ``layers_left_alone``.

    Works on meta parameters too. Raises UnsupportedModelError, listing the supported families, if there is none or one that
    cannot be supported.
    """
    layers = [_describe(path, module) for path, module in _decorated_modules(model)]
    if not layers:
        raise UnsupportedModelError(_no_experts_message(model))
    patched = [layer for layer in layers if isinstance(layer.module, InPool)]
    if patched:
        return patched
    kinds: dict[Geometry, list[ExpertsLayer]] = {}
    for layer in layers:
        kinds.setdefault(layer.geometry, []).append(layer)
    return max(kinds.values(), key=lambda alike: sum(layer.nbytes for layer in alike))


def layers_left_alone(model: nn.Module) -> list[ExpertsLayer]:
    """The experts layers of ``model`` that stay in memory, as the model has them: all but those of ``find_experts``."""
    pooled = {layer.path for layer in find_experts(model)}
    return [_describe(path, module) for path, module in _decorated_modules(model) if path not in pooled]


def describe_left_alone(layers: Sequence[ExpertsLayer]) -> str:
    """What those layers are and take, for a message; empty for none."""
    kinds: dict[str, list[ExpertsLayer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    return ", ".join(
        f"{kind} ({len(alike)} layers, {sum(layer.nbytes for layer in alike):,} bytes)" for kind, alike in kinds.items()
    )


@dataclass(frozen=True)
class Router:
    """What chooses the experts of a layer.

    The modules and not their weights, which ``.to()`` may replace.
    """

    module: nn.Module
    matrix: Any  # has the weight
    num_experts: int
    biased: tuple[Any, str] | None  # what has the bias, and its name there
    scoring: str  # of SCORINGS: what the bias is added to

    @property
    def weight(self) -> torch.Tensor:
        """[experts, hidden], for what the experts take in. See ``ranking``."""
        return self.matrix.weight[: self.num_experts]

    @property
    def bias(self) -> torch.Tensor | None:
        """[experts]"""
        return None if self.biased is None else getattr(*self.biased).view(-1)[: self.num_experts]


def ranking(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scoring: str) -> torch.Tensor:
    """hidden [tokens, hidden] -> [tokens, experts], larger for what is chosen first, but for group masks: what the op ``lookahead``
    makes of the same, all in float32 on the device of ``hidden``."""
    logits = hidden.float() @ weight.to(hidden.device, torch.float32).T
    return logits if bias is None else SCORINGS[scoring](logits) + bias.to(hidden.device, torch.float32)


def find_router(model: nn.Module, layer: ExpertsLayer) -> Router | None:
    """The router beside the experts; None where no matrix ranks them, see ``why_no_router``."""
    found = _router(model, layer)
    return found if isinstance(found, Router) else None


def why_no_router(model: nn.Module, layer: ExpertsLayer) -> str:
    """Where ``find_router`` finds none."""
    found = _router(model, layer)
    assert isinstance(found, str)
    return found


def router_adapter(module: nn.Module) -> RouterAdapter | None:
    """The entry of ``ROUTERS`` for a module, if it has one."""
    return next((ROUTERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in ROUTERS), None)


def router_module(model: nn.Module, layer: ExpertsLayer) -> nn.Module | None:
    """What chooses the experts, whether or not a matrix of it ranks them; None if it is not known."""
    parent = model.get_submodule(layer.path.rpartition(".")[0])
    beside = [child for child in parent.children() if child is not layer.module]
    wanted = (layer.num_experts, layer.hidden)
    routers = [child for child in beside if router_adapter(child) is not None] or [
        child for child in beside if _shape(child) == wanted
    ]
    return routers[0] if len(routers) == 1 else None


def _router(model: nn.Module, layer: ExpertsLayer) -> Router | str:
    module = router_module(model, layer)
    if module is None:
        return f"not one module beside the experts has a weight of {[layer.num_experts, layer.hidden]}"
    adapter = router_adapter(module) or RouterAdapter()
    return adapter.why_none or _adapted(module, adapter, model.get_submodule(layer.path.rpartition(".")[0]), layer)


def _adapted(router: Any, adapter: RouterAdapter, parent: nn.Module, layer: ExpertsLayer) -> Router | str:
    matrix: Any = router.get_submodule(adapter.matrix)
    if adapter.experts_norm is not None:
        # Both normalise the same states: dividing by the experts' norm gives what the router scales. A copy, as a product with
        # [experts, hidden] in each forward would cost more than the hint; only hints see whether it is up to date.
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
            return f"the router scores by {type(router.score_fn).__name__} and corrects that, which lookahead does not know"
        return Router(router, matrix, layer.num_experts, corrections[0], scoring)
    own = (matrix, "bias") if isinstance(getattr(matrix, "bias", None), torch.Tensor) else None
    return Router(router, matrix, layer.num_experts, own, "logits")


@dataclass(frozen=True)
class _Matrix:
    weight: torch.Tensor


def _shape(module: nn.Module) -> tuple[int, ...] | None:
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, torch.Tensor) else None


def common_geometry(layers: Sequence[ExpertsLayer]) -> Geometry:
    """The geometry of layers that ``find_experts`` gave, which is one."""
    geometry = layers[0].geometry
    assert all(layer.geometry == geometry for layer in layers), "layers of one pool have one geometry"
    return geometry


def supported_families() -> list[str]:
    """Folders of transformers.models whose experts have the decorated layout, in the installed transformers."""
    models = Path(transformers.__file__).parent / "models"
    decorated = re.compile(r"^@use_experts_implementation", re.MULTILINE)
    return sorted(
        {
            source.parent.name
            for source in models.glob("*/modeling_*.py")
            if decorated.search(source.read_text(encoding="utf-8"))
        }
    )


def _decorated_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if all(flag in module.__dict__ for flag in _LAYOUT_FLAGS):
            yield path, module


def _describe(path: str, module: Any) -> ExpertsLayer:
    gate_up = module.gate_up_proj if module.has_gate else module.up_proj
    num_experts, rows, hidden = gate_up.shape  # of a patched module's there is nothing but the shape
    if module.is_transposed:
        rows, hidden = hidden, rows
    return ExpertsLayer(
        path=path,
        module=module,
        num_experts=num_experts,
        top_k=_top_k(path, module.config),
        hidden=hidden,
        intermediate=rows // 2 if module.has_gate else rows,
        has_gate=module.has_gate,
        has_bias=module.has_bias,
        is_transposed=module.is_transposed,
        is_concatenated=module.is_concatenated,
        activation=_activation(module),
        has_post_expert_norm=getattr(module, "has_post_expert_norm", False),
        expert_parallel=getattr(module, "_is_expert_parallel", False),
    )


def _top_k(path: str, config: Any) -> int:
    for name in _TOP_K_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, list):  # one per layer: what the pool must hold is the largest
            return max(value)
    raise UnsupportedModelError(
        f"The number of experts per token of {path} is unknown: {type(config).__name__} has none of {_TOP_K_NAMES}."
    )


def _activation(module: Any) -> str | None:
    if not module.has_gate or type(module)._apply_gate is moe._default_apply_gate:
        return _activation_name(module.act_fn)
    owner = next(cls for cls in type(module).__mro__ if "_apply_gate" in vars(cls))
    adapter = ADAPTERS.get(owner.__name__, Adapter())
    if adapter.swigluoai is not None:
        values = tuple(getattr(module, name) for name in adapter.swigluoai)
        return "swigluoai" if values == SWIGLUOAI else None
    return _activation_name(module.act_fn) if adapter.plain_gate else None


def _activation_name(function: Any) -> str | None:
    if function is nn.functional.silu or isinstance(function, (nn.SiLU, activations.SiLUActivation)):
        return "silu"
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
    # Model types of one family differ between its parts, and from the folder's name.
    folder = type(config).__module__.rpartition(".")[0].rpartition(".")[2]
    reason = UNDECORATED.get(folder, "it has no module with the experts layout of transformers")
    return f"torch_mesh cannot run {name}: {reason}. Supported families: {', '.join(supported_families())}."
