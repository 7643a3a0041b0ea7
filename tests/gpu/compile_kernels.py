"""Compiles every Triton kernel. No card is needed, for Triton includes ptxas. Run by test_triton_compiles.py.

Usage: compile_kernels.py [--frontend] CAPABILITY ...; prints a line for each kernel. Must not run under
TRITON_INTERPRET. With --frontend no machine code is made, which takes a second in place of minutes. That is enough to
find code that Triton's compiler refuses and its interpreter accepts.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import triton
from torch_mesh.ops import experts_triton, launches
from torch_mesh.ops import triton_kernels as kernels
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

import torch_mesh  # noqa: F401  registers the ops
from torch_mesh.formats import FORMATS

POINTERS = {
    **dict.fromkeys(("x", "activated", "out"), "*i16"),
    **dict.fromkeys(("partial", "products", "weights"), "*fp32"),
    **dict.fromkeys(("table", "records"), "*i32"),
    **dict.fromkeys(("ids", "order", "starts", "tile_experts", "tile_rows"), "*i64"),
}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2", "swiglu(gate=10,up=10)", "softcap(gate=4,up=25)")


def variants() -> list[tuple[Any, dict[str, Any], launches.Launch]]:
    """Every kernel in every format. Tiles with the most rows come in every group size, for they take the most shared
    memory."""
    found: list[tuple[Any, dict[str, Any], launches.Launch]] = []
    for index, (format, few) in enumerate(launches.FEW.items()):
        groups = FORMATS[format].group_sizes
        if format.endswith("_fp16"):
            groups = groups[:1]  # the other group sizes compile as for int8 and int4
        activation = ACTIVATIONS[index % len(ACTIVATIONS)]
        shape = {"FORMAT": format, "GROUP": groups[index % len(groups)]}
        gated = activation.startswith(("swiglu", "softcap")) or index % 3 != 2
        how = {"ACTIVATION": activation, "GATED": gated, "BIAS": index % 2 == 0}
        many, (least, *_, most) = launches.MANY[format], launches.TILE_ROWS[format]
        found += [
            (kernels.gate_up_few, shape | how | {"SPLITS": 1 + 3 * (index % 2), "STAGES": few.stages}, few),
            (kernels.gate_up_many, shape | how | {"ROWS": least}, many),
            (kernels.gate_up_many, shape | how | {"GATED": True, "ROWS": most}, many),
        ]
        apart = groups if format == "fp8" else groups[:1]  # fp8's scales are at another place for each group size
        found += [
            (kernels.down_few, {"FORMAT": format, "GROUP": each, "SPLITS": 1, "STAGES": few.stages}, few)
            for each in apart
        ]
        found += [
            (kernels.down_many, {"FORMAT": format, "GROUP": each, "BIAS": index % 2 == 0, "ROWS": most}, many)
            for each in groups
        ]
    for activation in ACTIVATIONS:
        split = {"ACTIVATION": activation, "GATED": True, "BIAS": True, "SPLITS": 4}
        found.append((kernels.activate_splits, split, launches.ELEMENTWISE))
    last = {
        "SPLITS": 3,
        "SENTINELS": False,
        "ADD": False,
        "BITS": True,
        "CHOICES": 8,
        "COLUMNS": launches.REDUCE_COLUMNS,
    }
    found.append((kernels.reduce, last, launches.ELEMENTWISE))
    return found


def source_of(kernel: Any, constants: dict[str, Any]) -> ASTSource:
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in kernel.arg_names}
    return ASTSource(kernel, signature, constants)


def fused_shuffles(ptx: str) -> list[str]:
    """Fused multiply-adds that add a shuffled value. With these each of two threads rounds the other's term and not its
    own."""
    shuffled = set(re.findall(r"shfl\.sync\.\S+\s+(%r\d+)", ptx))
    return [line for line in re.findall(r"fma\.\S+\s+.*", ptx) if shuffled & set(re.findall(r"%r\d+", line))]


def compile_for(capability: int) -> None:
    for kernel, constants, launch in variants():
        compiled = triton.compile(
            source_of(kernel, constants),
            target=GPUTarget("cuda", capability, 32),
            options=experts_triton._options(launch),
        )
        assert compiled.asm["cubin"]
        assert not fused_shuffles(compiled.asm["ptx"]), f"{kernel.__name__} {constants}: threads disagree on a sum"
        shared = compiled.metadata.shared
        print(capability, kernel.__name__, *constants.values(), f"{shared} bytes shared", flush=True)


def lower_for(capability: int) -> None:
    """Lower the kernels as far as triton.compile does before its first pass."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    for kernel, constants, launch in variants():
        options = backend.parse_options(experts_triton._options(launch))
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        made = backend.get_codegen_implementation(options), backend.get_module_map(), context
        assert source_of(kernel, constants).make_ir(target, options, *made).verify()
        print(capability, kernel.__name__, *constants.values(), flush=True)


if __name__ == "__main__":
    wanted = [argument for argument in sys.argv[1:] if argument != "--frontend"]
    for argument in wanted:
        (compile_for if len(wanted) == len(sys.argv) - 1 else lower_for)(int(argument))
