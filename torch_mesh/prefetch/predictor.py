"""Routers fitted for lookahead by ``torch-mesh routing fit``, and their file. docs/predictor.md describes both."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_mesh.errors import MeshError
from torch_mesh.models.families import ExpertsLayer, Router, check_recordable, find_experts, find_router, ranking
from torch_mesh.store.header import encode_header, read_header, store_error
from torch_mesh.system.atomic_files import new_file
from torch_mesh.system.memory import shortage

FORMAT = "torch_mesh predictor 1"
# Weight of the initial router, in tokens per hidden channel: docs/decisions/0024.
_RIDGE = 0.3
_FETCHED = (1.0, 1.5, 2.0)  # times top_k: where recall is measured


@dataclass(frozen=True)
class Predictor:
    """``weights[l]``, bfloat16 [experts, hidden], predicts the experts of MoE layer ``l`` from the input of the
    previous MoE layer's experts; for the first layer, from that of the last layer one token earlier. Biases are the
    router's own.

    ``identity`` names the model that it was fitted to, see ``identity_of``.
    """

    identity: str
    weights: tuple[torch.Tensor, ...]

    def check_model(self, model: nn.Module, layers: Sequence[ExpertsLayer], path: str | os.PathLike[str]) -> None:
        """Raises MeshError unless ``model`` is the one that this was fitted to. ``path`` is for the message."""
        if self.identity != identity_of(model, layers):
            raise MeshError(
                f"{path} was fitted to another model than this {type(model).__name__}: fit one with torch-mesh "
                "routing fit."
            )


@dataclass(frozen=True)
class FittedRouter:
    """Replaces the next layer's router for lookahead.

    ``own``: the router whose logits ``weight`` predicts, which gives bias and scoring; None for weights that were
    fitted to chosen experts.
    """

    weight: torch.Tensor
    own: Router | None

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self.own is None else self.own.bias

    @property
    def scoring(self) -> str:
        return "logits" if self.own is None else self.own.scoring


def fitted_routers(
    model: nn.Module, layers: Sequence[ExpertsLayer], weights: Sequence[torch.Tensor]
) -> list[FittedRouter]:
    """Fitted routers of all ``layers`` from the ``weights`` of a predictor."""
    return [FittedRouter(weight, own) for weight, own in zip(weights, _regressed(model, layers), strict=True)]


def _regressed(model: nn.Module, layers: Sequence[ExpertsLayer]) -> list[Router | None]:
    """The routers whose logits are fitted; None for layers that are fitted to chosen experts."""
    return [find_router(model, layer) if index else None for index, layer in enumerate(layers)]


def identity_of(model: nn.Module, layers: Sequence[ExpertsLayer]) -> str:
    """A digest of the sizes and routers of ``model``, which is independent of the format of its experts."""
    digest = hashlib.blake2b(digest_size=16)
    for layer in layers:
        digest.update(f"{layer.routed_experts} {layer.hidden} {layer.top_k};".encode())
        router: Any = find_router(model, layer)
        if router is not None:
            weight = router.weight.detach().to("cpu", torch.bfloat16).contiguous()
            digest.update(weight.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fit(model: nn.Module, sequences: Iterable[torch.Tensor]) -> Predictor:
    """Fit a predictor to ``model`` on ``sequences``, each a tensor of token ids [tokens].

    Ridge regression of each layer's router logits on the hidden states one layer before, regularized towards the
    layer's own router. (arXiv 2511.10676 trains such a matrix by gradient descent.) Takes 4 * layers * hidden * (hidden
    + experts) bytes of memory. docs/predictor.md has the method.

    Raises UnsupportedModelError for a model without supported experts, MeshError for hidden states that are not finite
    and sequences without two tokens in a row, MemoryError if the sums do not fit.
    """
    layers = find_experts(model)
    needed = sum(4 * layer.hidden * (layer.hidden + layer.routed_experts) for layer in layers)
    if (left := shortage(needed)) is not None:
        raise MemoryError(
            f"Fitting takes {needed:,} bytes beside the model, but {left:,} are left: open the model with a smaller "
            "resident."
        )
    sums = [_Sums(*pair) for pair in zip(layers, _regressed(model, layers), strict=True)]
    for seen in _routing(model, layers, sequences):
        for index, layer_sums in enumerate(sums):
            layer_sums.add(*_prediction_pairs(seen, index))
    return Predictor(identity_of(model, layers), tuple(layer_sums.solve() for layer_sums in sums))


@dataclass(frozen=True)
class Recall:
    """Fractions of a layer's used experts that were among the ``fetched`` best predictions; None without a
    prediction."""

    layer: int
    fetched: tuple[int, ...]  # k, 1.5 k and 2 k
    fitted: tuple[float, ...]
    lookahead: tuple[float, ...] | None  # the same for the next layer's own router


def recall(model: nn.Module, predictor: Predictor, sequences: Iterable[torch.Tensor]) -> list[Recall]:
    """Per layer, the recall of the predictor and of plain lookahead on ``sequences``."""
    layers = find_experts(model)
    counts = [
        _Hits(layer, router)
        for layer, router in zip(layers, fitted_routers(model, layers, predictor.weights), strict=True)
    ]
    for seen in _routing(model, layers, sequences):
        for index, hits in enumerate(counts):
            hits.add(*_prediction_pairs(seen, index))
    if not counts[0].asked:
        raise MeshError("The text for measuring recall has no two tokens in a row: give more text.")
    return [hits.recall(index) for index, hits in enumerate(counts)]


def save_predictor(predictor: Predictor, path: str | os.PathLike[str]) -> None:
    """Write a predictor atomically."""
    tensors = [
        (_name(index), "BF16", tuple(weight.shape), weight.nbytes) for index, weight in enumerate(predictor.weights)
    ]
    with new_file(path) as file:
        file.write(encode_header(tensors, {"format": FORMAT, "model": predictor.identity}))
        for weight in predictor.weights:
            file.write(weight.contiguous().view(torch.uint8).numpy().tobytes())


def load_predictor(path: str | os.PathLike[str], layers: Sequence[ExpertsLayer]) -> Predictor:
    """Read a predictor for ``layers``; ``Predictor.check_model`` checks the model itself.

    Raises StoreError for an unreadable or invalid file.
    """
    header = read_header(path)
    if header.metadata.get("format") != FORMAT:
        raise store_error(
            path,
            f"its format is {header.metadata.get('format')!r}, not {FORMAT!r}: make it with torch-mesh routing fit",
        )
    expected = {_name(index): (layer.routed_experts, layer.hidden) for index, layer in enumerate(layers)}
    found = {tensor.name: tensor.shape for tensor in header.tensors.values() if tensor.dtype == "BF16"}
    if found != expected or len(header.tensors) != len(expected):
        raise store_error(
            path,
            f"it has {len(header.tensors)} tensors, {_first(found)}, but the model needs {len(expected)} in BF16, "
            f"{_first(expected)}: it was fitted to another model",
        )
    weights = []
    with open(path, "rb") as file:
        for name, shape in expected.items():
            tensor = header.tensors[name]
            file.seek(tensor.offset)
            data = bytearray(file.read(tensor.bytes))
            if len(data) < tensor.bytes:
                raise store_error(path, f"shrank while it was read: tensor {name!r} is cut short", tensor.offset)
            weight = torch.frombuffer(data, dtype=torch.bfloat16).view(shape)
            if not weight.isfinite().all():
                raise store_error(path, f"tensor {name!r} has values that are not finite", tensor.offset)
            weights.append(weight)
    return Predictor(header.metadata.get("model", ""), tuple(weights))


def _name(layer: int) -> str:
    return f"layers.{layer}"


def _first(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return next((f"{name} of {list(shape)}" for name, shape in shapes.items()), "none in BF16")


# Inputs of each layer's experts, [tokens, hidden], and their ids, [tokens, k]
_Seen = Sequence[tuple[torch.Tensor, torch.Tensor]]


def _routing(model: Any, layers: Sequence[ExpertsLayer], sequences: Iterable[torch.Tensor]) -> Iterator[_Seen]:
    """Run each sequence and yield the inputs and ids of its layers."""
    check_recordable(layers)
    seen: list[Any] = [None] * len(layers)
    # Logits of all tokens would take longer than some layers do.
    fewest = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def hook(index: int) -> Any:
        def keep(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden, ids = [*arguments, *named.values()][:2]
            seen[index] = (hidden.to("cpu", copy=True), ids.to("cpu", torch.int64, copy=True))

        return keep

    handles = [
        layer.module.register_forward_pre_hook(hook(index), with_kwargs=True) for index, layer in enumerate(layers)
    ]
    try:
        for tokens in sequences:
            with torch.no_grad():
                model(input_ids=tokens.unsqueeze(0).to(model.device), use_cache=False, **fewest)
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _prediction_pairs(seen: _Seen, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each token: the hidden states that predict ``layer``, its own, and the experts that it used."""
    (hidden, ids), before = seen[layer], seen[layer - 1][0].float()
    return (before, hidden.float(), ids) if layer else (before[:-1], hidden[1:].float(), ids[1:])


class _Sums:
    """Normal equations of one layer's regression, summed over tokens."""

    def __init__(self, layer: ExpertsLayer, router: Router | None) -> None:
        self.layer = layer
        self.router = None if router is None else router.weight.detach().float().cpu()
        self.tokens = 0
        self.gram = torch.zeros(layer.hidden, layer.hidden)
        self.products = torch.zeros(layer.hidden, layer.routed_experts)

    def add(self, x: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor) -> None:
        # The target is the error of the layer's own router on these hidden states, without bias.
        target = (hidden - x) @ self.router.T if self.router is not None else self.chosen(ids)
        self.tokens += len(x)
        self.gram.addmm_(x.T, x)
        self.products.addmm_(x.T, target)

    def chosen(self, ids: torch.Tensor) -> torch.Tensor:
        experts = self.layer.routed_experts
        used = torch.zeros(len(ids), experts + 1).scatter_(1, ids.clamp(max=experts), 1.0)  # the last: sentinels
        return used[:, :experts]

    def solve(self) -> torch.Tensor:
        gram = self.gram.double()
        scale = gram.diagonal().mean() / max(1, self.tokens)
        if not 0 < scale < float("inf"):
            raise MeshError(
                f"Nothing can be fitted to {self.layer.path}: its hidden states are all 0 or not finite, or there are "
                "no two tokens in a row."
            )
        gram.diagonal().add_(_RIDGE * self.layer.hidden * scale)
        weight = torch.linalg.solve(gram, self.products.double()).T
        return (weight if self.router is None else weight + self.router).to(torch.bfloat16)


class _Hits:
    def __init__(self, layer: ExpertsLayer, router: FittedRouter) -> None:
        self.router = router
        self.fetched = tuple(min(math.ceil(layer.top_k * times), layer.routed_experts) for times in _FETCHED)
        self.fitted = [0] * len(_FETCHED)
        self.lookahead = [0] * len(_FETCHED)
        self.asked = 0

    @torch.no_grad()
    def add(self, x: torch.Tensor, _: torch.Tensor, ids: torch.Tensor) -> None:
        self.asked += ids.numel()
        for counts, router in ((self.fitted, self.router), (self.lookahead, self.router.own)):
            if router is None:
                continue
            ranked = ranking(x, router.weight, router.bias, router.scoring).topk(self.fetched[-1]).indices
            found = ranked.unsqueeze(1) == ids.unsqueeze(2)  # [tokens, k, fetched]
            for index, fetched in enumerate(self.fetched):
                counts[index] += int(found[..., :fetched].sum())

    def recall(self, layer: int) -> Recall:
        def rates(counts: list[int]) -> tuple[float, ...]:
            return tuple(count / self.asked for count in counts)

        lookahead = None if self.router.own is None else rates(self.lookahead)
        return Recall(layer, self.fetched, rates(self.fitted), lookahead)
