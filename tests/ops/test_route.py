"""route: a selection biased towards resident experts, within the given limits."""

from __future__ import annotations

import pytest
import torch
from tiny_pools import OpenPool, Spec, TinyPool, ops
from torch import Tensor

from torch_mesh import _C

SPEC = Spec(layers=2, experts=16)
TOP_K = 4


@pytest.fixture
def pool(open_pool: OpenPool) -> TinyPool:
    pool = open_pool(SPEC)
    ops.promote(pool.handle(), torch.randperm(SPEC.experts)[: SPEC.experts // 2])
    return pool


def _with_bonus(scores: Tensor, ids: Tensor, ready: set[int], bias: float, kept: int) -> list[set[int]]:
    """The definition: topk of the scores plus the bonus, with the first ``kept`` choices always included."""
    chosen = []
    for row, choice in zip(scores.double(), ids, strict=True):
        lifted = row.clone()
        for expert in range(len(row)):
            if expert in ready:
                lifted[expert] += bias * (row.max() - row.min())
        first = choice[row[choice].argsort(descending=True)][:kept]
        lifted[first] = torch.inf
        chosen.append(set(lifted.topk(len(choice)).indices.tolist()))
    return chosen


@pytest.mark.parametrize("bias", [0.0, 0.03, 0.2, 1.0])
@pytest.mark.parametrize("kept", [0, 1, TOP_K])
def test_route_is_topk_of_scores_with_a_bonus(pool: TinyPool, bias: float, kept: int) -> None:
    scores = torch.randn(12, SPEC.experts) + 5
    ids = scores.topk(TOP_K).indices
    given = ids.clone()
    routed = ops.route(scores, ids, pool.handle(), bias, kept)
    assert torch.equal(ids, given)
    assert [set(row) for row in routed.tolist()] == _with_bonus(scores, ids, pool.ready(), bias, kept)
    stayed = routed == ids
    assert set(routed[~stayed].tolist()) <= pool.ready() and not set(ids[~stayed].tolist()) & pool.ready()
    assert pool.count("rerouted") == (~stayed).sum() and pool.count("accesses") == SPEC.experts // 2
    if bias == 1 and kept == 0:
        assert set(routed.flatten().tolist()) <= pool.ready()
    if bias == 0 or kept == TOP_K:
        assert stayed.all()


def test_all_or_none_resident_changes_nothing(pool: TinyPool) -> None:
    scores = torch.rand(5, SPEC.experts)
    ids = scores.topk(TOP_K, sorted=False).indices
    assert torch.equal(ops.route(scores, ids, pool.handle(1), 1.0, 0), ids)
    ops.promote(pool.handle(1), torch.arange(SPEC.experts))
    assert torch.equal(ops.route(scores, ids, pool.handle(1), 1.0, 0), ids)


@pytest.mark.parametrize("mask", [0.0, -torch.inf])
def test_masked_groups_stay_masked(pool: TinyPool, mask: float) -> None:
    allowed = torch.arange(SPEC.experts) < 8
    scores = (torch.rand(8, SPEC.experts) + 0.1).masked_fill(~allowed, mask)
    routed = ops.route(scores, scores.topk(TOP_K).indices, pool.handle(), 1.0, 0)
    assert routed.max() < 8
    assert all(len(set(row)) == TOP_K for row in routed.tolist())


def test_prompts_and_nan_scores_are_left_alone(pool: TinyPool) -> None:
    rows = _C.MAX_DECODE_ROWS + 1
    scores = torch.randn(rows, SPEC.experts)
    ids = scores.topk(TOP_K).indices
    assert torch.equal(ops.route(scores, ids, pool.handle(), 1.0, 0), ids)
    scores = torch.full((2, SPEC.experts), torch.nan)
    ids = torch.arange(2 * TOP_K).view(2, TOP_K)
    assert torch.equal(ops.route(scores, ids, pool.handle(), 1.0, 0), ids)
    assert ops.route(scores[:0], ids[:0].int(), pool.handle(), 1.0, 0).shape == (0, TOP_K)


def test_route_compiles(pool: TinyPool) -> None:
    def run(scores: Tensor, handle: Tensor) -> tuple[Tensor, Tensor]:
        ids = ops.route(scores, scores.topk(TOP_K).indices, handle, 0.5, 1)
        return scores.gather(-1, ids), ids

    scores = torch.rand(3, SPEC.experts)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for ready in (SPEC.experts // 2, 2):
        ops.evict(pool.handle(), torch.tensor(sorted(pool.ready())[ready:], dtype=torch.long))
        for value, expected in zip(compiled(scores, pool.handle()), run(scores, pool.handle()), strict=True):
            assert torch.equal(value, expected)


def test_wrong_arguments(pool: TinyPool) -> None:
    scores, ids = torch.rand(3, SPEC.experts), torch.arange(12).view(3, 4)
    for arguments, message in (
        ((scores[:, 1:], ids, pool.handle(), 0.5, 1), r"scores must be \[tokens, experts=16\]"),
        ((scores, ids[:2], pool.handle(), 0.5, 1), r"topk_ids must be \[tokens=3, k\]"),
        ((scores, ids, pool.handle(), 1.5, 1), "bias is 1.5; allowed: 0 to 1"),
        ((scores, ids, pool.handle(), 0.5, 5), "kept is 5; allowed: 0 to k = 4"),
        ((scores, ids.float(), pool.handle(), 0.5, 1), "topk_ids has dtype Float; allowed: int64, int32"),
        ((scores, ids.bool(), pool.handle(), 0.5, 1), "topk_ids has dtype Bool; allowed: int64, int32"),
        ((scores, ids + 8, pool.handle(), 0.5, 1), "expert id 16 of token 2, choice 0 is outside"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.route(*arguments)
