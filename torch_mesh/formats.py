"""The formats of weights: what each one is, and what can be done with it. Torch-free.

To add a format, add a row to ``FORMATS``. csrc/store/record.h has the layouts; tests/store/test_formats.py compares the
extension with this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

GROUP_SIZES = (32, 64, 128)  # allowed for MeshConfig.group_size
DEFAULT_GROUP_SIZE = 64

# Relative RMS of the rounding error of fp16 or fp32 values in bf16, and of such scales in bf16
# (benchmarks/weight_error.py).
BF16_ERROR = 0.0017
SCALES_ERROR = 0.0016


class ExpertSizes(NamedTuple):
    """The sizes that determine a record's layout: arguments of the extension's functions, in order and by name."""

    hidden: int
    intermediate: int
    gated: bool
    bias: bool


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """One format of weights. ``experts``, ``grouped_linear`` and their gradients take every format.

    ``version`` is that of the packed layout. ``bits`` is the size of one weight's code, ``scale_bits`` that of the
    scale that precedes each group's codes; 0 where scales are in the header of a block of columns, or where there are
    none. ``group_sizes`` are the weights that share a scale; 0 means one scale for each output, or none.

    ``errors`` is the relative RMS error of Gaussian weights by group size. It is empty for a format that holds the
    codes of a quantized checkpoint unchanged: no weights are rounded to it.

    ``dense`` is whether linear layers outside the experts can have the format, ``calibrated`` whether
    ``pack_calibrated`` packs it, ``codes`` whether a record of it can be made of a checkpoint's own codes, and ``gpu``
    whether the Triton kernels compute with it. In ``trellis`` formats codes depend on their neighbours; ``gguf``
    formats are types of GGUF.

    ``matrices`` names the formats of gate_up and down in a record that has two.

    ``table_group`` is how many values share a scale in rows of embedding tables (csrc/tables/row_codes.h), which
    ``torch-mesh convert --tables`` rounds to it: 0 is the whole row, None that no table has the format.
    """

    version: int
    bits: float
    description: str
    scale_bits: int = 0
    group_sizes: tuple[int, ...] = GROUP_SIZES
    errors: Mapping[int, float] = field(default_factory=dict)
    dense: bool = False
    calibrated: bool = False
    codes: bool = False
    trellis: bool = False
    gguf: bool = False
    gpu: bool = True
    matrices: tuple[str, str] | None = None
    table_group: int | None = None

    @property
    def rounded(self) -> bool:
        """Whether weights can be rounded to it."""
        return bool(self.errors)

    @property
    def holds_bf16(self) -> bool:
        """Whether it holds every bf16 weight unchanged."""
        return self.rounded and not any(self.errors.values())

    @property
    def chosen_groups(self) -> bool:
        """Whether ``MeshConfig.group_size`` applies to its records."""
        return self.group_sizes == GROUP_SIZES


def _gguf(bits: int, scale_bits: int, group_size: int, description: str) -> WeightFormat:
    return WeightFormat(
        version=1,
        bits=bits,
        scale_bits=scale_bits,
        group_sizes=(group_size,),
        codes=True,
        gguf=True,
        gpu=False,
        description=f"GGUF's {description}",
    )


# Errors of formats that weights are rounded to: benchmarks/weight_error.py.
_LISTED: Mapping[str, WeightFormat] = {
    "bf16": WeightFormat(
        version=1,
        bits=16,
        group_sizes=(0,),
        errors={0: 0.0},  # for bf16 weights; BF16_ERROR for others
        dense=True,
        description="as in most checkpoints",
    ),
    "bf12": WeightFormat(
        version=1,
        bits=12.125,
        group_sizes=(0,),
        errors={0: 0.0},
        dense=True,
        description="bf16, losslessly compressed by coding the exponents ([how](decisions/0073-bf12.md))",
    ),
    "int8": WeightFormat(
        version=2,  # version 1 had weight sums
        bits=8,
        scale_bits=16,
        errors={32: 0.0050, 64: 0.0057, 128: 0.0063},
        dense=True,
        calibrated=True,
        codes=True,
        table_group=0,
        description="integers, a scale per group",
    ),
    "int4": WeightFormat(
        version=1,
        bits=4,
        scale_bits=16,
        errors={32: 0.081, 64: 0.090, 128: 0.097},
        dense=True,
        calibrated=True,
        codes=True,
        table_group=32,
        description="the same",
    ),
    "lut4": WeightFormat(
        version=1,
        bits=4,
        scale_bits=16,
        errors={32: 0.069, 64: 0.078, 128: 0.085},
        dense=True,
        calibrated=True,
        description="sixteen uneven levels, a zero per group; somewhat more arithmetic than int4",
    ),
    "tcq3": WeightFormat(
        version=1,
        bits=3,
        scale_bits=16,
        errors={32: 0.138, 64: 0.141, 128: 0.142},
        calibrated=True,
        trellis=True,
        description="trellis-coded: a weight also depends on its neighbours' codes",
    ),
    "tcq2+tcq3": WeightFormat(
        version=1,
        bits=7 / 3,  # for a gated expert, of which gate_up is two thirds
        scale_bits=16,
        errors={32: 0.232, 64: 0.234, 128: 0.236},  # for a gated expert
        calibrated=True,
        trellis=True,
        matrices=("tcq2", "tcq3"),
        description="gate and up in tcq2, down in tcq3 ([when it pays](decisions/0065-two-formats-in-a-record.md))",
    ),
    "tcq2": WeightFormat(
        version=1,
        bits=2,
        scale_bits=16,
        errors={32: 0.267, 64: 0.269, 128: 0.271},
        calibrated=True,
        trellis=True,
        description="as tcq3, with two bits",
    ),
    "int8_fp16": WeightFormat(version=1, bits=8, scale_bits=16, codes=True, description="int8 with fp16 scales"),
    "int4_fp16": WeightFormat(version=1, bits=4, scale_bits=16, codes=True, description="int4 with fp16 scales"),
    "mxfp4": WeightFormat(
        version=1, bits=4, scale_bits=8, group_sizes=(32,), codes=True, description="E2M1 numbers with E8M0 scales"
    ),
    "nvfp4": WeightFormat(
        version=1, bits=4, scale_bits=8, group_sizes=(16,), codes=True, description="E2M1 numbers with E4M3 scales"
    ),
    "fp8": WeightFormat(
        version=1, bits=8, group_sizes=(0, 32, 128), codes=True, description="E4M3 numbers, fp32 or E8M0 scales"
    ),
    "q6_k": _gguf(6, 9, 16, "Q6_K"),
    "q5_k": _gguf(5, 20, 32, "Q5_K"),
    "q4_k": _gguf(4, 20, 32, "Q4_K"),
    "q3_k": _gguf(3, 9, 16, "Q3_K"),
    "q2_k": _gguf(2, 10, 16, "Q2_K"),
    "iq4_xs": _gguf(4, 10, 32, "IQ4_XS"),
    "iq4_nl": _gguf(4, 16, 32, "IQ4_NL"),
    "iq3_s": _gguf(4, 10, 32, "IQ3_S, a code for each weight"),
    "iq3_xxs": _gguf(4, 10, 32, "IQ3_XXS, likewise"),
    "iq2_s": _gguf(3, 9, 16, "IQ2_S, likewise"),
    "iq2_xs": _gguf(3, 9, 16, "IQ2_XS, likewise"),
    "iq2_xxs": _gguf(3, 10, 32, "IQ2_XXS, likewise"),
    "iq1_m": _gguf(3, 9, 16, "IQ1_M, likewise"),
    "iq1_s": _gguf(2, 10, 32, "IQ1_S, likewise"),
    "q5_1": _gguf(5, 32, 32, "Q5_1"),
    "q5_0": _gguf(5, 16, 32, "Q5_0"),
    "q4_1": _gguf(4, 32, 32, "Q4_1"),
}
# Formats that hold a type of GGUF. A record may have one for gate and up and another for down, and layers may differ.
GGUF_FORMATS = (*(name for name, each in _LISTED.items() if each.gguf), "int8_fp16", "int4_fp16", "mxfp4")


def layer_formats(weights: str) -> list[str]:
    """The format of each layer, or that of all in a list of one. Raises KeyError for others."""
    names, colon, digits = weights.partition(":")
    distinct = names.split("|")
    if not colon and len(distinct) == 1:
        return distinct
    if not 2 <= len(distinct) <= 10 or len(digits) < 2 or not set(digits) <= set("0123456789"[: len(distinct)]):
        raise KeyError(weights)
    return [distinct[int(digit)] for digit in digits]


def format_of_layer(weights: str, layer: int) -> str:
    formats = layer_formats(weights)
    return formats[layer] if len(formats) > 1 else formats[0]


def name_of_matrices(gate_up: str, down: str) -> str:
    return gate_up if gate_up == down else f"{gate_up}+{down}"


def name_of_layers(formats: Sequence[str]) -> str:
    """The name of records whose layers have these formats: "q4_k+q6_k|q4_k:0110" has a digit for each layer."""
    distinct = list(dict.fromkeys(formats))
    if len(distinct) == 1:
        return distinct[0]
    return f"{'|'.join(distinct)}:{''.join(str(distinct.index(each)) for each in formats)}"


def short_name(weights: str) -> str:
    """The name without a digit for each layer, for messages."""
    return weights.partition(":")[0]


class _Formats(dict[str, WeightFormat]):
    """The formats by name. Mixtures of GGUF's types can be looked up by theirs, and are not listed."""

    def __missing__(self, name: str) -> WeightFormat:
        layers = [each.split("+") for each in layer_formats(name)]
        if any(len(each) > 2 or not set(each) <= set(GGUF_FORMATS) for each in layers) or layers == [[name]]:
            raise KeyError(name)
        parts = {part: self[part] for each in layers for part in each}
        bits = sum(2 * parts[each[0]].bits + parts[each[-1]].bits for each in layers)
        return WeightFormat(
            version=max(part.version for part in parts.values()),
            bits=bits / (3 * len(layers)),
            group_sizes=(32,),
            codes=True,
            gpu=False,
            description="types of GGUF that differ between matrices or layers",
        )


FORMATS: Mapping[str, WeightFormat] = _Formats(_LISTED)
ROUNDED_FORMATS = tuple(name for name, each in FORMATS.items() if each.rounded)
PASSTHROUGH_FORMATS = tuple(name for name, each in FORMATS.items() if not each.rounded)
GPU_FORMATS = tuple(name for name, each in FORMATS.items() if each.rounded and each.gpu)
DENSE_FORMATS = tuple(name for name, each in FORMATS.items() if each.dense)
CALIBRATED_FORMATS = tuple(name for name, each in FORMATS.items() if each.calibrated)
TABLE_FORMATS = tuple(name for name, each in FORMATS.items() if each.table_group is not None)


def is_format(weights: object) -> TypeGuard[str]:
    """Whether there are records of that name: a format, or a mixture of GGUF's types."""
    try:
        return isinstance(weights, str) and FORMATS[weights] is not None
    except KeyError:
        return False


def is_passthrough(weights: str) -> bool:
    """Whether such records hold the codes of a quantized checkpoint, so that nothing is rounded to them."""
    return is_format(weights) and not FORMATS[weights].rounded


def formats_of_fewer_bits(weights: str) -> list[str]:
    """The formats that experts in ``weights`` can be rounded to in fewer bytes."""
    return [name for name in ROUNDED_FORMATS if FORMATS[name].bits < FORMATS[weights].bits]


def in_words(names: tuple[str, ...] | list[str], last: str = "and") -> str:
    """A list for a sentence: "int8, int4 and lut4"."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
