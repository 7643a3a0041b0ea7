"""Linear layers outside the experts: attention projections, shared experts, the head."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional

from torch_mesh import _C
from torch_mesh.errors import UnsupportedModelError, prefix_errors_with
from torch_mesh.formats import FORMATS
from torch_mesh.hf.compat import keep_local, modules_in_fp32
from torch_mesh.hf.torch_compat import in_forward_mode, multiplies_in_tiles
from torch_mesh.models.families import WEIGHT_DTYPES, ExpertsLayer, router_adapter
from torch_mesh.modules.experts import PackedModule, change_class, restore_class, restore_weight
from torch_mesh.modules.packed_weight import PackedLinearWeight, as_parameter, device_around
from torch_mesh.store.convert import checked_group_size

if TYPE_CHECKING:
    from torch_mesh.store.dense_codes import LinearCodes

# Gates and other tiny projections stay exact: they cost nothing and decide routing.
_MIN_FEATURES = 32
_MAX_FEATURES = 1 << 20  # rows or columns that a kernel supports
_ORDINARY = (nn.Parameter, torch.Tensor)
# Up to so many rows torch_mesh reads weights faster than torch on CPUs with fast native bf16 (docs/decisions/0051).
_MAX_ROWS = 4
_MAX_FP32_VALUES = 1 << 23  # weights that are in fp32 at a time
_SMALL_BYTES = 4 << 20
# ``dense``: layers keep the codes that a GGUF file has of them, where there is a format for them.
CODES = "codes"
_MAPPINGS = Path("/proc/self/maps")

# Linear layers whose weight is multiplied by the class around them: packed, every forward would unpack them.
WEIGHT_READERS = {"JambaMambaMixer": ("dt_proj",), "LongcatFlashTopkRouter": ("classifier",)}


class MeshLinear(PackedModule, nn.Linear):
    """An ``nn.Linear`` with a packed, frozen weight. The input and the bias get gradients.

    The ``weight`` parameter is a PackedWeight with the original shape and dtype. The output has the input's dtype, or
    autocast's.
    """

    _mesh_packed: torch.Tensor  # uint8; an attribute, not a buffer: .to() must neither move nor cast it
    _mesh_shape: tuple[int, int]  # the weight's, cached for speed; on a rank, its part's
    _mesh_format: str
    _mesh_group_size: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype == torch.float64:  # the kernels have no float64
            bias = None if self.bias is None else self.bias.float()
            return self._product(input.float(), bias).double()
        device = "cuda" if input.is_cuda else "cpu"
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        return self._product(input, self.bias)

    def _product(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out_features, in_features = self._mesh_shape
        return torch.ops.torch_mesh.linear(
            input,
            self._mesh_packed,
            bias,
            in_features,
            out_features,
            self._mesh_format,
            self._mesh_group_size,
        )

    @property
    def exact(self) -> bool:
        """Whether unpacking restores the original weights."""
        weight: Any = self.weight
        return not isinstance(weight, PackedLinearWeight) or weight.exact  # an ordinary weight is being restored

    def unpacked_weight(self) -> torch.Tensor:
        """[out_features, in_features] in the parameter's dtype, on the CPU."""
        weight: Any = self.weight
        unpacked: torch.Tensor = weight.unpacked()
        return unpacked

    def extra_repr(self) -> str:
        group = "" if FORMATS[self._mesh_format].holds_bf16 else f" (group {self._mesh_group_size})"
        return f"{super().extra_repr()}, weights={self._mesh_format}{group}"


class PlainLinear(nn.Linear):
    """An ``nn.Linear`` that uses torch_mesh's kernel for bf16 weights where that is faster than torch.

    If the layer is frozen, the gradient of its input uses it too. torch computes everything else: gradients of weights
    and biases, forward-mode gradients, other dtypes and devices, tensor subclasses, autocast.
    """

    _mesh_max_rows: int | None = None  # up to which torch_mesh multiplies; None: always
    _mesh_shows_formats = False  # whether to print what dense= would save: one layer of a model does

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        limit = self._mesh_max_rows
        if (limit is not None and input.numel() > limit * self.in_features) or not _is_supported(input, weight, bias):
            return functional.linear(input, weight, bias)
        frozen = not (weight.requires_grad or (bias is not None and bias.requires_grad))
        if frozen and input.requires_grad and torch.is_grad_enabled() and not in_forward_mode():
            return cast(torch.Tensor, _FrozenProduct.apply(input, weight, bias))
        return torch.ops.torch_mesh.plain_linear(input, weight, bias)  # has torch's derivatives

    def extra_repr(self) -> str:
        rows = "" if self._mesh_max_rows is None else f" up to {self._mesh_max_rows} rows"
        shown = f"{super().extra_repr()}, products=torch_mesh{rows}"
        if not self._mesh_shows_formats:
            return shown
        formats = ", ".join(
            f'"{weights}" reads {fraction} of all such layers, off by {FORMATS[weights].errors[64]:.1%}'
            for weights, fraction in (("int8", "half"), ("int4", "a quarter"))
        )
        return f"{shown} (dense={formats})"


class _FrozenProduct(torch.autograd.Function):
    """plain_linear with frozen weights, and the gradient of its input: in fp32, block by block, rounded once."""

    @staticmethod
    def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.torch_mesh.plain_linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # torch's emulated bf16 product takes seconds in this direction, where weights are strided along the sum.
        (weight,) = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.size(0))
        rows = max(1, _MAX_FP32_VALUES // weight.size(1))
        result = grad.new_zeros((grad.size(0), weight.size(1)), dtype=torch.float32)
        for own, part in zip(grad.split(rows, -1), weight.split(rows), strict=True):
            result = torch.addmm(result, own.float(), part.float())
        return result.to(grad.dtype).reshape(*grads[0].shape[:-1], weight.size(1)), None, None


def _is_supported(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """On the CPU in bf16, and of no subclass: one may be a tensor only by what it overrides."""
    # Runs for every layer of every step, so it calls as little as possible.
    return (
        type(input) in _ORDINARY
        and type(weight) in _ORDINARY
        and input.is_cpu
        and weight.is_cpu
        and input.dtype == weight.dtype == torch.bfloat16
        and (bias is None or (type(bias) in _ORDINARY and _on_cpu_in_bf16(bias)))
        and weight.layout is torch.strided
        and weight.stride(1) == 1
        and max(weight.shape) <= _MAX_FEATURES
        and not torch.is_autocast_enabled("cpu")
    )


def _on_cpu_in_bf16(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype == torch.bfloat16


@functools.cache
def multiplies_any_rows() -> bool:
    """Whether torch_mesh multiplies bf16 faster than torch for any number of rows: on CPUs without native bf16, which
    torch emulates, and on Intel's without AMX, where products of fp32 are faster than bf16's (0027)."""
    return not multiplies_in_tiles() and "avx512_bf16" not in _C.features()["isas"].split()


def packs(dense: str) -> bool:
    """Whether linear layers outside the experts are packed."""
    return dense not in ("auto", "none")


def install_products(model: nn.Module, layers: Sequence[ExpertsLayer], *, dense: str, speculation: str) -> None:
    """Install torch_mesh's products for ``dense="auto"``, and for layers that "codes" leaves unpacked. Weights stay,
    and torch_mesh multiplies where that is faster."""
    if dense in ("auto", CODES):
        max_rows = None
        if not multiplies_any_rows():  # verification has to give the bits of plain decoding
            max_rows = _MAX_ROWS if speculation == "off" else _C.MAX_DECODE_ROWS
        linears = [linear for _, linear in _linears(model, layers) if _on_cpu_in_bf16(linear.weight)]
        for linear in linears:
            change_class(linear, PlainLinear)
            vars(linear)["_mesh_max_rows"] = max_rows
        for linear in linears[-1:] if dense == "auto" else ():  # the head, if there is one
            vars(linear)["_mesh_shows_formats"] = True


def computes_dense(model: nn.Module) -> bool:
    """Whether torch_mesh computes linear layers outside the experts, packed or not."""
    return any(isinstance(module, (MeshLinear, PlainLinear)) for module in model.modules())


def find_dense(model: Any, layers: Sequence[ExpertsLayer], loaded: bool = True) -> list[tuple[str, nn.Linear]]:
    """The layers that ``dense=`` packs: linear layers of the experts' stack and the head, without routers and gates.

    Raises UnsupportedModelError if there are none or, for a ``loaded`` model, if one is not on the CPU in a supported
    dtype.
    """
    found = _linears(model, layers)
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear layers beside its experts: set dense to 'none'."
        )
    for path, module in found if loaded else ():
        if module.weight.device.type != "cpu" or module.weight.dtype not in WEIGHT_DTYPES:
            raise UnsupportedModelError(
                f"{path}.weight is {module.weight.dtype} on {module.weight.device}. Packed layers need "
                f"{', '.join(map(str, WEIGHT_DTYPES))} on the CPU: load the model there, or set dense to 'none'."
            )
    return found


def _linears(model: Any, layers: Sequence[ExpertsLayer]) -> list[tuple[str, nn.Linear]]:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    stacks = tuple({_stack(layer.path) for layer in layers})
    routers = {id(module) for layer in layers for module in _routing_modules(model, layer)}
    return [
        (path, module)
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and (module is head or path.startswith(stacks))
        and min(module.in_features, module.out_features) >= _MIN_FEATURES
        and id(module) not in routers
        and not kept_in_fp32(model, f"{path}.weight")
        and not _read_by_its_owner(model, path)
        and not re.search(r"(^|\.)(lora_|modules_to_save\.)", path)  # adapters are trained
    ]


@dataclass(frozen=True)
class _Packing:
    """A layer that ``pack_dense`` packs, and its format. ``blocks``: existing codes to use instead of rounding the
    weight."""

    path: str
    linear: nn.Linear
    format: str
    group_size: int
    blocks: LinearCodes | None = None

    @property
    def weight(self) -> torch.Tensor:
        """This rank's part of the weight."""
        return own_part(self.linear.weight)

    @property
    def nbytes(self) -> int:
        return _C.linear_bytes(self.format, self.group_size, *tuple(self.weight.shape)[::-1])

    def packed(self) -> torch.Tensor:
        """uint8. Raises StoreError, and ValueError for weights that the format cannot hold."""
        if self.blocks is not None:
            return self.blocks.packed()
        return torch.ops.torch_mesh.pack_linear(self.weight.detach(), self.format, self.group_size)

    @property
    def exact(self) -> bool:
        return self.blocks is not None or (
            FORMATS[self.format].holds_bf16 and self.linear.weight.dtype == torch.bfloat16
        )


Blocks = Mapping[str, "LinearCodes"]  # by the names of parameters


def check_dense(dense: str, blocks: Blocks | None) -> None:
    """Raises UnsupportedModelError for ``dense="codes"`` without any codes. ``blocks`` is None without a GGUF file or a
    store with the codes of one."""
    if dense == CODES and not blocks:
        raise UnsupportedModelError(
            f'dense="{CODES}" keeps the codes that a GGUF file, or a folder that torch-mesh convert made of one, has '
            "of linear layers outside the experts. This model has none in a type that torch_mesh computes with: set "
            'dense to "auto" or a format.'
        )


def _packings(
    model: Any,
    layers: Sequence[ExpertsLayer],
    *,
    dense: str,
    group_size: int,
    blocks: Blocks | None,
    loaded: bool = True,
) -> list[_Packing]:
    if not packs(dense):
        return []
    found = find_dense(model, layers, loaded)
    if dense != CODES:
        group_size = checked_group_size(dense, group_size)
        return [_Packing(path, linear, dense, group_size) for path, linear in found]
    check_dense(dense, blocks)
    assert blocks is not None
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # a tied head has the embedding's
    packings = []
    for path, linear in found:
        own = blocks.get(names[id(linear.weight)])
        # A rank has a part of the rows, or of each row.
        if own is not None and own_part(linear.weight) is linear.weight and max(linear.weight.shape) <= _MAX_FEATURES:
            packings.append(_Packing(path, linear, own.format, own.group_size, own))
    return packings


def pack_dense(
    model: nn.Module,
    layers: Sequence[ExpertsLayer],
    *,
    dense: str,
    group_size: int,
    blocks: Blocks | None,
) -> None:
    """Pack what ``find_dense`` finds, one by one; each layer's weight is freed at once.

    ``blocks``: for ``dense="codes"``, by parameter. Layers without any stay as they are.
    """
    packings = _packings(model, layers, dense=dense, group_size=group_size, blocks=blocks)
    dtypes = {each.linear.weight.dtype for each in packings} - {torch.bfloat16}
    if dense != CODES and packings and FORMATS[dense].holds_bf16 and dtypes:
        warnings.warn(f"Linear layers in {', '.join(map(str, dtypes))} are rounded to bf16.", stacklevel=2)
    for each in packings:
        module: Any = each.linear
        weight, name = each.weight, f"{each.path}.weight"
        if weight is not module.weight:
            keep_local(module)
        with prefix_errors_with(name):
            module._mesh_packed = each.packed()
        module._mesh_shape = tuple(weight.shape)
        module._mesh_format, module._mesh_group_size = each.format, each.group_size
        module._mesh_parameters = ("weight",)
        packed: Any = module._mesh_packed, weight.shape, weight.dtype, name, each.format, each.group_size, each.exact
        module._parameters["weight"] = as_parameter(PackedLinearWeight(*packed), weight.requires_grad)
        change_class(module, MeshLinear)
    if packings:
        _copy_small_weights(model)


def _copy_small_weights(model: nn.Module) -> None:
    """Copy routers, norms and other small weights out of mapped files.

    Under memory pressure the kernel would drop their pages and read each back with full readahead, for every token.
    """
    files = list(_mapped_files())
    for parameter in model.parameters():
        if type(parameter) is not nn.Parameter or parameter.device.type != "cpu" or parameter.nbytes > _SMALL_BYTES:
            continue
        if any(first <= parameter.data_ptr() < last for first, last in files):
            with torch.inference_mode(parameter.is_inference()):  # torch takes no data of the other kind
                parameter.data = parameter.data.clone()


def _mapped_files() -> Iterator[tuple[int, int]]:
    """Addresses, [first, last), of this process's file mappings; every address if a sandbox hides them."""
    try:
        lines = _MAPPINGS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        yield 0, 1 << 64
        return
    for line in lines:
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            first, last = (int(address, 16) for address in addresses.split("-"))
            yield first, last


def own_part(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight that tensor parallelism divides, or the whole weight."""
    part: Any = weight
    return part.to_local() if hasattr(part, "device_mesh") else weight


def dense_bytes(
    model: Any,
    layers: Sequence[ExpertsLayer],
    *,
    dense: str,
    group_size: int,
    blocks: Blocks | None = None,
    loaded: bool = True,
) -> tuple[int, int]:
    """Bytes that ``pack_dense`` frees, and that it takes. A model that is not ``loaded`` is on the meta device."""
    packings = _packings(model, layers, dense=dense, group_size=group_size, blocks=blocks, loaded=loaded)
    embedding = model.get_input_embeddings().weight if packings and hasattr(model, "get_input_embeddings") else None
    # A head that is tied to the embedding frees nothing.
    freed = sum(each.weight.nbytes for each in packings if each.linear.weight is not embedding)
    return freed, sum(each.nbytes for each in packings)


def dense_formats(
    model: Any, layers: Sequence[ExpertsLayer], *, dense: str, group_size: int, blocks: Blocks | None
) -> dict[str, str]:
    """What ``pack_dense`` packs the layers of a model on the meta device to, by path."""
    packings = _packings(model, layers, dense=dense, group_size=group_size, blocks=blocks, loaded=False)
    return {each.path: each.format for each in packings}


def packed_linears(model: nn.Module) -> Iterator[tuple[str, MeshLinear]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, MeshLinear))


def restore_dense(model: Any) -> None:
    """Undo ``pack_dense`` and ``install_products``; the caller ties weights to the embedding again."""
    for plain in model.modules():
        if isinstance(plain, PlainLinear):
            change_class(plain, nn.Linear)
    for path, linear in list(packed_linears(model)):
        restore_weight(linear, device_around(model, path))
        restore_class(linear)


def _stack(path: str) -> str:
    """``model.layers.`` for ``model.layers.3.mlp.experts``."""
    parts = path.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return "".join(f"{part}." for part in parts[:number])


def _routing_modules(model: nn.Module, layer: ExpertsLayer) -> Iterator[nn.Module]:
    """Modules that choose experts: known routers, modules beside the experts with a matrix of a row for each, and their
    children."""
    for child in model.get_submodule(layer.path.rpartition(".")[0]).children():
        rows = {parameter.size(0) for parameter in child.parameters() if parameter.dim() == 2}
        if child is not layer.module and (router_adapter(child) is not None or layer.routed_experts in rows):
            yield from child.modules()


def _read_by_its_owner(model: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return name in WEIGHT_READERS.get(type(model.get_submodule(owner)).__name__, ())


def kept_in_fp32(model: nn.Module, name: str, dtype: torch.dtype = torch.float16) -> bool:
    """Whether transformers keeps the parameter in fp32 for accuracy, in a model of ``dtype``; fp16 keeps most."""
    in_fp16, strict = modules_in_fp32(model)
    parts = {torch.float16: (*in_fp16, *strict), torch.bfloat16: strict}.get(dtype, ())
    return any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in parts)
