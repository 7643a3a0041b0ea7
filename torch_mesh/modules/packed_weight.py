"""The parameter of a patched module whose values are packed: its shape and dtype, without its memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from torch_mesh.errors import MeshError
from torch_mesh.formats import is_passthrough
from torch_mesh.hf.torch_compat import (
    DDP_IGNORED,
    arguments_of,
    is_described,
    is_tracing,
    make_wrapper,
    pytree,
    without_torch_function,
)
from torch_mesh.system.memory import shortage

if TYPE_CHECKING:
    from torch_mesh.models.families import ExpertsLayer
    from torch_mesh.pool.expert_pool import ExpertPool

aten = torch.ops.aten


class PackedWeight(torch.Tensor):
    """A frozen weight on the CPU without memory of its own.

    An op on it gets the values or raises MeshError. ``accept`` copies another tensor into it as a whole; nothing else
    changes it, and views are views of a copy.

    Pickling and ``contiguous()``, which savers use, give an ordinary tensor if the values are ``exact`` and raise if
    they were rounded, since a file would pass for the original.
    """

    path: str  # as in model.named_parameters(), for errors
    format: str
    exact: bool  # whether unpacking gives the very values that were packed
    trained: bool = False  # of a parameter: whether the ordinary weight required gradients, and was not frozen since
    otherwise: ClassVar[str] = "if dense= packs it, set dense='none'"  # for errors: how else to get an ordinary weight
    _identity: torch.Tensor  # shared by all aliases of one weight

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, shape: torch.Size, dtype: torch.dtype, *_: Any) -> Any:
        # torch's C++ code sees a meta tensor: it would let `other.data = weight` through and crash. Python code, also
        # under torch.compile, sees a CPU tensor.
        hidden = type(inner) is torch.Tensor
        return make_wrapper(
            cls, shape, dtype=dtype, device=torch.device("meta" if hidden else "cpu"), dispatch_device=hidden
        )

    def unpacked(self) -> torch.Tensor:
        """An ordinary tensor of the same shape and dtype, on the CPU."""
        raise NotImplementedError

    def accept(self, source: torch.Tensor) -> None:
        """Implements ``copy_``: packs ``source`` or compares it with the packed values; raises MeshError if neither is
        possible."""
        raise NotImplementedError

    def alias(self, dtype: torch.dtype | None = None) -> PackedWeight:
        raise NotImplementedError

    def _for_arithmetic(self) -> torch.Tensor:
        raise NotImplementedError

    def to_save(self) -> torch.Tensor:
        """``unpacked``, or MeshError if the values were rounded."""
        if not self.exact:
            raise MeshError(
                f"{self.path} was rounded to {self.format}: a file of these values would pass for the original. Save "
                "with model.save_pretrained(folder), leave frozen weights out (docs/finetuning.md#files), or call "
                "torch_mesh.unpatch(model, lossy=True) to make the rounded values ordinary weights."
            )
        return self.unpacked()

    def _same_storage(self, other: Any) -> bool:
        return isinstance(other, PackedWeight) and other._identity is self._identity

    def assign(self, value: Any) -> None:
        """``module.weight = value``: raises MeshError unless ``accept`` can copy the value."""
        if value is self:
            return
        if not isinstance(value, torch.Tensor):
            raise self._refuse(f"{type(value).__name__} cannot replace")
        self.accept(value)

    def _refuse(self, what: str) -> MeshError:
        return MeshError(
            f"{what} {self.path}, which is packed ({self.format}) and frozen. Call torch_mesh.unpatch(model) to make "
            f"it an ordinary weight; {self.otherwise}."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        copied: Any = self._deep_copy(memo)
        if isinstance(self, nn.Parameter):
            copied = as_parameter(copied, self.trained)
        return memo.setdefault(id(self), copied)

    def _deep_copy(self, memo: dict[int, Any]) -> PackedWeight:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_save().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.path}, {list(self.shape)}, {self.dtype}, {self.format})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        special = _FUNCTIONS.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        if func in (aten.detach.default, aten.alias.default):
            return args[0].alias()
        if func is aten._to_copy.default and _is_cast(kwargs):
            return args[0].alias(kwargs["dtype"])
        if func is aten.copy_.default and isinstance(args[0], PackedWeight):
            args[0].accept(args[1])
            return args[0]
        for argument, value in [*zip(arguments_of(func), args, strict=False), *_named(func, kwargs)]:
            if argument.is_write:
                for weight in pytree.tree_leaves(value):
                    if isinstance(weight, PackedWeight):
                        raise weight._refuse(f"{func} would change")
        args, kwargs = pytree.tree_map_only(PackedWeight, lambda weight: weight._for_arithmetic(), (args, kwargs))
        return func(*args, **kwargs)


class PackedLinearWeight(PackedWeight):
    """The weight of a ``MeshLinear``. Arithmetic on it unpacks it each time."""

    packed: torch.Tensor
    group_size: int

    def __init__(
        self,
        packed: torch.Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        name: str,
        format: str,
        group_size: int,
        exact: bool,
    ) -> None:
        self.packed = packed
        self.path, self.format, self.group_size, self.exact = name, format, group_size, exact
        self._identity = packed

    def unpacked(self) -> torch.Tensor:
        out_features, in_features = self.shape
        unpacked = torch.ops.torch_mesh.unpack_linear(
            self.packed, in_features, out_features, self.format, self.group_size
        )
        return unpacked.to(self.dtype)

    def accept(self, source: torch.Tensor) -> None:
        if self._same_storage(source):
            return
        if source.shape != self.shape:
            raise self._refuse(f"A tensor of shape {list(source.shape)} cannot be copied into")
        weight = source.detach().to("cpu", self.dtype)
        if torch.equal(self.unpacked(), weight):  # such as from a checkpoint: packing would round once more
            return
        if is_passthrough(self.format):  # weights are not rounded to such formats
            raise self._refuse(f"Other values than those of {self.format} cannot be copied into")
        narrow = weight.float() if weight.dtype == torch.float64 else weight  # packed values have at most 24 bits
        try:
            packed = torch.ops.torch_mesh.pack_linear(narrow, self.format, self.group_size)
        except ValueError as error:
            raise self._refuse(f"{error}. These values cannot be copied into") from error
        if self.exact and not torch.equal(self._of(packed, self.dtype).unpacked(), weight):
            raise self._refuse(f"Values that {self.format} would round cannot be copied into")
        self.packed.copy_(packed)

    def alias(self, dtype: torch.dtype | None = None) -> PackedLinearWeight:
        return self._of(self.packed, dtype or self.dtype)

    def _deep_copy(self, memo: dict[int, Any]) -> PackedWeight:
        return self._of(copy.deepcopy(self.packed, memo), self.dtype)

    def _for_arithmetic(self) -> torch.Tensor:
        return self.unpacked()

    def _of(self, packed: torch.Tensor, dtype: torch.dtype) -> PackedLinearWeight:
        return PackedLinearWeight(packed, self.shape, dtype, self.path, self.format, self.group_size, self.exact)

    # torch.compile flattens the weight into its tensors and rebuilds it.
    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["packed"], (self.shape, self.dtype, self.path, self.format, self.group_size, self.exact)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, *_: Any) -> PackedLinearWeight:
        return PackedLinearWeight(inner["packed"], *context)


@dataclasses.dataclass(frozen=True, eq=False)
class _Location:
    """The location of the values of an experts parameter."""

    pool: ExpertPool
    index: int  # of the pool's layers
    layer: ExpertsLayer  # without its module
    parameter: str
    shapes: dict[str, torch.Tensor]  # all of the layer's parameters, on the meta device

    def __deepcopy__(self, memo: dict[int, Any]) -> _Location:
        return self  # deep copies of a model share its pool


class FrozenWeight(PackedWeight):
    """A weight whose values are in a pool or in files and never change: copies share them."""

    def accept(self, source: torch.Tensor) -> None:
        """Accept a checkpoint of the model itself: its values have to equal those that are there."""
        if not self._same_storage(source) and not self._equals(source):
            raise self._refuse("Cannot assign other values to")

    def _equals(self, source: torch.Tensor) -> bool:
        raise NotImplementedError

    def _deep_copy(self, memo: dict[int, Any]) -> PackedWeight:
        return self.alias()


class PackedExpertsWeight(FrozenWeight):
    """A parameter of a ``MeshExperts``. Arithmetic on it raises: it would read the whole layer."""

    otherwise = "or train adapters of it, as with PEFT"
    handle: torch.Tensor
    location: _Location

    def __init__(self, handle: torch.Tensor, shape: torch.Size, dtype: torch.dtype, location: _Location) -> None:
        self.handle = self._identity = handle
        self.location = location
        self.path = f"{location.layer.path}.{location.parameter}"
        self.format, self.exact = location.pool.weights, location.pool.exact

    def unpacked(self) -> torch.Tensor:
        """Read every expert of the layer. Raises MemoryError if they do not fit in memory."""
        if (free := shortage(self.nbytes)) is not None:
            raise MemoryError(
                f"{self.path} takes {self.nbytes:,} bytes unpacked, but the machine and its memory cgroups have "
                f"{free:,} left. It is frozen: leave it out of what you save, or use model.save_pretrained(folder), "
                "which writes piece by piece."
            )
        values = torch.empty(self.shape, dtype=self.dtype)
        values[self.location.layer.num_experts :] = 0  # rows of identity experts
        for expert in range(self.location.layer.num_experts):
            self._unpack(expert, values)
        return values

    def _equals(self, source: torch.Tensor) -> bool:
        if source.shape != self.shape:
            return False
        for expert in range(self.location.layer.num_experts):
            # Tied experts are in the pool twice, and their parameters are set to each other's.
            other = source._expert(expert) if isinstance(source, PackedExpertsWeight) else source[expert].detach()
            if not torch.equal(self._expert(expert), other.to("cpu", self.dtype)):
                return False
        return True

    def _expert(self, expert: int) -> torch.Tensor:
        one = torch.empty((1, *self.shape[1:]), dtype=self.dtype)
        self._unpack(expert, one.expand(self.shape))
        return one[0]

    def alias(self, dtype: torch.dtype | None = None) -> PackedExpertsWeight:
        return PackedExpertsWeight(self.handle, self.shape, dtype or self.dtype, self.location)

    def _unpack(self, expert: int, values: torch.Tensor) -> None:
        """Write one expert into its part of ``values``; the layer's other parameters are discarded."""
        location = self.location
        location.pool.unpack_into(
            location.index, expert, location.layer.expert(expert, location.shapes | {location.parameter: values})
        )

    def _for_arithmetic(self) -> torch.Tensor:
        raise MeshError(
            f"{self.path} is packed ({self.format}) and frozen, and cannot be computed with. For adapters, call "
            "get_peft_model after torch_mesh.patch, with PEFT's LoRA; for DistributedDataParallel, list all "
            f"torch_mesh.PackedWeight in model.{DDP_IGNORED}; for an AveragedModel, give it a ParameterList of the "
            "parameters that train; for other code, call torch_mesh.unpatch(model) first."
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["handle"], (self.shape, self.dtype, self.location)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, *_: Any) -> PackedExpertsWeight:
        return PackedExpertsWeight(inner["handle"], *context)


def packed_experts(layer: ExpertsLayer, pool: ExpertPool, index: int) -> dict[str, nn.Parameter]:
    shapes = {name: parameter.detach().to("meta") for name, parameter in layer.parameters.items()}
    described = dataclasses.replace(layer, module=nn.Module(), block=None)  # must not keep the module alive
    packed = {}
    for name, shape in shapes.items():
        location = _Location(pool, index, described, name, shapes)
        weight = PackedExpertsWeight(pool.handle(index), shape.shape, shape.dtype, location)
        packed[name] = as_parameter(weight, layer.parameters[name].requires_grad)
    return packed


def as_parameter(weight: PackedWeight, trained: bool) -> nn.Parameter:
    parameter: Any = nn.Parameter(weight, requires_grad=False)
    parameter.trained = trained
    return parameter


def device_of(*modules: nn.Module) -> torch.device:
    """The device of the first materialized parameter, or the CPU."""
    for module in modules:
        for parameter in module.parameters():
            if not parameter.is_meta and not isinstance(parameter, PackedWeight):
                return parameter.device
    return torch.device("cpu")


def device_around(model: nn.Module, path: str) -> torch.device:
    """The device of the module at ``path``, or of the nearest module around it with a materialized parameter."""
    parts = path.split(".")
    return device_of(*(model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1)))


def _is_cast(kwargs: dict[str, Any]) -> bool:
    """Whether ``_to_copy`` changes the dtype and nothing else."""
    others = {name: value for name, value in kwargs.items() if value is not None and name != "dtype"}
    others.pop("memory_format", None)
    device = others.pop("device", torch.device("cpu"))
    return bool(kwargs.get("dtype")) and torch.device(device).type == "cpu" and not any(others.values())


def _named(func: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(argument, kwargs[argument.name]) for argument in arguments_of(func) if argument.name in kwargs]


def _contiguous(weight: PackedWeight, *_: Any, **__: Any) -> torch.Tensor:
    return weight.to_save()


@dataclasses.dataclass(frozen=True)
class NoStorage:
    """The storage that savers ask for to find shared tensors."""

    address: int
    bytes: int

    def data_ptr(self) -> int:
        return self.address

    def size(self) -> int:
        return self.bytes

    nbytes = size


def _storage(weight: PackedWeight) -> NoStorage:
    """safetensors skips address 0; accelerate treats equal (address, size) pairs as one tensor, so sizes are unique
    here."""
    return NoStorage(0, weight._identity.data_ptr())


def _untyped_storage(weight: PackedWeight) -> Any:
    if not (is_tracing() or is_described()):
        raise NotImplementedError(f"{weight.path} has no storage.")  # savers fall back to storage()
    with without_torch_function():
        return weight.untyped_storage()


def _no_address(weight: PackedWeight) -> int:
    raise MeshError(
        f"{weight.path} is packed ({weight.format}) and has no memory to point to: call .contiguous() for an ordinary "
        "tensor, or save with model.save_pretrained(folder)."
    )


def _set_data(weight: PackedWeight, value: torch.Tensor) -> None:
    if not weight._same_storage(value):
        raise weight._refuse("Cannot assign other data to")


def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    if isinstance(tensor, PackedWeight):
        raise tensor._refuse("Cannot assign to a part of")
    tensor[index] = value._for_arithmetic()


def _set_requires_grad(weight: PackedWeight, value: bool) -> None:
    _requires_grad_(weight, value)  # torch leaks what a setter returns here


def _requires_grad_(weight: PackedWeight, requires_grad: bool = True) -> PackedWeight:
    if requires_grad:
        raise MeshError(
            f"{weight._refuse('Cannot compute gradients of')} To unfreeze all others: for each in model.parameters(): "
            "each.requires_grad_(not isinstance(each, torch_mesh.PackedWeight))"
        )
    weight.trained = False
    return weight


def _by_values(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda weight, *args, **kwargs: function(weight._for_arithmetic(), *args, **kwargs)


_Tensor: Any = torch.Tensor

# Accessors of a tensor's memory without an op, or through a view.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _Tensor.contiguous: _contiguous,
    _Tensor.device.__get__: lambda weight: torch.device("cpu"),  # torch.compile's mode would take the op for its own
    _Tensor.storage: _storage,
    _Tensor.untyped_storage: _untyped_storage,
    _Tensor.data_ptr: _no_address,
    _Tensor.share_memory_: _no_address,
    _Tensor.data.__set__: _set_data,
    _Tensor.__setitem__: _set_item,
    _Tensor.requires_grad.__set__: _set_requires_grad,
    _Tensor.requires_grad_: _requires_grad_,
    _Tensor.numpy: _by_values(_Tensor.numpy),
    _Tensor.tolist: _by_values(_Tensor.tolist),
    _Tensor.__array__: _by_values(_Tensor.__array__),
    _Tensor.__dlpack__: _by_values(_Tensor.__dlpack__),
}
