"""Prefix cache of every family: its keys and states are saved to disk and restored, and the model continues with
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from routes import Routes, given_routes, recorded_routes
from tiny_models import TINY_MODELS
from torch import Tensor
from transformers import DynamicCache

from torch_mesh.hf import cache_state
from torch_mesh.hf.generation_compat import CACHE_NAME
from torch_mesh.hf.kv_cache import record_past
from torch_mesh.serving import prefix_cache
from torch_mesh.serving.prefix_cache import PrefixCache, unsupported_reason

BLOCK = 16  # tokens; small, for tiny models have 128 positions
TOLERANCE = 1e-3  # for sums in another order in float32


def _empty(model: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for layer in filter(cache_state.is_window, cache.layers):
        record_past(layer)
    return cache


def _forward(model: Any, tokens: Tensor, cache: DynamicCache | None = None) -> Tensor:
    """The output of ``tokens`` [n] after those in ``cache``, computed as generate does."""
    given: dict[str, Any] = {}
    if cache is not None:
        known = cache_state.length(cache) or 0
        given = {CACHE_NAME: cache, "attention_mask": torch.ones(1, known + len(tokens), dtype=torch.long)}
    output = model(input_ids=tokens[None], use_cache=cache is not None, **given)
    return output.logits[0] if "logits" in output else output.last_hidden_state[0]


def _recorded(model: Any, tokens: Tensor) -> tuple[Tensor, Routes]:
    with recorded_routes(model) as routes:
        return _forward(model, tokens), routes


def _of_tokens(routes: Routes, begin: int, end: int) -> Routes:
    """The experts of tokens [begin, end), which rounding could change."""
    return [[(ids[begin:end], weights[begin:end]) for ids, weights in calls] for calls in routes]


# Parts of models that need other calls, a model that also sees later tokens, and one whose tiny config has a window
# that it does not use.
_OTHERWISE = {
    "Qwen3OmniMoeTalkerTextExperts",
    "OpenAIPrivacyFilterExperts",
    "Qwen3OmniMoeThinkerTextExperts",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(TINY_MODELS.keys() - _OTHERWISE))
def test_a_family_continues_from_a_prefix_on_disk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "BLOCK", BLOCK)
    model = TINY_MODELS[name].build().float()
    if reason := unsupported_reason(model):
        pytest.skip(reason)
    tokens = torch.randint(3, 100, (90,))
    tokens[69] = 101
    prefixes = PrefixCache(model, 1 << 30)
    cache = _empty(model)
    with torch.no_grad():
        expected, routes = _recorded(model, tokens)
        checkpoints = prefixes.checkpoints(tokens[:70], 0, cache)
        with given_routes(model, _of_tokens(routes, 0, 70)):
            found = _forward(model, tokens[:70], cache)
        states = {} if checkpoints is None else checkpoints.finish()
        scale = TOLERANCE * expected.abs().max()
        assert (found - expected[:70]).abs().max() <= scale
        prefixes.save(tokens[:70], cache, states)
        prefixes.flush()
        other = torch.cat([tokens[:69], tokens[80:]])  # differs within the last block
        for prompt, length in ((tokens, 70), (other, 64 if states or checkpoints is None else 0)):
            restored = _empty(model)
            assert prefixes.restore(prompt, restored) == length
            if length:
                expected, routes = _recorded(model, prompt)
                with given_routes(model, _of_tokens(routes, length, len(prompt))):
                    rest = _forward(model, prompt[length:], restored)
                assert (rest - expected[length:]).abs().max() <= scale
    prefixes.close()
