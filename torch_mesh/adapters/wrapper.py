"""PEFT's layer for a targeted parameter, for experts whose weights are in a pool.

It hands both factors to the experts module, which adds their products to the routed experts' rows only.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn, cast

import torch
from peft.tuners.lora import LoraConfig
from peft.tuners.lora import layer as lora
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torch_mesh import _C
from torch_mesh.adapters.factors import Factors, concatenated, factors_of, padded_to_rank, rank_of
from torch_mesh.adapters.ranks import check_same
from torch_mesh.errors import MeshError
from torch_mesh.hf.compat import TENSOR_PARALLEL, check_forward_arguments, has_swapped_features
from torch_mesh.hf.expert_parallel import past_dispatch
from torch_mesh.models.families import ExpertsLayer
from torch_mesh.modules.experts import MeshExperts
from torch_mesh.modules.packed_weight import PackedExpertsWeight

# PEFT's other initializations start from the values of the base weight, or change it.
_INITIALISATIONS = (True, False, "gaussian")


class ParamWrapper(lora.ParamWrapper):  # PEFT recognizes by this name that wrappers may be nested
    """Wraps a ``MeshExperts``, or the wrapper of another of its parameters.

    lora_B is stored by columns, so that each expert's factor is contiguous.
    """

    def __init__(
        self, base_layer: Any, adapter_name: str, parameter_name: str, config: LoraConfig, **kwargs: Any
    ) -> None:
        inside = base_layer.get_base_layer() if isinstance(base_layer, lora.ParamWrapper) else base_layer
        _check(cast(MeshExperts, inside), parameter_name, config)
        _watch_optimizers()
        self._compared = False  # whether the weights were compared with those of other ranks
        super().__init__(base_layer, adapter_name, parameter_name, config, **kwargs)

    def _get_in_out_features(self, module: Any) -> tuple[int, int] | tuple[None, None]:
        features = super()._get_in_out_features(module)
        expert_range = self._experts._mesh_pool.expert_range
        if expert_range is not None:
            self.num_experts = expert_range.routed
        return features

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        _check(self._experts, self.parameter_name, config)
        # Read once: torch.compile guards values that it reads from a packed weight, and such a guard keeps the pool in
        # memory.
        self._layer = _layer_of(self._experts)
        self._check_rank(r)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        self._lay_out(adapter_name)
        self._compared = False
        for module in (self.base_layer, self._experts):
            for name in TENSOR_PARALLEL:
                vars(module).pop(name, None)

    @property
    def _experts(self) -> MeshExperts:
        return cast(MeshExperts, self.get_base_layer())

    @property
    def _where(self) -> str:
        return f"{self._layer.path}.{self.parameter_name}"

    def _check_rank(self, rank: int) -> None:
        if rank > _C.MAX_RANK and self._experts._mesh_fused:
            raise MeshError(
                f"The ranks of the adapters of {self._where} add up to {rank}; its kernels take at most "
                f"{_C.MAX_RANK:,}. Give a lower r, or activate fewer adapters at a time."
            )

    def _lay_out(self, adapter: str) -> None:
        """Store the factor by columns in the same parameter, so that an optimizer keeps it."""
        weight: Any = self.lora_B[adapter].weight
        if not weight.is_meta and not weight.t().is_contiguous():
            with torch.inference_mode(False):  # inference tensors would never get gradients
                weight.data = weight.data.t().contiguous().t()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_forward_arguments(self, x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        active = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
        if active:
            if not torch.compiler.is_compiling():
                for name in active:
                    self._lay_out(name)  # a loader may have replaced the tensor
            self._compare(active, x)
            own = concatenated([self._factors(name) for name in active])
            self._check_rank(own.a.size(1))
            kwargs["adapters"] = {**kwargs.get("adapters", {}), self.parameter_name: own}
        if self.base_layer is self._experts and self._experts._mesh_pool.expert_range is not None:
            return past_dispatch(self._experts, kwargs.pop("adapters", None), x, *args, **kwargs)
        return self.base_layer(x, *args, **kwargs)

    def _compare(self, active: list[str], x: torch.Tensor) -> None:
        """Check that ranks start training with the same values."""
        expert_range = self._experts._mesh_pool.expert_range
        if expert_range is None or self._compared or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        weights = [pair[name].weight for name in active for pair in (self.lora_A, self.lora_B)]
        if any(weight.requires_grad for weight in weights):
            check_same(self._where, x, cast(list[torch.Tensor], weights))
            self._compared = True

    def _factors(self, adapter: str) -> Factors:
        lora_a, lora_b = (cast(torch.Tensor, pair[adapter].weight) for pair in (self.lora_A, self.lora_B))
        return factors_of(
            lora_a,
            lora_b,
            self.num_experts,
            self.scaling[adapter],
            layer=self._layer,
            parameter=self.parameter_name,
            swapped=has_swapped_features(self),
            expert_range=self._experts._mesh_pool.expert_range,
        )

    def padded_to_rank(self, name: str, adapter: str, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` for ``adapter``'s lora_A or lora_B (``name``), padded to the current rank of the adapter.

        Raises MeshError for a lora_A that does not fit these experts.
        """
        if name != "lora_A" or adapter not in self.lora_A:
            return weight  # lora_B's columns are ordered by rank: PEFT pads correctly
        now: Any = self.lora_A[adapter].weight
        rank = rank_of(now, self.num_experts, second=False, where=self._where)
        return padded_to_rank(weight, self.num_experts, rank, self._where)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        self.refuse_to_merge()

    def refuse_to_merge(self, base: str = "") -> NoReturn:
        named = repr(base) if base else "base"
        alone = "" if self._experts._mesh_pool.expert_range is None else ", in one process,"
        raise MeshError(
            f"{self._where} is packed ({self._experts._mesh_pool.weights}) and frozen: an adapter cannot be merged "
            f"into it in place. Use it unmerged, or make a new store: model.save_pretrained('adapter'), then{alone} "
            f"torch_mesh.merge({named}, 'adapter', 'merged'), and open 'merged' with from_pretrained."
        )

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: list[str] | None) -> Any:
        if merge:
            self.merge(safe_merge, adapter_names)
        return self.get_base_layer()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_lay_out_moments)


def _lay_out_moments(optimizer: Optimizer, *_: Any) -> None:
    """Store moments as their parameter is, such as those of lora_B that plain PEFT saved by rows.

    torch's fused optimizers pair elements by their places in memory, and check no strides. Subclasses of tensors,
    such as moments in 8 bits, stay: they have ops of their own.
    """
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or parameter.is_contiguous():
            continue
        for name, value in state.items():
            is_moment = type(value) is torch.Tensor and value.shape == parameter.shape
            if is_moment and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _layer_of(experts: MeshExperts) -> ExpertsLayer:
    weight: Any = next(iter(experts._parameters[name] for name in experts._mesh_parameters))
    assert isinstance(weight, PackedExpertsWeight)
    return weight.location.layer


def _check(experts: MeshExperts, parameter: str | None, config: LoraConfig) -> None:
    layer = _layer_of(experts)
    weights = layer.parameter_names[:2]
    if parameter is None:
        raise MeshError(
            f"{layer.path} is no linear layer: name parameters in target_parameters instead of the module in "
            f"target_modules. Allowed for these experts: {' and '.join(weights)}."
        )
    if parameter not in weights:
        raise MeshError(
            f"{layer.path}.{parameter} cannot be adapted; allowed in target_parameters for these experts: "
            f"{' and '.join(weights)}."
        )
    if config.init_lora_weights not in _INITIALISATIONS:
        raise MeshError(
            f"init_lora_weights={config.init_lora_weights!r} needs the values of {layer.path}.{parameter}, which is "
            f"packed and frozen; allowed for experts: {', '.join(map(repr, _INITIALISATIONS))}."
        )
    if reason := _unsupported_reason(experts):
        raise MeshError(f"{layer.path}.{parameter} cannot be adapted: {reason}")


def _unsupported_reason(experts: MeshExperts) -> str:
    if experts._mesh_device is not None:
        return (
            f"some of its experts are on {experts._mesh_device}, whose kernels know no adapters. Leave gpu.experts out."
        )
    if experts._mesh_deferred or experts._mesh_fallback is not None:
        return (
            "lossy.deferred_experts and lossy.fallback compute some of its experts from other records or in another "
            "layer. Leave them out."
        )
    return ""
