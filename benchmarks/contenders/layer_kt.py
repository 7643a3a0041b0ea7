"""kt-kernel on the layer of layer_peers.py. Runs in the peers' environment.

Its extension is loaded directly, in the variant that kt-kernel selects for this processor. The package itself needs
torch and a CUDA runtime, which the experts do not.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from layer import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, Array, Layer, Variant, bf16_bits, repeated, weights
from serve import serve

MAX_TOKENS = 512
# name -> (class, bytes per weight; scales are one per output row)
FORMS = {"int4": ("AMXInt4_MOE", 0.5), "int8": ("AMXInt8_MOE", 1.0), "bf16": ("AMXBF16_MOE", 2.0)}


def module_from(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def extension() -> ModuleType:
    found = importlib.util.find_spec("kt_kernel")
    if found is None or found.origin is None:
        raise SystemExit("kt-kernel is not installed")
    folder = Path(found.origin).parent
    cpu_variant = module_from("_cpu_detect", folder / "_cpu_detect.py").detect_cpu_features()
    [library] = folder.glob(f"_kt_kernel_ext_{cpu_variant}.*.so")
    return module_from("kt_kernel_ext", library)


@dataclass(frozen=True)
class Call:
    """The arguments of one forward, which keep their memory alive while it is used."""

    count: Array
    ids: Array
    weights: Array
    x: Array
    output: Array


def addresses(*arrays: Array) -> list[int]:
    return [array.ctypes.data for array in arrays]


def variant(kt: ModuleType, pool: Any, form: str, projections: list[Array]) -> Variant:
    class_name, bytes_per_weight = FORMS[form]
    config = kt.moe.MOEConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, 0)
    config.pool = pool.backend_
    config.max_len = MAX_TOKENS
    config.gate_proj, config.up_proj, config.down_proj = addresses(*projections)
    moe = getattr(kt.moe, class_name)(config)
    mapping = np.arange(EXPERTS)
    pool.submit(moe.load_weights_task(mapping.ctypes.data))
    pool.sync()

    def prepare(x: Array, ids: Array) -> Call:
        return Call(
            count=np.array([len(x)], dtype=np.int32),
            ids=ids.astype(np.int64),
            weights=np.full(ids.shape, 1 / TOP_K, dtype=np.float32),
            x=bf16_bits(x),
            output=np.zeros(x.shape, dtype=np.uint16),
        )

    def forward(call: Call) -> Array:
        count, *others = addresses(call.count, call.ids, call.weights, call.x, call.output)
        pool.submit(moe.forward_task(count, TOP_K, *others, False))
        pool.sync()
        return call.output

    def to_numpy(bits: Array) -> Array:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    return Variant(prepare, forward, to_numpy, int(bytes_per_weight * EXPERTS * 3 * HIDDEN * INTERMEDIATE))


def open_layer(setup: dict[str, Any]) -> Layer:
    kt = extension()
    workers = kt.WorkerPoolConfig()
    workers.subpool_count, workers.subpool_numa_map = 1, [0]
    workers.subpool_thread_count = [setup["threads"]]
    pool = kt.CPUInfer(workers)
    gate_up, down = (repeated(bf16_bits(distinct)) for distinct in weights(setup["seed"]))
    projections = [
        np.ascontiguousarray(gate_up[:, :INTERMEDIATE]),
        np.ascontiguousarray(gate_up[:, INTERMEDIATE:]),
        down,
    ]
    return Layer({form: variant(kt, pool, form, projections) for form in setup["forms"]}, setup["seed"])


if __name__ == "__main__":
    serve(open_layer)
