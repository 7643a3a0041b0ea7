"""Call llama.cpp's quantizers in the library that peers.sh installs."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt
import synthetic

# enum ggml_type of ggml.h. Files depend on it, so it does not change.
TYPES = {
    "Q4_0": 2,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "IQ2_XXS": 16,
    "IQ2_XS": 17,
    "IQ3_XXS": 18,
    "IQ4_NL": 20,
    "IQ3_S": 21,
    "IQ2_S": 22,
    "IQ4_XS": 23,
}
NEED_IMPORTANCE = ("IQ2_XXS", "IQ2_XS")  # without a matrix these end the process


def _suffix(name: str) -> str:
    return f"q{name[1]}_K" if name.endswith("_K") else name.lower()


@cache
def _library() -> ctypes.CDLL:
    found = sorted(synthetic.PEERS_PYTHON.parents[1].glob("lib/python*/site-packages/llama_cpp/lib/libggml-base.so"))
    if not found:
        raise FileNotFoundError("llama.cpp's library is not installed; run benchmarks/peers.sh")
    library = ctypes.CDLL(str(found[0]))
    library.ggml_row_size.restype = ctypes.c_size_t
    library.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    return library


def round_trip(
    name: str, weights: npt.NDArray[np.float32], importance: npt.NDArray[np.float32] | None
) -> tuple[npt.NDArray[np.float32], float]:
    """``weights`` [rows, columns] through type ``name`` and back, and its bits per weight.

    ``importance`` [columns] weighs the columns' squared errors, as an importance matrix does.
    """
    library = _library()
    rows, columns = weights.shape
    weights = np.ascontiguousarray(weights, dtype=np.float32)
    packed = np.zeros(rows * library.ggml_row_size(TYPES[name], columns), dtype=np.uint8)
    if importance is not None:
        importance = np.ascontiguousarray(importance, dtype=np.float32)
        if importance.shape != (columns,):
            raise ValueError(f"importance has shape {importance.shape}; weights have {columns} columns")
    pointer = None if importance is None else importance.ctypes.data
    written = library.ggml_quantize_chunk(
        TYPES[name], weights.ctypes.data, packed.ctypes.data, 0, rows, columns, pointer
    )
    if written != packed.nbytes:
        raise RuntimeError(f"{name}: {written} bytes written, {packed.nbytes} expected")
    back = np.empty_like(weights)
    dequantize = getattr(library, f"dequantize_row_{_suffix(name)}")
    dequantize.restype = None
    dequantize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    dequantize(packed.ctypes.data, back.ctypes.data, weights.size)
    return back, 8 * packed.nbytes / weights.size
