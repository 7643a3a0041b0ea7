"""The formats of weights: what each one is, and what can be done with it. Torch-free.

To add a format, add a row to ``FORMATS``. csrc/store/record.h has the layouts; tests/store/test_formats.py compares the
extension with this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GROUP_SIZES = (32, 64, 128)  # allowed for MeshConfig.group_size

# Relative RMS of the rounding error of fp16 or fp32 values in bf16, and of such scales in bf16 (benchmarks/weight_error.py).
BF16_ERROR = 0.0017
SCALES_ERROR = 0.0016


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """One format of weights. ``experts``, ``grouped_linear`` and their gradients take every format.

    ``version`` is that of the packed layout, which a store's manifest states. ``bits`` is the size of one weight's code.
    ``scale_bits`` is the size of the scale that precedes each group's codes; 0 where scales are in the header of a block
    of columns, or where there are none. ``group_sizes`` are the weights that share a scale; 0 means one scale for each
    output, or none.

    ``errors`` is the relative RMS error of Gaussian weights by group size. It is empty for a format that holds the codes
    of a quantised checkpoint unchanged: no weights are rounded to it.

    ``dense`` is whether linear layers outside the experts can have the format, ``calibrated`` whether ``pack_calibrated``
    packs it, ``codes`` whether a record of it can be made of a checkpoint's own codes, and ``gpu`` whether the Triton
    kernels compute with it. ``trellis`` formats have codes that depend on their neighbours.

    ``matrices`` names the formats of gate_up and down in a record that has two.
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
    gpu: bool = True
    matrices: tuple[str, str] | None = None

    @property
    def rounded(self) -> bool:
        """Whether weights can be rounded to it."""
        return bool(self.errors)

    @property
    def chosen_groups(self) -> bool:
        """Whether ``MeshConfig.group_size`` applies to its records."""
        return self.group_sizes == GROUP_SIZES


# Errors of formats that weights are rounded to: benchmarks/weight_error.py.
FORMATS: Mapping[str, WeightFormat] = {
    "bf16": WeightFormat(
        version=1,
        bits=16,
        group_sizes=(0,),
        errors={0: 0.0},  # of bf16 weights; BF16_ERROR for others
        dense=True,
        description="as in most checkpoints",
    ),
    "int8": WeightFormat(
        version=2,  # version 1 had weight sums
        bits=8,
        scale_bits=16,
        errors={32: 0.0050, 64: 0.0057, 128: 0.0063},
        dense=True,
        calibrated=True,
        codes=True,
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
        description="the same",
    ),
    "lut4": WeightFormat(
        version=1,
        bits=4,
        scale_bits=16,
        errors={32: 0.069, 64: 0.078, 128: 0.085},
        dense=True,
        calibrated=True,
        description="sixteen uneven levels, a zero per group",
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
        bits=7 / 3,  # of a gated expert, of which gate_up is two thirds
        scale_bits=16,
        errors={32: 0.232, 64: 0.234, 128: 0.236},  # of a gated expert
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
}
ROUNDED_FORMATS = tuple(name for name, each in FORMATS.items() if each.rounded)
PASSTHROUGH_FORMATS = tuple(name for name, each in FORMATS.items() if not each.rounded)
DENSE_FORMATS = tuple(name for name, each in FORMATS.items() if each.dense)
CALIBRATED_FORMATS = tuple(name for name, each in FORMATS.items() if each.calibrated)


def formats_of_fewer_bits(weights: str) -> list[str]:
    """The formats that experts in ``weights`` can be rounded to in fewer bytes."""
    return [name for name in ROUNDED_FORMATS if FORMATS[name].bits < FORMATS[weights].bits]


def in_words(names: tuple[str, ...] | list[str], last: str = "and") -> str:
    """A list for a sentence: "int8, int4 and lut4"."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
