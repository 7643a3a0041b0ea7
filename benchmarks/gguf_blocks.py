"""Random blocks of GGUF's types: uniform codes, and scales that make weights of a given standard deviation."""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

# Offsets in a block of d, and of dmin or m, each fp16. IQ1_M has d in parts.
D_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}
DMIN_AT = {"Q2_K": 82, "Q4_K": 2, "Q5_K": 2, "Q4_1": 2, "Q5_1": 2}
SAMPLE = 512  # blocks


def random_blocks(kind: str, count: int, std: float, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return uint8 [count, bytes of a block]."""
    d, dmin = _scales(kind)
    return _blocks(kind, count, std * d, std * dmin, generator)


@cache
def _scales(kind: str) -> tuple[float, float]:
    """Return d and dmin that give weights a standard deviation of 1 and, in types with mins, a mean of 0."""
    if kind == "IQ1_M":
        return 0.0, 0.0  # have no effect

    def sample(d: float, dmin: float) -> npt.NDArray[np.float32]:
        blocks = _blocks(kind, SAMPLE, d, dmin, np.random.default_rng(0))
        return gguf.dequantize(blocks, GGMLQuantizationType[kind])

    ratio = 0.0
    if kind in DMIN_AT:
        ratio = -float(sample(1.0, 0.0).mean() / sample(0.0, 1.0).mean())
    deviation = float(sample(1.0, ratio).std())
    return 1 / deviation, ratio / deviation


def _blocks(kind: str, count: int, d: float, dmin: float, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = np.frombuffer(generator.bytes(count * size), np.uint8).reshape(count, size).copy()
    if kind == "IQ1_M":
        blocks[:, 55] = blocks[:, 55] & 0x0F | 0x20  # the exponent of d
        return blocks
    scales = {D_AT.get(kind, 0): d} | ({DMIN_AT[kind]: dmin} if kind in DMIN_AT else {})
    for at, scale in scales.items():
        blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks
