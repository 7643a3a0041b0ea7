"""Patched experts modules: the same module, with another forward and without its weights."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from torch_mesh.errors import MeshError, PoolClosedError
from torch_mesh.hf.compat import OLD_FORWARD, set_initialized
from torch_mesh.models.families import ExpertsLayer, InPool, apply_gate, check_model, named_in
from torch_mesh.models.tables import TableLayer
from torch_mesh.modules.packed_weight import PackedWeight, as_parameter, packed_experts
from torch_mesh.ops.device import find
from torch_mesh.pool.expert_pool import ExpertPool, refuse_to_pickle
from torch_mesh.prefetch.lookahead import NextLayer

if TYPE_CHECKING:
    from torch_mesh.adapters.factors import Factors

_PREFIX = "_mesh_"  # prefix of all attributes that patching adds to modules


class PackedModule(nn.Module):
    """A module with PackedWeights for the parameters ``_mesh_parameters``."""

    _mesh_parameters: tuple[str, ...]
    _mesh_of_rank: bool = False  # True with expert parallelism

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Skips packed parameters on ranks: PEFT would save this rank's part under the name of the whole."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._mesh_of_rank:
            for name in self._mesh_parameters:
                del destination[f"{prefix}{name}"]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """Moves and casts everything but the packed parameters, which have no data; these only change dtype."""
        taken = detach_parameters(self, self._mesh_parameters)
        try:
            super()._apply(fn, recurse)
        finally:
            reattach_parameters(self, taken)
        for name in self._mesh_parameters:
            parameter: Any = self._parameters[name]
            dtype = fn(torch.empty(0, dtype=parameter.dtype)).dtype
            if dtype != parameter.dtype:
                self._parameters[name] = as_parameter(parameter.alias(dtype), parameter.trained)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to replace a packed parameter, which the forward does not read."""
        if name in self.__dict__.get("_mesh_parameters", ()):
            weight: Any = self._parameters.get(name)
            if weight is None:
                raise MeshError(
                    f"{type(self).__name__}.{name} is packed, and nothing takes its place. Call "
                    "torch_mesh.unpatch(model) before torch.nn.utils.prune and the like."
                )
            weight.assign(value)
        else:
            super().__setattr__(name, value)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        """Packed parameters may be missing from a checkpoint, since they are frozen; if present, they must equal the
        packed values."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *others)
        packed = {f"{prefix}{name}" for name in self._mesh_parameters}
        missing_keys[:] = [key for key in missing_keys if key not in packed]


class MeshExperts(PackedModule, InPool):
    """Mixed into the class of an experts module by ``install``; see ``mesh_class``.

    Its expert parameters are PackedWeights.
    """

    # Set by the decorator or the class that is mixed in; the defaults are for experts without the decorator.
    num_experts: int
    has_gate: bool = True
    has_post_expert_norm: bool = False
    is_concatenated: bool = True
    _is_expert_parallel: bool = False
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    post_expert_norm: Callable[[torch.Tensor], torch.Tensor]
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]

    _mesh_pool: ExpertPool
    _mesh_layer: int  # the layer's index in the pool
    _mesh_handle: torch.Tensor  # an attribute, not a buffer: .to() must not move it
    _mesh_fused: bool
    _mesh_next: NextLayer | None  # the layer to prefetch for
    _mesh_lookahead_unsupported_reason: str  # empty: there is lookahead, or prefetch is off
    _mesh_experimental: str = ""  # the experimental features of the model, on its first layer alone
    _mesh_deferred: int  # max per token; 0: exact
    _mesh_defers: bool  # false for the last layer
    _mesh_fallback: torch.Tensor | None  # the handle of the layer's fallback experts
    _mesh_device: torch.device | None  # device of the experts on a GPU

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: Mapping[str, Factors] | None = None,
    ) -> torch.Tensor:
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, k] -> [tokens, hidden].

        ``adapters`` are low-rank additions to parameters, by their names.
        """
        # The kernels have no float64; weights have at most 16 bits.
        if hidden_states.dtype == torch.float64:
            narrow = {name: own._replace(a=own.a.float(), b=own.b.float()) for name, own in (adapters or {}).items()}
            return MeshExperts.forward(self, hidden_states.float(), top_k_index, top_k_weights, narrow).double()
        if self._mesh_device == hidden_states.device:
            return torch.ops.torch_mesh.experts_split(
                hidden_states, top_k_index, top_k_weights, self._mesh_handle, self._is_expert_parallel
            )
        following = self._mesh_next  # unpatch on another thread may remove it while the experts run
        if self._mesh_fused:
            hint = () if following is None else following.hint(hidden_states)
            inputs = (hidden_states, top_k_index, top_k_weights, self._mesh_handle)
            if adapters:
                return torch.ops.torch_mesh.experts_adapted(
                    *inputs, *self._adapters(adapters), self._is_expert_parallel, *hint
                )
            # All layers of a forward take the same path, or deferred products would be lost.
            if self._mesh_deferred and not torch.is_grad_enabled():
                deferred = 0 if self.training else min(self._mesh_deferred, top_k_index.size(-1))
                return torch.ops.torch_mesh.experts_deferred(
                    *inputs, deferred, not self._mesh_defers, self._is_expert_parallel, *hint
                )
            if self._mesh_fallback is not None and not torch.is_grad_enabled() and not self.training:
                return torch.ops.torch_mesh.experts_fallback(
                    *inputs, self._mesh_fallback, self._is_expert_parallel, *hint
                )
            return torch.ops.torch_mesh.experts(*inputs, self._is_expert_parallel, *hint)
        output = self._forward_unfused(hidden_states, top_k_index, top_k_weights, adapters or {})
        # After this layer's own reads, which must not wait for a prefetch, and before the next layer's attention.
        if following is not None:
            with contextlib.suppress(PoolClosedError):  # a hint: the closed pool has served this layer
                following.prefetch(hidden_states, output)
        return output

    def _adapters(self, adapters: Mapping[str, Factors]) -> tuple[torch.Tensor | float | None, ...]:
        """Adapters as arguments of experts_adapted."""
        gate_up, down = (adapters.get(parameter, (None, None, 1.0)) for parameter in self._mesh_adaptable)
        return *gate_up, *down

    @property
    def _mesh_adaptable(self) -> tuple[str, str]:
        """The parameters that adapters may be added to: gate_up, or up alone, and down."""
        return ("gate_up_proj" if self.has_gate else "up_proj"), "down_proj"

    def _forward_unfused(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: Mapping[str, Factors],
    ) -> torch.Tensor:
        ids, weights = top_k_index.reshape(-1), top_k_weights.float().reshape(-1)
        if self._is_expert_parallel:
            # Sentinels sort behind all experts, where nothing is computed; shapes stay independent of the data.
            weights = weights.masked_fill(ids >= self.num_experts, 0.0)
        sorted_ids, order = torch.sort(ids, stable=True)
        offsets = torch.searchsorted(sorted_ids, torch.arange(self.num_experts + 1, device=ids.device, dtype=ids.dtype))
        top_k = top_k_index.size(-1)

        def project(rows: torch.Tensor, projection: int, out_features: int) -> torch.Tensor:
            out = torch.ops.torch_mesh.grouped_linear(
                rows, offsets, self._mesh_handle, projection, out_features, top_k, self._is_expert_parallel
            )
            own = adapters.get(self._mesh_adaptable[projection])
            if own is None:
                return out
            a, b = own.a.to(rows.device), own.b.flatten(2).to(rows.device)  # adapters may be on the experts' device
            added = torch.ops.torch_mesh.grouped_low_rank(rows, offsets, a, b) * own.scaling
            return (out.float() + added).to(out.dtype)

        rows = project(hidden_states[order // top_k], 0, self._mesh_pool.geometry.gate_up_features)
        rows = project(apply_gate(self, rows), 1, hidden_states.size(-1))
        if self.has_post_expert_norm:
            rows = self.post_expert_norm(rows)
        products = rows.float() * weights[order].unsqueeze(-1)
        by_token = products[torch.argsort(order)].view(*top_k_index.shape, products.size(-1))
        return by_token.sum(dim=1).to(hidden_states.dtype)

    @property
    def mesh_lookahead_unsupported_reason(self) -> str:
        """Why the next layer's router cannot predict its experts; empty: it can, or prefetch is off."""
        if self._mesh_device is not None:
            return ""
        following = self._mesh_next
        if following is not None and following.device.type != "cpu":
            return f"of the next layer, the router is on {following.device}"
        return self._mesh_lookahead_unsupported_reason

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), self._mesh_pool.describe()]
        if self.mesh_lookahead_unsupported_reason:
            parts.append(f"no lookahead: {self.mesh_lookahead_unsupported_reason}")
        if self._mesh_device is not None:
            device_layer = find(self._mesh_handle)
            other = "" if device_layer.record.format == self._mesh_pool.weights else f" in {device_layer.record.format}"
            parts.append(f"{device_layer.count} of its {self.num_experts} on {self._mesh_device}{other}")
        if self._mesh_experimental:
            parts.append(f"experimental: {self._mesh_experimental}")
        return ", ".join(filter(None, parts))

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshExperts:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_pickle()


class ExpertsWithIdentities(MeshExperts):
    """longcat_flash: ids beyond the experts are identity experts."""

    _is_expert_parallel = True  # the ops skip these ids

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: Mapping[str, Factors] | None = None,
    ) -> torch.Tensor:
        computed = super().forward(hidden_states, top_k_index, top_k_weights, adapters)
        identities = top_k_index >= self.num_experts
        weight = top_k_weights.masked_fill(~identities, 0.0).sum(-1, keepdim=True)
        return (computed.float() + hidden_states.float() * weight).to(hidden_states.dtype)

    @property
    def num_experts(self) -> int:  # type: ignore[override]
        return self._mesh_pool.geometry.num_experts


class InputWeightingBlock(nn.Module):
    """llama4: experts get their input times the routing weight, and their outputs are added.

    The original runs all tokens through each expert; this runs only the chosen rows.
    """

    hidden_dim: int
    top_k: int
    router: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    shared_expert: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(hidden_states)
        ids = torch.topk(logits, self.top_k, dim=1).indices  # as the router chooses
        rows = (hidden_states.unsqueeze(1) * scores.gather(1, ids).unsqueeze(-1)).flatten(0, 1)
        routed = self.experts(rows, ids.reshape(-1, 1), torch.ones_like(rows[:, :1], dtype=torch.float32))
        return self.shared_expert(hidden_states) + routed.unflatten(0, (-1, self.top_k)).sum(1), logits


# Mixins for classes of families with exceptions.
_MIXINS: dict[str, type[MeshExperts]] = {"LongcatFlashExperts": ExpertsWithIdentities}
BLOCKS: dict[str, type[nn.Module]] = {"Llama4TextMoe": InputWeightingBlock}


def mesh_class(cls: type[nn.Module]) -> type[MeshExperts]:
    """``MeshQwen3MoeExperts`` for ``Qwen3MoeExperts``: a subclass of the class that it replaces."""
    return mixed_class(named_in(_MIXINS, cls) or MeshExperts, cls)


def mixed_class(mixin: type[nn.Module], cls: type[nn.Module], keeps_name: bool = False, is_behind: bool = False) -> Any:
    """A subclass of both, ``mixin`` first. ``keeps_name``: under the name of ``cls``, which transformers writes into
    config.json. ``is_behind``: ``mixin`` after ``cls``, whose methods then call it, unless it is a subclass of it."""
    if (mixin, cls) not in _mixed_classes:
        names = {"__module__": mixin.__module__}
        if keeps_name:
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__ or ""}
        name = cls.__name__ if keeps_name else f"Mesh{cls.__name__}"
        bases = (cls, mixin) if is_behind and not issubclass(mixin, cls) else (mixin, cls)
        _mixed_classes[mixin, cls] = type(name, bases, names)
    return _mixed_classes[mixin, cls]


_mixed_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def patched_modules(model: nn.Module) -> Iterator[MeshExperts]:
    check_model(model)
    return (module for module in model.modules() if isinstance(module, MeshExperts))


def pools_of(model: nn.Module) -> list[ExpertPool]:
    """Each pool of a patched model, once; none for another model."""
    return list(dict.fromkeys(module._mesh_pool for module in patched_modules(model)))


def detach_parameters(module: Any, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Remove the parameters ``names``; returns all parameters for ``reattach_parameters``. Raises MeshError, before it
    changes anything, if one is missing."""
    parameters, names = dict(module._parameters), list(names)
    for name in names:
        if name not in parameters:
            raise MeshError(
                f"{type(module).__name__} has lost its parameter {name}, as torch.nn.utils.prune removes it. Packed "
                "weights cannot be pruned: open the model again, and call torch_mesh.unpatch before."
            )
    for name in names:
        del module._parameters[name]
    return parameters


def reattach_parameters(module: Any, taken: dict[str, nn.Parameter]) -> None:
    """Reverse ``detach_parameters``, in the original order."""
    stayed = dict(module._parameters)
    module._parameters.clear()
    module._parameters.update({name: stayed.get(name, parameter) for name, parameter in taken.items()})


class DetachedParameters:
    """Parameters that are detached while the rest of the model is loaded, so that they are never materialized."""

    def __init__(self, layer: ExpertsLayer | TableLayer) -> None:
        self.layer = layer
        module: Any = layer.module
        self._parameters = detach_parameters(module, layer.parameter_names)
        placeholder = torch.empty(0)  # some families initialize them from the surrounding module
        set_initialized(placeholder)
        if not any(True for _ in module.buffers(recurse=False)):  # transformers would leave buffers as they are
            set_initialized(module)
        vars(module).update(dict.fromkeys(layer.parameter_names, placeholder))

    def end(self) -> None:
        for name in self.layer.parameter_names:
            del vars(self.layer.module)[name]
        reattach_parameters(self.layer.module, self._parameters)


def install(layer: ExpertsLayer, pool: ExpertPool, index: int) -> None:
    """Make ``layer.module`` compute with layer ``index`` of the pool, and drop its weights."""
    module: Any = layer.module
    module._parameters.update(packed_experts(layer, pool, index))
    module._mesh_pool = pool
    module._mesh_layer = index
    module._mesh_handle = pool.handle(index)
    module._mesh_fused = pool.geometry.fused
    module._mesh_next = None
    module._mesh_lookahead_unsupported_reason = ""
    module._mesh_deferred = 0
    module._mesh_defers = False
    module._mesh_fallback = None if pool.fallback is None else pool.fallback.handle(index)
    module._mesh_device = None
    module._mesh_parameters = layer.parameter_names
    change_class(module, mesh_class(type(module)))
    if layer.block is not None:
        mixin = named_in(BLOCKS, type(layer.block))
        assert mixin is not None, "a block to replace has a replacement"
        change_class(layer.block, mixed_class(mixin, type(layer.block)))


def restore(layer: ExpertsLayer, device: torch.device) -> None:
    """Reverse ``install``: the original class, and weights unpacked from the pool in the parameters' dtype."""
    module: Any = layer.module
    module._parameters.update(restored_parameters(layer, device))
    if isinstance(layer.block, tuple(BLOCKS.values())):
        change_class(layer.block, type(layer.block).__bases__[1])
    restore_class(module)


def restored_parameters(layer: ExpertsLayer, device: torch.device) -> dict[str, nn.Parameter]:
    before: dict[str, Any] = layer.parameters  # ordinary ones, if an interrupted call has restored them
    return {
        name: nn.Parameter(values, requires_grad=getattr(before[name], "trained", before[name].requires_grad))
        for name, values in unpacked_parameters(layer, device).items()
    }


def unpacked_parameters(layer: ExpertsLayer, device: torch.device) -> dict[str, torch.Tensor]:
    """The values of a patched module's expert parameters, in its own layout and dtype."""
    module: Any = layer.module
    values = {
        name: torch.empty(module._parameters[name].shape, dtype=module._parameters[name].dtype, device=device)
        for name in layer.parameter_names
    }
    for value in values.values():
        value[layer.num_experts :] = 0  # rows of identity experts
    for expert in range(layer.num_experts):
        module._mesh_pool.unpack_into(module._mesh_layer, expert, layer.expert(expert, values))
    return values


def restore_weight(module: Any, device: torch.device) -> None:
    """Unpack the ``weight`` of a patched module, unless an interrupted call has."""
    if isinstance(module.weight, PackedWeight):
        values = module.weight.unpacked().to(device)
        module._parameters["weight"] = nn.Parameter(values, requires_grad=module.weight.trained)


def restore_class(module: Any) -> None:
    """Restore the original class of a patched module, whose parameters have been restored."""
    change_class(module, type(module).__bases__[1])
    drop_attributes(module)


def has_attributes(module: nn.Module) -> bool:
    """Whether a module has attributes of patching, also those of an interrupted ``unpatch``."""
    return any(name.startswith(_PREFIX) for name in vars(module))


def drop_attributes(module: nn.Module) -> None:
    for name in [name for name in vars(module) if name.startswith(_PREFIX)]:
        del vars(module)[name]


def change_class(module: Any, cls: type[nn.Module]) -> None:
    """Set the class and rebind the forward that accelerate's hooks saved, which they also leave behind when removed."""
    module.__class__ = cls
    attributes = vars(module)
    if OLD_FORWARD in attributes:
        attributes[OLD_FORWARD] = types.MethodType(cls.forward, module)
    elif getattr(attributes.get("forward"), "__self__", None) is module:
        del attributes["forward"]
