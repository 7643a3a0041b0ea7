"""Tiny checkpoints as other tools quantize them, written by the format's own library if there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_model

Tensors = dict[str, torch.Tensor]
# The tensors of one weight by name suffix, and the values they represent.
Quantized = tuple[Tensors, torch.Tensor]

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
_SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32} | _EXPERTS
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Kind:
    """A format: its entry in config.json, and how a weight is written."""

    config: Mapping[str, Any]
    quantize: Callable[[torch.Tensor], Quantized]
    nearest: tuple[str, int]
    suffix: str = ".weight"  # replaced by the names of its tensors
    files: Mapping[str, Any] = field(default_factory=dict)
    rounded: bool = False  # even though it is an integer format
    others: Mapping[str, Callable[[torch.Tensor], Quantized]] = field(
        default_factory=dict
    )  # for names that match a pattern
    scales_rounded: bool = False  # although a record holds the codes

    @property
    def kept(self) -> bool:
        """Whether a record holds its codes and scales as they are."""
        return self.nearest[0] != "bf16" and not self.rounded and not self.scales_rounded


def write_quantized(folder: Path, kind: Kind, family: str = "qwen3_moe", **sizes: int) -> Tensors:
    """Write a tiny model with quantized attention and experts; return its weights after quantization in fp32."""
    model = tiny_model(family, **{**_SIZES, **sizes})
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    values: Tensors = {}
    written: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            written[name] = values[name] = tensor
            continue
        quantize = next((other for part, other in kind.others.items() if re.search(part, name)), kind.quantize)
        parts, values[name] = quantize(tensor.float() * (0.08 if ".experts." in name else 5))
        assert values[name].dtype == torch.float32 and values[name].shape == tensor.shape
        stem = name.removesuffix(kind.suffix)
        written |= {f"{stem}{rest}": part.contiguous() for rest, part in parts.items()}
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config=dict(kind.config) or None)
    for name, content in kind.files.items():
        (folder / name).write_text(json.dumps(content))
    return values


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _fp8(block: tuple[int, int], scale_fmt: str | None = None) -> Callable[[torch.Tensor], Quantized]:
    def quantize(weight: torch.Tensor) -> Quantized:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

        size = tuple(min(pair) for pair in zip(block, weight.shape, strict=True))
        config = SimpleNamespace(weight_block_size=size, scale_fmt=scale_fmt)
        parts = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({".weight": weight})
        parts = {".weight": parts[".weight"], ".weight_scale_inv": parts[".weight_scale_inv"]}
        return parts, Fp8Dequantize(None)._dequantize_one(*parts.values(), output_dtype=torch.float32)

    return quantize


def _fp8_blocks(weight: torch.Tensor) -> Quantized:
    """Blocks of 128 x 128, the last of which may be partial; transformers' own quantizer refuses partial blocks."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": scale}, codes.float() * spread


def _mxfp8(weight: torch.Tensor) -> Quantized:
    parts, values = _fp8((1, 32), "ue8m0")(weight)
    return parts | {".weight_scale_inv": parts[".weight_scale_inv"].view(torch.uint8)}, values


def _compressed(
    preset: str, form: str, *, scales: torch.dtype = torch.bfloat16, wide: float = 1.0, **changes: Any
) -> tuple[dict[str, Any], Callable[[torch.Tensor], Quantized]]:
    """A scheme of compressed-tensors from config.json, with the library's own compressor. Scales of integers are
    ``wide`` times as large as the largest weight needs, as observers and GPTQ may choose them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = PRESET_SCHEMES[preset]["weights"].model_copy(update=changes)
    arguments = QuantizationArgs(**arguments.model_dump())
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)

    def quantize(weight: torch.Tensor) -> Quantized:
        size = arguments.group_size if arguments.group_size and arguments.group_size > 0 else weight.shape[1]
        groups = weight.view(weight.shape[0], -1, size)
        least, most = groups.amin(-1), groups.amax(-1)
        whole = None
        if arguments.strategy == "tensor_group":
            whole = (448 * 6 / weight.abs().max()).reshape(1)
        scale, zeros = calculate_qparams(least, most, arguments, global_scale=whole)
        if arguments.type == "int":
            scale = (scale * wide).to(scales)
        state = {"weight": weight, "weight_scale": scale}
        if not arguments.symmetric:
            state["weight_zero_point"] = zeros
        if whole is not None:
            state["weight_global_scale"] = whole
        parts = compressor.compress(state, scheme)
        kept = {name: part.detach().clone() for name, part in parts.items()}
        if arguments.type == "float" and arguments.num_bits == 4:
            rows, columns = weight.shape
            codes = unpack_fp4_from_uint8(kept["weight_packed"], rows, columns, dtype=torch.float32)
            powers = kept["weight_scale"]
            powers = torch.exp2(powers.float() - 127) if powers.dtype == torch.uint8 else powers.float()
            values = dequantize(codes, powers, args=arguments, dtype=torch.float32, global_scale=whole)
        elif kept["weight_scale"].dtype == torch.uint8:
            values = (kept["weight"].float().view(*kept["weight_scale"].shape, -1)) * torch.exp2(
                kept["weight_scale"].float() - 127
            ).unsqueeze(-1)
            values = values.view(weight.shape)
        else:
            in_fp32 = dict(parts) | {"weight_scale": parts["weight_scale"].float()}
            values = compressor.decompress(in_fp32, scheme)["weight"].float()
        return {f".{name}": part for name, part in kept.items()}, values

    group = {"targets": ["Linear"], "weights": json.loads(arguments.model_dump_json()), "format": form}
    group |= {"input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }
    return config, quantize


def _modelopt_nvfp4(weight: torch.Tensor) -> Quantized:
    whole = weight.abs().max() / (6 * 448)
    groups = weight.view(weight.shape[0], -1, 16)
    scale = (groups.abs().amax(-1) / (6 * whole)).to(torch.float8_e4m3fn)
    scale = torch.where(scale.float() == 0, torch.ones(()), scale.float()).to(torch.float8_e4m3fn)
    of_group = scale.float() * whole
    codes = ((groups / of_group.unsqueeze(-1)).unsqueeze(-1) - _FP4).abs().argmin(-1).to(torch.uint8)
    values = (_FP4[codes.long()] * of_group.unsqueeze(-1)).view(weight.shape)
    codes = codes.view(weight.shape)
    packed = codes[:, 1::2] << 4 | codes[:, 0::2]
    parts = {".weight": packed, ".weight_scale": scale, ".weight_scale_2": whole, ".input_scale": torch.ones(())}
    return parts, values


def _modelopt_fp8(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scale, ".input_scale": torch.ones(())}, codes.float() * scale


def _words(codes: torch.Tensor, order: tuple[int, ...] | None = None, bits: int = 4) -> torch.Tensor:
    """Pack as many codes of each row into an int32 as fit, the first in the lowest bits."""
    each = 32 // bits
    ordered = codes.long().view(codes.shape[0], -1, each)[..., list(order or range(each))]
    words = (ordered << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _grouped(
    weight: torch.Tensor, size: int, symmetric: bool, bits: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [out, in], fp16 scales and zero points [out, groups]."""
    groups, middle, last = weight.view(weight.shape[0], -1, size), 1 << (bits - 1), (1 << bits) - 1
    if symmetric:
        scale = groups.abs().amax(-1).div(middle - 1).half()
        zeros = torch.full(scale.shape, middle)
    else:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((most - least) / last).half()
        zeros = (-least / scale.float()).round().clamp(0, last).long()
    codes = (groups / scale.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return codes.clamp(0, last).long().view(weight.shape), scale, zeros


def _gptq(
    *,
    symmetric: bool,
    ordered: bool = False,
    version: int = 1,
    bits: int = 4,
    size: int = 32,
    index: bool = True,
    scales: torch.dtype = torch.float16,
) -> Callable[[torch.Tensor], Quantized]:
    """``index``: add a tensor with the group of each input."""

    def quantize(weight: torch.Tensor) -> Quantized:
        columns = weight.shape[1]
        turn = torch.randperm(columns) if ordered else torch.arange(columns)
        codes, scale, zeros = _grouped(weight[:, turn], size, symmetric, bits)
        scale = scale.to(scales)
        of_column = torch.empty(columns, dtype=torch.int32)
        of_column[turn] = (torch.arange(columns) // size).int()
        codes = codes[:, torch.argsort(turn)]
        stored = (zeros - 1) & ((1 << bits) - 1) if version == 1 else zeros
        parts = {
            ".qweight": _words(codes, bits=bits).t(),
            ".qzeros": _words(stored.t().contiguous(), bits=bits),
            ".scales": scale.t(),
            ".g_idx": of_column,
        }
        if not index:
            del parts[".g_idx"]
        group = of_column.long()
        return parts, (codes - zeros[:, group]).float() * scale.float()[:, group]

    return quantize


def _awq(weight: torch.Tensor) -> Quantized:
    size, order = 32, (0, 2, 4, 6, 1, 3, 5, 7)
    codes, scale, zeros = _grouped(weight, size, symmetric=False)
    parts = {
        ".qweight": _words(codes.t().contiguous(), order),
        ".qzeros": _words(zeros.t().contiguous(), order),
        ".scales": scale.t(),
    }
    wide = [part.repeat_interleave(size, 1) for part in (zeros, scale.float())]
    return parts, (codes - wide[0]).float() * wide[1]


def _bnb(kind: str, nested: bool) -> Callable[[torch.Tensor], Quantized]:
    def quantize(weight: torch.Tensor) -> Quantized:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        packed, state = quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
        values = dequantize_4bit(packed, state)
        parts = {".weight": packed} | {f".weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        return parts, values

    return quantize


def _of_library(
    preset: str,
    form: str,
    nearest: tuple[str, int],
    *,
    rounded: bool = False,
    others: Mapping[str, Mapping[str, Any]] | None = None,
    scales_rounded: bool = False,
    **changes: Any,
) -> Kind:
    """``others`` maps name patterns to changes of the scheme for these weights."""
    config, quantize = _compressed(preset, form, **changes)
    by_pattern = {part: _compressed(preset, form, **(changes | own))[1] for part, own in (others or {}).items()}
    return Kind(config, quantize, nearest, rounded=rounded, others=by_pattern, scales_rounded=scales_rounded)


def _int4(nearest: tuple[str, int] = ("int4", 32), **about: Any) -> Kind:
    return _of_library("W4A16", "pack-quantized", nearest, **{"group_size": 32} | about)


def _with_order(weight: torch.Tensor) -> Quantized:
    """compressed-tensors' act order: the inputs of a group may be anywhere."""
    parts, _ = _compressed("W4A16", "pack-quantized", group_size=32)[1](weight)
    order = torch.randperm(weight.shape[1])
    group = torch.empty(weight.shape[1], dtype=torch.int32)
    group[order] = (torch.arange(weight.shape[1]) // 32).int()
    scale, packed = parts[".weight_scale"], parts[".weight_packed"]
    codes = packed.contiguous().view(torch.uint8)
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).float() - 8
    return parts | {".weight_g_idx": group}, codes * scale.float()[:, group.long()]


def _gptq_config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False} | fields


_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def _with_groups_of(made: Kind, others: dict[str, Kind]) -> Kind:
    """``made``, of compressed-tensors, with the weights of these patterns in other kinds."""
    every = [made, *others.values()]
    groups = {
        f"group_{number}": {**kind.config["config_groups"]["group_0"], "format": kind.config["format"]}
        for number, kind in enumerate(every)
    }
    config = made.config | {"format": "mixed-precision", "config_groups": groups}
    return replace(made, config=config, others={pattern: kind.quantize for pattern, kind in others.items()})


KINDS: dict[str, Callable[[], Kind]] = {
    "fp8": lambda: Kind(
        {"quant_method": "fp8", "weight_block_size": [64, 64], "fmt": "e4m3"},
        _fp8((64, 64)),
        ("int8", 32),
        rounded=True,
    ),
    "fp8_blocks": lambda: Kind(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        _fp8_blocks,
        ("fp8", 128),
    ),
    "fp8_powers_of_two": lambda: Kind(
        {"quant_method": "fp8", "weight_block_size": [64, 64], "scale_fmt": "ue8m0"},
        _fp8((64, 64), "ue8m0"),
        ("bf16", 0),
    ),
    "mxfp8": lambda: Kind(
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        _mxfp8,
        ("fp8", 32),
    ),
    "ct_fp8_channel": lambda: _of_library("FP8_DYNAMIC", "float-quantized", ("fp8", 0)),
    "ct_int4": lambda: _of_library("W4A16", "pack-quantized", ("int4", 32), group_size=32),
    "ct_int4_channel": lambda: _of_library(
        "W4A16", "pack-quantized", ("int4", 64), group_size=None, strategy="channel"
    ),
    "ct_int4_asymmetric": lambda: _of_library(
        "W4A16_ASYM", "pack-quantized", ("int8", 32), rounded=True, group_size=32, strategy="group"
    ),
    "ct_int8_packed": lambda: _of_library("W8A16", "pack-quantized", ("int8", 64), group_size=None, strategy="channel"),
    "ct_int8": lambda: _of_library("W8A8", "int-quantized", ("int8", 64)),
    "ct_mxfp4": lambda: _of_library("MXFP4A16", "mxfp4-pack-quantized", ("mxfp4", 32)),
    "ct_mxfp8": lambda: _of_library("MXFP8A16", "mxfp8-quantized", ("fp8", 32)),
    "ct_nvfp4": lambda: _of_library("NVFP4A16", "nvfp4-pack-quantized", ("nvfp4", 16)),
    "modelopt_nvfp4": lambda: Kind(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, _modelopt_nvfp4, ("nvfp4", 16)
    ),
    "modelopt_file": lambda: Kind(
        {},
        _modelopt_nvfp4,
        ("nvfp4", 16),
        files={"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}},
    ),
    "modelopt_fp8": lambda: Kind({"quant_method": "modelopt", "quant_algo": "FP8"}, _modelopt_fp8, ("fp8", 128)),
    "gptq": lambda: Kind(_gptq_config(), _gptq(symmetric=True), ("int4_fp16", 32)),
    "gptq_v2": lambda: Kind(
        _gptq_config(checkpoint_format="gptq_v2"), _gptq(symmetric=True, version=2), ("int4_fp16", 32)
    ),
    "gptq_file": lambda: Kind(
        {},
        _gptq(symmetric=True),
        ("int4_fp16", 32),
        files={"quantize_config.json": {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}},
    ),
    "gptq_8bit": lambda: Kind(_gptq_config(bits=8), _gptq(symmetric=True, bits=8), ("int8_fp16", 32)),
    "gptq_2bit": lambda: Kind(_gptq_config(bits=2), _gptq(symmetric=True, bits=2), ("int8", 32), rounded=True),
    "gptq_zeros": lambda: Kind(_gptq_config(sym=False), _gptq(symmetric=False), ("int8", 32), rounded=True),
    "gptq_ordered": lambda: Kind(
        _gptq_config(desc_act=True), _gptq(symmetric=True, ordered=True), ("int8", 32), rounded=True
    ),
    "auto_round": lambda: Kind(
        {"quant_method": "auto-round", "bits": 4, "sym": True, "packing_format": "auto_round:auto_gptq"},
        _gptq(symmetric=True),
        ("int4_fp16", 32),
    ),
    "awq": lambda: Kind(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, _awq, ("int8", 32), rounded=True
    ),
    "awq_file": lambda: Kind(
        {},
        _awq,
        ("int8", 32),
        rounded=True,
        files={"quant_config.json": {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}},
    ),
    "bnb_nf4": lambda: Kind(_BNB, _bnb("nf4", nested=False), ("int8", 32), rounded=True),
    "bnb_nested": lambda: Kind(
        _BNB | {"bnb_4bit_use_double_quant": True}, _bnb("nf4", nested=True), ("int8", 32), rounded=True
    ),
    "bnb_fp4": lambda: Kind(
        _BNB | {"bnb_4bit_quant_type": "fp4"}, _bnb("fp4", nested=False), ("int8", 32), rounded=True
    ),
}


_CHANNEL = {"group_size": None, "strategy": "channel"}
# Formats that differ between layers, projections or experts.
MIXED: dict[str, Callable[[], Kind]] = {
    "wide_scales": lambda: _int4(wide=1.4),
    "fp32_scales": lambda: _int4(wide=1.4, scales=torch.float32, scales_rounded=True),
    "fp32_scales_of_rows": lambda: _int4(("int4", 64), wide=1.4, scales=torch.float32, scales_rounded=True, **_CHANNEL),
    "fp16_scales": lambda: _int4(("int4_fp16", 32), wide=1.4, scales=torch.float16),
    "fp16_scales_in_a_layer": lambda: _int4(
        wide=1.4, others={r"layers\.1\.": {"scales": torch.float16}}, scales_rounded=True
    ),
    "groups_by_layer": lambda: _int4(wide=1.4, others={r"layers\.1\.": {"group_size": 64}}),
    "groups_by_projection": lambda: _int4(wide=1.4, others={r"(gate|up)_proj": {"group_size": 128}}),
    "rows_by_expert": lambda: _int4(wide=1.4, others={r"experts\.2\.": _CHANNEL}),
    "groups_of_64": lambda: _int4(("int4", 64), group_size=64, wide=1.4),
    "groups_of_16": lambda: _int4(("int8", 32), others={r"layers\.1\.": {"group_size": 16}}, rounded=True),
    "orders_of_some": lambda: replace(_int4(("int8", 32), rounded=True), others={r"experts\.2\.": _with_order}),
    "int8_fp32_scales": lambda: _of_library(
        "W8A16", "pack-quantized", ("int8", 64), scales=torch.float32, wide=1.4, scales_rounded=True, **_CHANNEL
    ),
    "gptq_index_of_some": lambda: replace(
        KINDS["gptq"](), others={r"experts\.2\.": _gptq(symmetric=True, index=False)}
    ),
    "gptq_groups_by_layer": lambda: replace(KINDS["gptq"](), others={r"layers\.1\.": _gptq(symmetric=True, size=64)}),
    "gptq_bf16_scales": lambda: replace(
        KINDS["gptq"](),
        others={"experts": _gptq(symmetric=True, scales=torch.bfloat16)},
        nearest=("int4", 32),
    ),
    "gptq_bits_by_layer": lambda: replace(
        KINDS["gptq"](),
        config=_gptq_config(dynamic={r"+:.*layers\.1\..*": {"bits": 8}}),
        others={r"layers\.1\.": _gptq(symmetric=True, bits=8)},
        nearest=("int4_fp16|int8_fp16:01", 32),
    ),
    "gptq_attention_in_8_bits": lambda: replace(
        KINDS["gptq"](),
        config=_gptq_config(dynamic={r"+:.*self_attn.*": {"bits": 8}}),
        others={r"self_attn": _gptq(symmetric=True, bits=8)},
    ),
    "ct_attention_in_8_bits": lambda: _with_groups_of(KINDS["ct_int4"](), others={r"self_attn": KINDS["ct_int8"]()}),
    "fp8_scales_by_layer": lambda: replace(
        KINDS["fp8_blocks"](), others={r"layers\.1\.": _scales_of(_fp8_blocks, torch.bfloat16)}
    ),
    "fp8_rows_by_layer": lambda: Kind(
        KINDS["modelopt_fp8"]().config,
        _modelopt_fp8,
        ("fp8", 0),
        others={r"layers\.1\.": KINDS["ct_fp8_channel"]().quantize},
    ),
    "fp8_unlike_its_scale_fmt": lambda: Kind(
        {"quant_method": "fp8", "weight_block_size": [64, 64], "scale_fmt": "ue8m0"}, _fp8((64, 64)), ("bf16", 0)
    ),
    "fp8_or_plain": lambda: Kind(
        KINDS["modelopt_fp8"]().config,
        _modelopt_fp8,
        ("int8", 32),
        others={r"layers\.1\.": lambda weight: ({".weight": weight.bfloat16()}, weight.bfloat16().float())},
        rounded=True,
    ),
}


def _scales_of(
    quantize: Callable[[torch.Tensor], Quantized], dtype: torch.dtype
) -> Callable[[torch.Tensor], Quantized]:
    """Blocks of 128 in fp8, with scales of another type."""

    def quantized(weight: torch.Tensor) -> Quantized:
        parts, _ = quantize(weight)
        parts |= {".weight_scale_inv": parts[".weight_scale_inv"].to(dtype)}
        return parts, _double_fp8(parts[".weight"], parts[".weight_scale_inv"]).float()

    return quantized


_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def exact_values(folder: Path) -> Tensors:
    """Return each expert weight of a checkpoint written here in fp64, computed from its stored codes and scales
    alone."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    if not config:
        ((name, method),) = ((name, method) for name, method in _FILES.items() if (folder / name).exists())
        config = {"quant_method": method, **json.loads((folder / name).read_text())}
    stems = {name.split("_proj.")[0] + "_proj" for name in tensors if ".experts." in name}
    return {
        f"{stem}.weight": _exact_value(
            {name.removeprefix(stem): tensor for name, tensor in tensors.items() if name.startswith(f"{stem}.")}, config
        )
        for stem in stems
    }


def _exact_value(parts: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    if ".qweight" in parts:
        return _double_awq(parts) if "awq" in json.dumps(config) else _double_gptq(parts, config)
    if ".weight_packed" in parts and parts[".weight_packed"].dtype == torch.int32:
        return _double_packed(parts, config)
    codes = parts.get(".weight_packed", parts.get(".weight"))
    assert codes is not None
    if ".weight.absmax" in parts:
        return _double_bnb(parts)
    scale = next((parts[name] for name in (".weight_scale_inv", ".weight_scale") if name in parts), None)
    if scale is None:
        return codes.double()
    scale = torch.exp2(scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    if codes.dtype == torch.uint8:
        values = _FP4.double()[_nibbles(codes)]
        scale = scale * parts.get(".weight_scale_2", torch.ones(())).double()
        scale = scale / parts.get(".weight_global_scale", torch.ones(())).double()
        return _scaled(values, scale)
    if codes.dtype == torch.int8:
        return _scaled(codes.double(), scale.reshape(-1, 1) if scale.dim() < 2 else scale)
    return _double_fp8(codes, scale)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    each = codes.contiguous().view(torch.uint8)
    return torch.stack([each & 15, each >> 4], dim=-1).flatten(-2).long()


def _integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 words along the last axis, the first code in the lowest bits."""
    shifts = torch.arange(0, 32, bits)
    return ((words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _scaled(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply by a scale for each group of a row; a single row of scales applies to all rows."""
    groups = values.view(values.shape[0], scale.shape[1], -1)
    return (groups * scale.double().unsqueeze(-1)).view(values.shape)


def _double_packed(parts: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    (group,) = (group for group in config["config_groups"].values() if group.get("format") != "int-quantized")
    bits, scale = group["weights"]["num_bits"], parts[".weight_scale"].double()
    codes = _integers(parts[".weight_packed"], bits).double()
    zeros = torch.full_like(scale, 1 << (bits - 1))
    if ".weight_zero_point" in parts:
        zeros = _integers(parts[".weight_zero_point"].t().contiguous(), bits).t()[: codes.shape[0]].double()
    index = parts.get(".weight_g_idx", torch.arange(codes.shape[1]) * scale.shape[1] // codes.shape[1]).long()
    return (codes - zeros[:, index]) * scale[:, index]


def _double_gptq(parts: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    words, scale = parts[".qweight"], parts[".scales"].double()
    bits = 32 * words.shape[0] // len(parts[".g_idx"]) if ".g_idx" in parts else config["bits"]
    codes = _integers(words.t().contiguous(), bits)
    zeros = _integers(parts[".qzeros"], bits)
    if config.get("checkpoint_format", "gptq") == "gptq":
        zeros = (zeros + 1) % (1 << bits)
    index = parts.get(".g_idx", torch.arange(codes.shape[1]) * scale.shape[0] // codes.shape[1]).long()
    return (codes - zeros[index].t()).double() * scale[index].t()


def _double_awq(parts: Tensors) -> torch.Tensor:
    place = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # position of each of eight outputs in a word
    codes, zeros = (
        _integers(parts[name], 4).unflatten(-1, (-1, 8))[..., place].flatten(-2) for name in (".qweight", ".qzeros")
    )
    group = torch.arange(codes.shape[0]) * zeros.shape[0] // codes.shape[0]
    return ((codes - zeros[group]).double() * parts[".scales"].double()[group]).t()


def _double_fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Scales are for the matrix, its rows, or blocks that divide it."""
    if scale.numel() == 1:
        return codes.double() * scale.double().reshape(())
    rows, columns = (length // count for length, count in zip(codes.shape, scale.shape, strict=True))
    return codes.double() * scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def _double_bnb(parts: Tensors) -> torch.Tensor:
    (state,) = (bytes(part.tolist()) for name, part in parts.items() if ".quant_state." in name)
    about = json.loads(state)
    scale = parts[".weight.absmax"]
    if ".weight.nested_absmax" in parts:
        of_blocks = parts[".weight.nested_absmax"].double().repeat_interleave(about["nested_blocksize"])
        scale = parts[".weight.nested_quant_map"].double()[scale.long()] * of_blocks[: scale.numel()]
        scale = scale + about["nested_offset"]
    byte = parts[".weight"].view(torch.uint8).flatten()
    codes = torch.stack([byte >> 4, byte & 15], dim=-1).flatten().long()
    values = parts[".weight.quant_map"].double()[codes]
    return (values * scale.double().repeat_interleave(about["blocksize"])[: values.numel()]).view(about["shape"])


def write_gpt_oss(folder: Path) -> Tensors:
    """Write gpt-oss: the experts of a layer in one tensor, FP4 in blocks. Return the experts' parameters as in the
    model."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2} | _EXPERTS
    tiny_model("gpt_oss", **sizes).save_pretrained(folder)
    values: Tensors = {}

    def quantize(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
            experts, columns, rows = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 125, (experts, rows, columns // 32), dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        values.update({name: tensor.float() for name, tensor in tensors.items() if name.endswith("_proj_bias")})

    rewrite(folder, quantize)
    change_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return values


def write_deepseek_v4(folder: Path) -> Tensors:
    """Write DeepSeek-V4: experts in FP4, attention in FP8, scales of one byte. Return its experts' weights."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    sizes = {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64} | _EXPERTS
    tiny_model("deepseek_v4", **sizes).save_pretrained(folder)
    values: Tensors = {}

    def quantize(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight")]:
            stem = name.removesuffix(".weight")
            if ".experts." in name:
                rows, columns = tensors[name].shape
                codes = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
                scale = torch.randint(118, 125, (rows, columns // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
                values[name] = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
                tensors |= {name: codes, f"{stem}.scale": scale}
            elif ".attn.w" in name and name.count(".w") == 2:
                parts, _ = _fp8((128, 128), "ue8m0")(tensors[name].float())
                tensors |= {name: parts[".weight"], f"{stem}.scale": parts[".weight_scale_inv"]}

    rewrite(folder, quantize)
    table = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "fmt": "e4m3"}
    change_config(folder, quantization_config=table, expert_dtype="fp4")
    return values
