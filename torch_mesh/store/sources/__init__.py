"""Checkpoints that another tool has quantized: one module per format, chosen by the checkpoint's own config.

A format defines the tensors of a weight (a ``Layout``). Everything else follows from the weights' names and shapes:
docs/decisions/0040.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.store.dtypes import FLOATS
from torch_mesh.store.header import Header, Tensor, read_header, read_json_file, store_error
from torch_mesh.store.sources import nvfp4
from torch_mesh.store.sources.awq import Awq
from torch_mesh.store.sources.bitsandbytes import Bnb4
from torch_mesh.store.sources.fp8 import Fp4InFp8, ScaledFp8
from torch_mesh.store.sources.gptq import Gptq
from torch_mesh.store.sources.layout import Layout, Nearest, Weight, in_int8, make_weight
from torch_mesh.store.sources.mxfp4 import Mxfp4Blocks, PackedMxfp4
from torch_mesh.store.sources.pack_quantized import PackedInt, ScaledInt8
from torch_mesh.store.sources.plain import Plain
from torch_mesh.store.weight_files import weight_files

_MODELOPT_NAME = "hf_quant_config.json"
# For checkpoints with the quantization in another file than config.json, the method by file: AutoGPTQ's and AutoAWQ's.
_BESIDE_CONFIG = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Files that describe quantization: not copied if the weights are not quantized.
QUANTISATION_FILES = (_MODELOPT_NAME, *_BESIDE_CONFIG)
_PLAIN = Plain()
# Names of scales of activations and of the KV cache, which torch_mesh does not quantize.
_OF_ACTIVATIONS = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_output_scale",
)
# Parts of quantized weights. They must not pass for plain weights, nor remain unused if other parts are missing.
_CODES = (".qweight", ".weight_packed", ".weight", "_blocks")
_COMPANIONS = (
    "_scale_inv",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".qscale_weight",
    "_proj_scales",
    ".scales",
    ".qzeros",
    ".g_idx",
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
)
# Names of parts that no unquantized model has.
_MARKS = (".qweight", ".weight_packed", ".weight_scale_inv", ".weight.absmax", "_proj_blocks")
_OTHER_TOOLS = (
    "torch_mesh reads bf16, fp16 and fp32 checkpoints, and those of quant_method fp8, mxfp8, mxfp4, "
    "compressed-tensors, modelopt (NVFP4, FP8), gptq, awq, auto-round (auto_gptq, auto_awq) and bitsandbytes (4 bits): "
    "use the unquantized original, or one of these."
)


@dataclass(frozen=True)
class Source:
    method: str
    layouts: tuple[Layout, ...]

    def weights(self, headers: Sequence[Header]) -> dict[str, Weight]:
        """Every weight by its name in an unquantized checkpoint.

        Raises ``StoreError`` for missing, inconsistent and unused tensors.
        """
        located = {name: (header.path, tensor) for header in headers for name, tensor in header.tensors.items()}
        tensors = {name: tensor for name, (_, tensor) in located.items()}
        found: dict[str, Weight] = {}
        taken: set[str] = set()
        for layout in self.layouts:
            for name in tensors:
                weight = None if name in taken else layout.weight_of(name, tensors)
                if weight is None:
                    continue
                if weight in found or (weight in tensors and weight != name):
                    raise store_error(located[name][0], f"tensor {name!r} and another are both {weight!r}")
                parts = {role: located[part] for role, part in _parts(name, layout, located).items()}
                found[weight] = make_weight(weight, layout, parts)
                taken.update(tensor.name for _, tensor in parts.values())
        for name, (path, tensor) in located.items():
            if name not in taken and not name.endswith(_OF_ACTIVATIONS):
                _check_plain(path, tensor, self.method)
                found[name] = make_weight(name, _PLAIN, {"codes": (path, tensor)})
        return found


def nearest(weights: Sequence[Weight]) -> Nearest:
    """The nearest format for the values of all weights."""
    # Biases fit every format.
    matrices = [weight for weight in weights if not (weight.is_plain and weight.name.endswith("bias"))]
    found = list(dict.fromkeys(weight.rounded() for weight in matrices))
    if all(choice.weights == "bf16" for choice in found):
        return max(found, key=lambda choice: choice.error)
    if len({choice.weights for choice in found}) > 1 or all(weight.passthrough_codes() for weight in matrices):
        return in_int8("no record holds the formats of all of them")
    return next(weight.rounded() for weight in matrices if not weight.passthrough_codes())


def own_quantization(folder: Path) -> dict[str, Any] | None:
    """The checkpoint's own quantization, from config.json or another tool's file beside it. None for an unquantized
    one.

    transformers ignores methods that it does not know, and a passed config may belong to another checkpoint.
    """
    path = folder / "config.json"
    if path.is_file():
        # Not parse_json: a config may have NaN and infinities.
        try:
            parts: list[Any] = [json.loads(path.read_bytes())]
        except (ValueError, RecursionError) as problem:
            raise store_error(path, f"is not valid JSON: {problem}") from None
        if not isinstance(parts[0], dict):
            raise store_error(path, f"is not a config: {parts[0]!r:.80} is not an object")
        for part in parts:
            quantization = part.get("quantization_config") if isinstance(part, dict) else part
            if quantization is not None and not isinstance(quantization, dict):
                raise store_error(path, f"is not a config: {quantization!r:.80} is not an object")
            if quantization:
                return quantization
            parts.extend(value for value in part.values() if isinstance(value, dict))
    path = folder / _MODELOPT_NAME
    if path.is_file():
        declared = read_json_file(path, floats=True)
        if not isinstance(declared, dict) or not isinstance(declared.get("quantization"), dict):
            raise store_error(path, "has no object 'quantization'")
        if declared["quantization"].get("quant_algo") is None and not declared["quantization"].get("quantized_layers"):
            return None  # of the KV cache alone
        return {"quant_method": "modelopt", **declared["quantization"]}
    for name, method in _BESIDE_CONFIG.items():
        if (folder / name).is_file() and _has_packed_words(folder):
            declared = read_json_file(folder / name, floats=True)
            if not isinstance(declared, dict):
                raise store_error(folder / name, f"is not an object that describes quantization: {declared!r:.80}")
            return {"quant_method": method, **declared}
    return None


def _has_packed_words(folder: Path) -> bool:
    """Whether the weights are quantized as that file says; they may have been dequantized since."""
    return any(name.endswith(".qweight") for path in weight_files(folder) for name in read_header(path).tensors)


def check_unquantized(folder: Path, headers: Sequence[Header]) -> None:
    """Raises ``UnsupportedModelError`` for parts of quantized weights in a checkpoint without a description:
    transformers would take codes for values, or initialize missing weights randomly."""
    for header in headers:
        for tensor in header.tensors.values():
            if tensor.dtype.startswith(("F8", "F6", "F4")) or tensor.name.endswith(_MARKS):
                others = ", ".join(QUANTISATION_FILES)
                raise UnsupportedModelError(
                    f"{header.path}: {tensor.name} is {tensor.dtype}, a part of a quantized weight, but neither a "
                    f"quantization_config of {folder}/config.json nor any of {others} beside it describes its "
                    "quantization. Use the config.json that belongs to these weights, or the unquantized original. "
                    "transformers does not download these files from the hub: download the whole model (hf "
                    "download) and open its folder."
                )


def method_of(quantization: Mapping[str, Any]) -> str:
    method = quantization.get("quant_method")
    if method is None and "quant_algo" in quantization:
        return "modelopt"
    return str(getattr(method, "value", method or "an unnamed method"))


def source_of(quantization: Mapping[str, Any], where: str) -> Source:
    """Raises ``UnsupportedModelError``, with advice, for unsupported methods and variants."""
    method = method_of(quantization)
    make = _SOURCES.get(method)
    if make is None:
        raise UnsupportedModelError(f"{where} is quantized already ({method}). {_OTHER_TOOLS}")
    try:
        return Source(method, make(quantization, where))
    except UnsupportedModelError:
        raise
    except (TypeError, AttributeError, KeyError, ValueError) as problem:
        _refuse(where, f"{method} with an unusual config ({problem})")


def _refuse(where: str, what: str) -> NoReturn:
    raise UnsupportedModelError(f"{where} is quantized already, with {what}. {_OTHER_TOOLS}")


def _fp8(config: Mapping[str, Any], where: str) -> tuple[Layout, ...]:
    if config.get("fmt") not in (None, "e4m3", "float8_e4m3fn", "mxfp8"):
        _refuse(where, f"fp8 of the format {config['fmt']!r}")
    return ScaledFp8(
        _block(config.get("weight_block_size", (128, 128)), where), config.get("scale_fmt") == "ue8m0"
    ), Fp4InFp8()


def _block(block: Any, where: str) -> tuple[int, int] | None:
    if block is None:
        return None
    if isinstance(block, (list, tuple)) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block[0], block[1]
    _refuse(where, f"fp8 in blocks of {block!r}")


def _mxfp4(config: Mapping[str, Any], where: str) -> tuple[Layout, ...]:
    return (Mxfp4Blocks(),)


def _compressed_tensors(config: Mapping[str, Any], where: str) -> tuple[Layout, ...]:
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        _refuse(where, f"compressed-tensors of the sparse format {sparsity['format']!r}")
    if (config.get("transform_config") or {}).get("config_groups"):
        _refuse(where, "compressed-tensors that rotates its weights (transform_config)")
    groups = config.get("config_groups") or {}
    schemes = [(group or {}).get("weights") or {} for group in groups.values()]
    # Integers in words; those of "int-quantized" groups are bytes, and show it.
    packed = [
        (group or {}).get("weights") or {}
        for group in groups.values()
        if ((group or {}).get("format") or config.get("format")) != "int-quantized"
    ]
    integers = {s["num_bits"] for s in packed if s.get("type", "int") == "int" and "num_bits" in s}
    layouts: list[Layout] = [nvfp4.CompressedTensors(), PackedMxfp4(), ScaledInt8()]
    structures = [scheme["block_structure"] for scheme in schemes if scheme.get("block_structure")]  # [8, 4] or "8x4"
    blocks = {tuple(map(int, given.split("x"))) if isinstance(given, str) else tuple(given) for given in structures}
    block = next(iter(blocks)) if len(blocks) == 1 else None
    layouts.append(ScaledFp8(_block(block, where), powers_of_two=False))
    if integers:
        if len(integers) > 1 or not integers <= {4, 8} or not all(type(bits) is int for bits in integers):
            _refuse(where, f"compressed-tensors with integers of {sorted(map(str, integers))} bits")
        layouts.append(PackedInt(integers.pop()))
    return tuple(layouts)


def _modelopt(config: Mapping[str, Any], where: str) -> tuple[Layout, ...]:
    algorithms = {config.get("quant_algo")} | {
        layer.get("quant_algo") for layer in (config.get("quantized_layers") or {}).values() if isinstance(layer, dict)
    }
    known = {None, "NVFP4", "FP8", "MIXED_PRECISION", "NVFP4_AWQ"}
    if not algorithms <= known or algorithms == {None}:
        _refuse(where, f"modelopt ({', '.join(sorted(str(name) for name in algorithms - (known - {None})))})")
    if "NVFP4_AWQ" in algorithms:
        _refuse(where, "modelopt (NVFP4_AWQ, whose activations are scaled)")
    return nvfp4.ModelOpt(), ScaledFp8(None, powers_of_two=False)


def _gptq(config: Mapping[str, Any], where: str) -> tuple[Layout, ...]:
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    bits = config.get("bits")
    if form not in ("gptq", "gptq_v2"):
        _refuse(where, f"gptq of the format {form!r}")
    rules = (config.get("dynamic") or {}).items()
    others = {rule.get("bits", bits) for name, rule in rules if isinstance(rule, dict) and not name.startswith("-")}
    every: list[Any] = list(dict.fromkeys([bits, *others]))
    if not all(type(each) is int and each in (2, 4, 8) for each in every):
        _refuse(where, f"gptq of {sorted(map(str, every))} bits")
    return (
        Gptq(
            every,
            symmetric=config.get("sym") is True,
            ordered=bool(config.get("desc_act")),
            one_less=form == "gptq",
        ),
    )


def _auto_round(config: Mapping[str, Any], where: str) -> tuple[Layout, ...]:
    """An export in another tool's layout; auto-round's own differs in the zero points."""
    packing = config.get("packing_format")
    layers = [layer for layer in (config.get("extra_config") or {}).values() if isinstance(layer, dict)]
    others = {layer.get("bits", config.get("bits")) for layer in layers} - {config.get("bits"), 16, 32}
    if packing == "auto_round:auto_gptq":
        rules = {str(bits): {"bits": bits} for bits in others}
        return _gptq({"bits": config.get("bits"), "sym": config.get("sym"), "dynamic": rules}, where)
    if others:
        _refuse(where, "auto-round of several numbers of bits")
    if packing == "auto_round:auto_awq":
        return _awq({"bits": config.get("bits")}, where)
    _refuse(where, f"auto-round packed as {packing!r}")


def _awq(config: Mapping[str, Any], where: str) -> tuple[Layout, ...]:
    form = str(config.get("version") or config.get("format") or "gemm").lower()
    bits = config.get("bits", config.get("w_bit", 4))
    if form != "gemm" or bits != 4:
        _refuse(where, f"awq of the version {form!r} with {bits} bits")
    return (Awq(),)


def _bitsandbytes(config: Mapping[str, Any], where: str) -> tuple[Layout, ...]:
    if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
        _refuse(where, "bitsandbytes of 8 bits")
    return (Bnb4(),)


_SOURCES: Mapping[str, Callable[[Mapping[str, Any], str], tuple[Layout, ...]]] = {
    "fp8": _fp8,
    "mxfp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
}
METHODS = tuple(_SOURCES)  # the supported values of quant_method


def _parts(name: str, layout: Layout, located: Mapping[str, tuple[Path, Tensor]]) -> dict[str, str]:
    parts = {"codes": name}
    for role, names in layout.companions(name).items():
        present = [candidate for candidate in names if candidate in located]
        if present:
            parts[role] = present[0]
        elif role in layout.required:
            path, tensor = located[name]
            raise store_error(
                path, f"tensor {name!r} is {layout.title}, and there is no {' or '.join(names)}", tensor.offset
            )
    return parts


def _check_plain(path: Path, tensor: Tensor, method: str) -> None:
    """Raises ``StoreError`` for tensors that are not plain weights, so that codes are never taken for values."""
    is_number = tensor.dtype in (*FLOATS, "F64")
    is_bytes = tensor.dtype in ("I8", "U8") and len(tensor.shape) > 1  # as of fused experts, whose names have no ending
    is_code = tensor.dtype.startswith("F") or is_bytes or tensor.name.endswith(_CODES)
    if not tensor.name.endswith(_COMPANIONS) and (is_number or not is_code):
        return
    raise store_error(
        path,
        f"tensor {tensor.name!r} is {tensor.dtype} of {list(tensor.shape)}, but its other parts by {method} are "
        "missing",
        tensor.offset,
    )
