"""The experts that a model's tokens take: recorded, replayed in another model, and compared up to near ties.

A router of random weights often has two experts whose scores differ by less than a rounding. The choice between them
says nothing about what is tested, but it changes all later outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tiny_pools import as_bytes
from torch import Tensor, nn

from torch_mesh.models.families import Router, find_experts, ranking

# For each layer and each of its calls: the experts [tokens, top_k] and their weights.
Routes = list[list[tuple[Tensor, Tensor]]]


@contextmanager
def recorded_routes(model: nn.Module) -> Iterator[Routes]:
    routes: Routes = []
    handles = []
    for layer in find_experts(model):
        calls: list[tuple[Tensor, Tensor]] = []
        routes.append(calls)

        def before(_: Any, args: Any, kwargs: dict[str, Any], calls: list[Any] = calls) -> None:
            ids, weights = (*args, *kwargs.values())[1:3]
            calls.append((ids.clone(), weights.clone()))

        handles.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def given_routes(model: nn.Module, routes: Routes) -> Iterator[None]:
    """In this context the calls of each layer take the experts of ``routes`` in order, not those of the routers."""
    handles = []
    for layer, calls in zip(find_experts(model), routes, strict=True):
        left = iter(calls)

        def before(_: Any, args: Any, kwargs: dict[str, Any], left: Iterator[Any] = left) -> Any:
            hidden, _, weights = (*args, *kwargs.values())[:3]
            ids, recorded = next(left)
            return (hidden, ids, recorded.to(weights.dtype)), {}

        handles.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def misrouted(router: Router, hidden: Tensor, ids: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Bool [tokens, top_k] twice: which choices ``router`` does not rank first, and which of them are clear.

    A choice is clear if its score differs from that of the last chosen expert by more than rounding can move both.
    Rounded to bf16 are each factor of each product, and the score.
    """
    scores = ranking(hidden, router.weight, bias, router.scoring)
    moved = 2**-8 * (2 * hidden.float().abs() @ router.weight.float().abs().T + scores.abs())
    last = scores.topk(ids.size(-1)).indices[:, -1:]
    below = scores.gather(1, last) - scores.gather(1, ids)
    return below > 0, below > moved.gather(1, last) + moved.gather(1, ids)


def by_token(value: Tensor, expected: Tensor) -> Tensor:
    """The relative error of each row."""
    return (value - expected).norm(dim=-1) / expected.norm(dim=-1)


Run = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Computed:
    """A reference: the experts that a model chose in bf16, its output in float32 with these, and the median error of
    rows in bf16."""

    run: Run
    routes: Routes
    exact: Tensor
    rounding: float

    @classmethod
    def by(cls, model: nn.Module, run: Run) -> Computed:
        """The reference of the plain ``model``. ``run`` returns rows of it, or of a model that computes the same."""
        with recorded_routes(model) as routes:
            value = run(model).float()
        exact = copy.deepcopy(model).float()
        with given_routes(exact, routes):
            expected = run(exact).float()
        return cls(run, routes, expected, by_token(value, expected).median().item())

    def error(self, model: nn.Module) -> float:
        """The median error of rows of ``model``, with the same experts chosen."""
        with given_routes(model, self.routes):
            return by_token(self.run(model).float(), self.exact).median().item()

    def assert_same(self, model: nn.Module, moved: float = 0.0) -> None:
        """Check that ``model`` errs at most twice as much as bf16. ``moved``: the error of its other roundings."""
        allowed = 2 * (self.rounding + moved)
        assert self.error(model) < allowed, f"{self.error(model)} of {allowed} allowed"


def rounded_to_bytes(module: nn.Module) -> nn.Module:
    """A copy in float32 whose matrices have values of int8 in groups of 64."""
    copied = copy.deepcopy(module).float()
    for name, parameter in copied.named_parameters():
        if parameter.dim() > 1 and "bias" not in name:
            parameter.data = as_bytes(64)(parameter.data.flatten(0, -2).double()).view(parameter.shape).float()
    return copied


def assert_same_layer(module: Any, original: nn.Module, inputs: Sequence[Tensor], weights: str = "bf16") -> None:
    """Check that ``module`` rounds no more than ``original``, the same layer of transformers. ``weights`` is the format
    of ``module``, bf16 or int8.

    Where transformers computes in float32, the two roundings of ``module`` to bf16 are more than its one. In int8 the
    inputs of both products are rounded like the weights, and each adds an error of the same size.
    """
    hidden, ids, routing = inputs
    with torch.no_grad():
        expected = copy.deepcopy(original).float()(hidden.float(), ids, routing.float())
        moved = 0.0
        if weights == "int8":
            moved = (rounded_to_bytes(original)(hidden.float(), ids, routing.float()) - expected).norm()
        rounding = max((original(hidden, ids, routing.to(hidden.dtype)) - expected).norm(), 2**-8 * expected.norm())
        error = (module(hidden, ids, routing) - expected).norm()
    assert error < 1.25 * rounding + 2 * moved, f"{error} of {1.25 * rounding + 2 * moved} allowed"
