"""onnxruntime's QMoE on the layer of layer_peers.py. Runs in the peers' environment."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnxruntime
from layer import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, Array, Layer, Variant, repeated, weights
from onnx import TensorProto, helper
from serve import serve

# name -> (bits, values per scale along the input, MatMulNBits' accuracy level: 4 lets 4-bit experts take int8
# activations)
FORMS = {"int4, block 32": (4, 32, 0), "int4, block 32, int8 activations": (4, 32, 4), "int8, block 32": (8, 32, 0)}


def quantized(distinct: Array, bits: int, block: int) -> tuple[Array, Array]:
    """[n, out, in] -> unsigned values, two per byte in 4 bits, and float32 scales [n, out, in / block]."""
    count, out, depth = distinct.shape
    half = 1 << (bits - 1)
    blocks = distinct.reshape(count, out, depth // block, block)
    scale = np.abs(blocks).max(-1, keepdims=True) / (half - 1)
    values = (np.rint(blocks / scale).clip(-half, half - 1) + half).astype(np.uint8).reshape(count, out, depth)
    if bits == 4:
        values = values[..., 0::2] | values[..., 1::2] << 4
    return values, scale[..., 0].astype(np.float32)


def interleaved(gate_up: Array) -> Array:
    """Interleave rows as g0, u0, g1, u1 ..., the layout of the CPU provider's fused swiglu."""
    return np.stack((gate_up[:, :INTERMEDIATE], gate_up[:, INTERMEDIATE:]), 2).reshape(gate_up.shape)


def session(initializers: dict[str, Array], bits: int, block: int, accuracy: int, threads: int) -> Any:
    node = helper.make_node(
        "QMoE",
        ["x", "router", "gate_up", "gate_up_scales", "", "down", "down_scales"],
        ["y"],
        domain="com.microsoft",
        k=TOP_K,
        expert_weight_bits=bits,
        block_size=block,
        accuracy_level=accuracy,
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=1.0,
        activation_beta=0.0,
        normalize_routing_weights=1,
    )
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", HIDDEN]),
        helper.make_tensor_value_info("router", TensorProto.FLOAT, ["tokens", EXPERTS]),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["tokens", HIDDEN])
    tensors = [
        helper.make_tensor(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape, value.tobytes(), raw=True)
        for name, value in initializers.items()
    ]
    graph = helper.make_graph([node], "layer", inputs, [output], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def router_logits(ids: Array) -> Array:
    """Return logits whose softmax over the chosen experts is uniform."""
    logits = np.full((len(ids), EXPERTS), -10, dtype=np.float32)
    np.put_along_axis(logits, ids, 10, axis=1)
    return logits


def variant(bits: int, block: int, accuracy: int, distinct: tuple[Array, Array], threads: int) -> Variant:
    gate_up, gate_up_scales = map(repeated, quantized(interleaved(distinct[0]), bits, block))
    down, down_scales = map(repeated, quantized(distinct[1], bits, block))
    initializers = {
        "gate_up": gate_up,
        "gate_up_scales": gate_up_scales,
        "down": down,
        "down_scales": down_scales,
    }
    opened = session(initializers, bits, block, accuracy, threads)

    def prepare(x: Array, ids: Array) -> dict[str, Array]:
        return {"x": x, "router": router_logits(ids)}

    return Variant(
        prepare, partial(opened.run, None), lambda outputs: outputs[0], sum(a.nbytes for a in initializers.values())
    )


def open_layer(setup: dict[str, Any]) -> Layer:
    distinct = weights(setup["seed"])
    return Layer({name: variant(*form, distinct, setup["threads"]) for name, form in FORMS.items()}, setup["seed"])


if __name__ == "__main__":
    serve(open_layer)
