"""Small experts with known weights, the pools that serve them, and the float64 layer to compare with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from codes import pack_random_codes
from gguf import GGMLQuantizationType
from gguf_files import set_scales
from torch import Tensor

from torch_mesh import _C, _testing
from torch_mesh.formats import FORMATS, PASSTHROUGH_FORMATS
from torch_mesh.store.manifest import Shape, Store
from torch_mesh.store.store_plan import StorePlan
from torch_mesh.store.writer import write_store

ops = torch.ops.torch_mesh


def swigluoai(gate: Tensor, up: Tensor) -> Tensor:
    """The activation of GptOssExperts."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """The activation of DeepseekV4Experts, with limits that many values exceed."""
    return F.silu(gate.clamp(max=0.9)) * up.clamp(-0.7, 0.7)


def softcap(gate: Tensor, up: Tensor) -> Tensor:
    """The activation of Inkling2Experts."""
    return torch.tanh(gate / 1.5) * 1.5 * torch.sigmoid(gate) * torch.tanh(up / 2) * 2


# Each activation as a function of gate and up; an expert without a gate has up = 1.
ACTIVATIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu2": lambda gate, up: F.relu(gate).square() * up,
    "swigluoai": swigluoai,
    "swiglu(gate=0.9,up=0.7)": clamped,
    "softcap(gate=1.5,up=2)": softcap,
}

Operands = Callable[[Tensor], Tensor]


def as_bf16(rows: Tensor) -> Tensor:
    return rows.bfloat16().double()


def as_bytes(group_size: int) -> Operands:
    """Round to a byte per value. Each group's scale takes its largest magnitude to 127."""

    def operands(rows: Tensor) -> Tensor:
        columns = rows.size(1)
        groups = F.pad(rows, (0, -columns % group_size)).unflatten(1, (-1, group_size))
        scales = groups.abs().amax(2, keepdim=True).clamp(min=2.0**-100) / 127
        return ((groups / scales).round() * scales).flatten(1)[:, :columns]

    return operands


def cpu_operands(spec: Spec) -> Operands:
    """Return how the CPU's products with such weights round activations."""
    group_sizes = FORMATS[spec.weights].group_sizes
    group_size = group_sizes[0] if len(group_sizes) == 1 else spec.group_size
    return as_bf16 if spec.weights in FLOAT_PRODUCTS else as_bytes(group_size)


WEIGHTS = sorted(FORMATS)
FLOAT_PRODUCTS = ("bf16", "bf12", "fp8")  # other formats multiply bytes and add integers

# Values of torch.ops.torch_mesh.residency.
EMPTY, LOADING, READY = 0, 1, 2


def gguf_type(weights: str) -> GGMLQuantizationType | None:
    """Return the GGUF type of a format that holds a GGUF file's blocks; None for other formats."""
    return GGMLQuantizationType.__members__.get(weights.upper()) if weights not in ("bf16", "mxfp4", "nvfp4") else None


@dataclass(frozen=True)
class Spec:
    """Describes experts. Sizes are no multiples of 64, so that every comparison includes padding."""

    weights: str = "int8"
    group_size: int = 32
    layers: int = 1
    experts: int = 8
    hidden: int = 72
    intermediate: int = 40
    gated: bool = True
    bias: bool = False
    activation: str | None = "silu"
    activations: tuple[str, ...] = ()  # by layer, if they differ

    def __post_init__(self) -> None:
        """Round the sizes to whole blocks for GGUF's types."""
        if kind := gguf_type(self.weights):
            block, _ = gguf.GGML_QUANT_SIZES[kind]
            for name in ("hidden", "intermediate"):
                object.__setattr__(self, name, -(-getattr(self, name) // block) * block)

    @property
    def gate_up_features(self) -> int:
        return (2 if self.gated else 1) * self.intermediate

    @property
    def geometry(self) -> dict[str, Any]:
        names = ("group_size", "hidden", "intermediate", "gated", "bias")
        return {"format": self.weights, **{name: getattr(self, name) for name in names}}

    @property
    def record_layout(self) -> tuple[Any, ...]:
        """The arguments of ``unpack`` that follow the record."""
        return tuple(self.geometry.values())


class TinyExperts:
    """Random packed experts of every layer, and the unpacked weights of the records in float64.

    Scaled so that products are about as large as their inputs: errors are relative to outputs of about 1.
    """

    def __init__(self, spec: Spec, seed: int) -> None:
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        self.records = [[_random_record(spec, generator) for _ in range(spec.experts)] for _ in range(spec.layers)]
        self._store: Store | None = None

    @functools.cached_property
    def unpacked(self) -> list[list[tuple[Tensor, ...]]]:
        """gate_up, down and their biases by layer and expert."""
        layout = self.spec.record_layout
        return [[tuple(t.double() for t in ops.unpack(record, *layout)) for record in layer] for layer in self.records]

    def store(self, folder: Path) -> Store:
        """Return the records on disk; the first call writes them to ``folder``."""
        if self._store is None:
            spec = self.spec
            plan = StorePlan(
                shape=Shape(
                    spec.layers,
                    spec.experts,
                    1,
                    spec.hidden,
                    spec.intermediate,
                    spec.gated,
                    spec.bias,
                    spec.activations or spec.activation,
                ),
                modules=tuple(f"layers.{layer}.experts" for layer in range(spec.layers)),
                weights=spec.weights,
                group_size=spec.group_size
                if spec.group_size in FORMATS[spec.weights].group_sizes
                else FORMATS[spec.weights].group_sizes[0],
                source_name="tiny",
                source_fingerprint="tiny",
            )
            self._store = write_store(folder, plan, lambda layer, expert: self.records[layer][expert], workers=1).store
        return self._store

    def reference(
        self, x: Tensor, ids: Tensor, weights: Tensor, layer: int = 0, operands: Operands = lambda rows: rows
    ) -> Tensor:
        """The layer in float64, differentiable in ``x`` and ``weights``. Ids that are no expert add nothing.

        ``operands`` rounds each product's operands.
        """
        x, weights = x.double(), weights.double()
        out = torch.zeros_like(x)
        for expert in range(self.spec.experts):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            products = self.expert(x[token], expert, layer, operands) * weights[token, choice].unsqueeze(1)
            out = out.index_add(0, token, products)
        return out

    def expert(self, rows: Tensor, expert: int, layer: int = 0, operands: Operands = lambda rows: rows) -> Tensor:
        gate, *up = self.linear(operands(rows), expert, 0, layer).split(self.spec.intermediate, dim=1)
        activation = self.spec.activations[layer] if self.spec.activations else self.spec.activation
        assert activation is not None
        hidden = ACTIVATIONS[activation](gate, up[0] if up else 1)
        return self.linear(operands(hidden), expert, 1, layer)

    def linear(self, rows: Tensor, expert: int, projection: int, layer: int = 0) -> Tensor:
        gate_up, down, gate_up_bias, down_bias = self.unpacked[layer][expert]
        matrix, bias = ((gate_up, gate_up_bias), (down, down_bias))[projection]
        return F.linear(rows, matrix, bias if self.spec.bias else None)


class TinyPool:
    """An engine over TinyExperts."""

    def __init__(self, experts: TinyExperts, engine: _C.Engine) -> None:
        self.weights = experts
        self.spec = experts.spec
        self.engine = engine

    def handle(self, layer: int = 0) -> Tensor:
        return torch.tensor([self.engine.id, layer])

    def residency(self, layer: int = 0) -> list[int]:
        return ops.residency(self.handle(layer)).tolist()

    def ready(self, layer: int = 0) -> set[int]:
        return {expert for expert, state in enumerate(self.residency(layer)) if state == READY}

    def count(self, field: str, layer: int = 0) -> int:
        return int(self.engine.stats()[field][layer])

    def close(self) -> None:
        self.engine.close()


# The fixture: open_pool(spec, in_memory=False, **options of _C.Engine).
OpenPool = Callable[..., TinyPool]


def engine_options(spec: Spec, **options: Any) -> dict[str, Any]:
    """Arguments of _C.Engine, with all experts resident unless ``options`` say otherwise. ``faults`` are injected into
    its reads (``_testing.faults``)."""
    if faults := options.pop("faults", None):
        options["interpose"] = _testing.faults(**faults)
    defaults: dict[str, Any] = {
        "layers": spec.layers,
        "experts": spec.experts,
        "activation": spec.activations or spec.activation,
        "slots": spec.layers * spec.experts,
        "policy": "lru",
        "verify": "first",
        "io": "threads",
        "threads": 2,
        "workspace": 64 << 20,
        "timeout": 30.0,
    }
    return spec.geometry | defaults | options


def open_engine(experts: TinyExperts, source: _C.Source | None, **options: Any) -> _C.Engine:
    engine = _C.Engine(**engine_options(experts.spec, **options), source=source)
    if source is None:
        for layer, records in enumerate(experts.records):
            for expert, record in enumerate(records):
                engine.fill(layer, expert, record.numpy())
    return engine


def spec_with(spec: Spec, **fields: Any) -> Spec:
    return dataclasses.replace(spec, **fields)


def routing(spec: Spec, tokens: int, top_k: int, sentinels: bool = False) -> tuple[Tensor, Tensor]:
    """Return distinct experts per token, with ``sentinels`` among them, and weights that sum to one."""
    scores = torch.rand(tokens, spec.experts + (2 if sentinels else 0))
    ids = scores.topk(top_k, dim=1).indices
    return ids, torch.rand(tokens, top_k).softmax(dim=1)


def assert_agrees(
    out: Tensor,
    experts: TinyExperts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layer: int = 0,
    operands: Operands | None = None,
) -> None:
    """Assert that ``out`` is the layer with exact weights and rounded operands (by default rounded as on the CPU).

    The bound follows from the inputs. Sums in float32 may round an operand half way between two values to the other
    one.
    """
    rounded = experts.reference(x, ids, weights, layer, operands or cpu_operands(experts.spec))
    exact = experts.reference(x, ids, weights, layer)
    assert_rounded(out, rounded, exact, few=ids.numel() * experts.spec.intermediate < 1000)


def assert_rounded(out: Tensor, rounded: Tensor, exact: Tensor, *, few: bool) -> None:
    """Assert that ``out`` is ``rounded``, up to the order of float32 sums and its effect on the rounding of operands.

    The allowed distance is a multiple of that between ``rounded`` and ``exact``: 2.5 where ``few`` operands make the
    result, 1 where many do, since few of them lie half way.
    """
    allowed = (2.5 if few else 1.0) * (rounded - exact).norm() + 1e-5 * exact.norm()
    if out.dtype in (torch.bfloat16, torch.float16):
        allowed += torch.finfo(out.dtype).eps / 2 * rounded.norm()
    assert (out.double() - rounded).norm() <= allowed, f"{(out.double() - rounded).norm()} of {allowed} allowed"


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def _random_record(spec: Spec, generator: torch.Generator) -> Tensor:
    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5 * 1.5

    def bias(size: int) -> Tensor | None:
        return torch.randn(size, generator=generator) if spec.bias else None

    gate_bias = bias(spec.intermediate) if spec.gated else None
    biases = (gate_bias, bias(spec.intermediate), bias(spec.hidden))
    if kind := gguf_type(spec.weights):
        return _random_blocks(spec, kind, generator)
    if spec.weights in PASSTHROUGH_FORMATS:
        named = zip(("gate_bias", "up_bias", "down_bias"), biases, strict=True)
        return pack_random_codes(
            spec.weights,
            spec.group_size,
            spec.hidden,
            spec.intermediate,
            generator,
            std=(1.5 * spec.hidden**-0.5, 1.5 * spec.intermediate**-0.5),
            gated=spec.gated,
            biases={name: values for name, values in named if values is not None} if spec.bias else None,
        )
    gate = matrix(spec.intermediate, spec.hidden) if spec.gated else None
    up = matrix(spec.intermediate, spec.hidden)
    down = matrix(spec.hidden, spec.intermediate)
    return ops.pack(gate, up, down, *biases, spec.weights, spec.group_size)


def _random_blocks(spec: Spec, kind: GGMLQuantizationType, generator: torch.Generator) -> Tensor:
    """A record of random codes, with weights as large as in other formats."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    pieces, views = [], {}
    for name, rows, columns in (
        ("gate", spec.intermediate, spec.hidden),
        ("up", spec.intermediate, spec.hidden),
        ("down", spec.hidden, spec.intermediate),
    ):
        blocks = torch.randint(256, (rows * columns // values, size), dtype=torch.uint8, generator=generator).numpy()
        set_scales(kind.name, blocks, np.float16(1).view(np.uint16))
        scale = np.float16(1.5 * columns**-0.5 / gguf.dequantize(blocks.reshape(rows, -1), kind).std())
        set_scales(kind.name, blocks, scale.view(np.uint16))
        if name == "gate" and not spec.gated:
            continue
        views[name] = {"piece": len(pieces), "offset": 0, "order": "blocks", "row_bytes": columns // values * size}
        pieces.append(blocks.reshape(-1))
    layout = (spec.weights, spec.group_size, spec.hidden, spec.intermediate, spec.gated, False)
    return torch.frombuffer(_C.pack_raw(pieces, "bf16", views, *layout), dtype=torch.uint8)
