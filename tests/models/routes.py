"""Which experts a model's tokens take: recorded, taken again by another model, and compared but for near ties.

A router of random weights often has two experts whose scores differ by less than a rounding. Which of them a token takes
then says nothing about what is tested, and changes all that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from torch_mesh.families import Router, find_experts, ranking

# By layer, of each call: the experts [tokens, top_k] and their weights.
Routes = list[list[tuple[Tensor, Tensor]]]


@contextmanager
def recorded_routes(model: nn.Module) -> Iterator[Routes]:
    routes: Routes = []
    handles = []
    for layer in find_experts(model):
        calls: list[tuple[Tensor, Tensor]] = []
        routes.append(calls)

        def before(_: Any, given: Any, named: dict[str, Any], calls: list[Any] = calls) -> None:
            ids, weights = (*given, *named.values())[1:3]
            calls.append((ids.clone(), weights.clone()))

        handles.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def given_routes(model: nn.Module, routes: Routes) -> Iterator[None]:
    """Within it the calls of each layer take the experts of ``routes`` in their order, whatever the routers choose."""
    handles = []
    for layer, calls in zip(find_experts(model), routes, strict=True):
        left = iter(calls)

        def before(_: Any, given: Any, named: dict[str, Any], left: Iterator[Any] = left) -> Any:
            hidden, _, weights = (*given, *named.values())[:3]
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

    A choice is clear if its score is farther from that of the last to be chosen than rounding can move both: a rounding of
    each factor of each product to bf16, and one of the score.
    """
    scores = ranking(hidden, router.weight, bias, router.scoring)
    moved = 2**-8 * (2 * hidden.float().abs() @ router.weight.float().abs().T + scores.abs())
    last = scores.topk(ids.size(-1)).indices[:, -1:]
    below = scores.gather(1, last) - scores.gather(1, ids)
    return below > 0, below > moved.gather(1, last) + moved.gather(1, ids)


def by_token(value: Tensor, expected: Tensor) -> Tensor:
    """The relative error of each row."""
    return (value - expected).norm(dim=-1) / expected.norm(dim=-1)
