"""A server scores a prompt in parts, which changes no family's log-probabilities."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny_models import TINY_MODELS

from torch_mesh.serving import service
from torch_mesh.serving.service import Service


@pytest.mark.parametrize("name", ["JambaExperts", "MiniMaxExperts"])
def test_states_that_cannot_be_continued_are_not_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_SCORED_ROWS", 8)
    model = TINY_MODELS[name].build().float().eval()
    ids = torch.randint(3, 100, (1, 30))
    engine = SimpleNamespace(kept=SimpleNamespace(room=lambda prompt, other: nullcontext()))
    first, *found = Service("tiny", model, None, engine).score({"input_ids": ids}, 1)  # type: ignore[arg-type]
    with torch.no_grad():
        rows = model(input_ids=ids).logits[0].log_softmax(-1)
    assert first is None
    assert [each.token for each in found if each] == ids[0, 1:].tolist()
    expected = [float(row[token]) for row, token in zip(rows, ids[0, 1:].tolist(), strict=False)]
    assert [each.logprob for each in found if each] == pytest.approx(expected, abs=1e-4)
