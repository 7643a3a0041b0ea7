"""Caches of keys and values that grow in place. They give what transformers' caches give, and never change tensors that
a caller holds."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_MODELS
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import torch_mesh
from torch_mesh.hf.kv_cache import GrowingLayer
from torch_mesh.modules import experts as modules
from torch_mesh.speculation.rewinding import Rewinding

QWEN, OSS = "Qwen3MoeExperts", "GptOssExperts"


def _states(tokens: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Random keys and values. Their last dimensions differ, as in DeepSeek."""
    return torch.randn(batch, 3, tokens, 8).to(dtype), torch.randn(batch, 3, tokens, 5).to(dtype)


def _held(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values


def _same(layer: Any, other: Any) -> bool:
    pairs = zip(_held(layer), _held(other), strict=True)
    return all(own.dtype == theirs.dtype and torch.equal(own, theirs) for own, theirs in pairs)


# The reset of transformers 5.17 fills the old keys with zeros, and new ones are appended to them.
RESET_DROPS = "reset" in vars(DynamicLayer)


def _patched() -> PreTrainedModel:
    return torch_mesh.patch(TINY_MODELS[QWEN].build(), resident=0.5)


@torch.no_grad()
def test_any_order_of_calls_gives_the_results_of_transformers(rng: Any) -> None:
    own, theirs = GrowingLayer(), DynamicLayer()
    seen: list[tuple[Tensor, Tensor]] = []
    for _ in range(300):
        batch = own.keys.shape[0] if own.is_initialized and own.keys.dim() == 4 else 2
        call = rng.choice(["update"] * 8 + ["crop", "reorder", "repeat", "select", "reset"])
        if call == "update" or not own.is_initialized:
            states = _states(int(rng.choice([1, 1, 1, 2, 16, 150])), batch)
            given, expected = own.update(*states), theirs.update(*states)
            assert all(torch.equal(*pair) for pair in zip(given, expected, strict=True))
        elif call == "crop" and own.get_seq_length() > 3:
            for layer in (own, theirs):
                layer.crop(-3)
        elif call == "reorder":
            order = torch.randint(batch, (batch,))
            for layer in (own, theirs):
                layer.reorder_cache(order)
        elif call == "repeat" and batch < 8:
            for layer in (own, theirs):
                layer.batch_repeat_interleave(2)
        elif call == "select":
            for layer in (own, theirs):
                layer.batch_select_indices(torch.arange(batch)[: max(1, batch // 2)])
        elif call == "reset" and RESET_DROPS and len(seen) % 7 == 0:
            for layer in (own, theirs):
                layer.reset()
            continue
        assert _same(own, theirs), call
        assert own.get_seq_length() == theirs.get_seq_length()
        seen.append((own.keys, theirs.keys.clone()))
    assert all(torch.equal(held, as_it_was) for held, as_it_was in seen), "what was held has changed"


@torch.no_grad()
def test_a_token_is_appended_in_place() -> None:
    layer = GrowingLayer()
    layer.update(*_states(20))
    places = [tensor.data_ptr() for tensor in _held(layer)]
    for _ in range(30):
        layer.update(*_states(1))
    assert [tensor.data_ptr() for tensor in _held(layer)] == places
    for _ in range(1000):
        layer.update(*_states(1))
    assert layer.get_seq_length() == 1050
    # There is room for an eighth more tokens, not for twice as many.
    assert all(tensor.untyped_storage().nbytes() <= 1.3 * tensor.nbytes for tensor in _held(layer))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@torch.no_grad()
def test_copies_grow_independently(copied: Any) -> None:
    first = GrowingLayer()
    first.update(*_states(10))
    second, before = copied(first), first.keys.clone()
    ends = [_states(1) for _ in range(4)]
    for layer, states in zip((first, second, first, second), ends, strict=True):
        layer.update(*states)
    for layer, own in ((first, ends[0::2]), (second, ends[1::2])):
        assert torch.equal(layer.keys, torch.cat([before, *(keys for keys, _ in own)], dim=-2))
    second.crop(-2)
    second.update(*_states(1))
    assert torch.equal(first.keys[..., 10:, :], torch.cat([ends[0][0], ends[2][0]], dim=-2))


def test_keys_of_a_patched_model_are_saved_and_loaded_like_any_tensor(tmp_path: Path) -> None:
    ids = torch.randint(3, 100, (1, 5))
    layers = _patched().generate(ids, max_new_tokens=4, return_dict_in_generate=True).past_key_values.layers
    assert all(type(layer) is GrowingLayer for layer in layers)
    torch.save([layer.keys for layer in layers], tmp_path / "keys.pt")
    loaded = torch.load(tmp_path / "keys.pt")
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(layers, loaded, strict=True))


def test_rewinding_leaves_layers_without_keys() -> None:
    """A cache made of another's keys has such layers where a model shares keys."""
    cache = DynamicCache([_states(6), (None, None)])
    for layer in cache.layers:
        layer.__class__ = GrowingLayer
    Rewinding(torch.nn.Module(), cache).rewind(2)
    assert [layer.get_seq_length() for layer in cache.layers] == [4, 0]


@torch.no_grad()
def test_rewound_tokens_are_overwritten() -> None:
    layer, before = GrowingLayer(), _states(10)
    layer.update(*before)
    shared, place, first = copy.copy(layer), layer.keys.data_ptr(), _states(4)
    layer.update(*first)
    layer.rewind(3)
    layer.rewind(0)
    last = _states(1)
    layer.update(*last)
    assert layer.keys.data_ptr() == place
    for held, parts in zip(_held(layer), zip(before, first, last, strict=True), strict=True):
        assert torch.equal(held, torch.cat([parts[0], parts[1][..., :1, :], parts[2]], dim=-2))
    shared.update(*_states(1))
    assert all(torch.equal(*pair) for pair in zip((held[..., :10, :] for held in _held(shared)), before, strict=True))
    assert all(torch.equal(*pair) for pair in zip((held[..., 11:, :] for held in _held(layer)), last, strict=True))


def test_updates_that_do_not_fit_in_place_act_as_in_transformers() -> None:
    own, theirs = GrowingLayer(), DynamicLayer()
    with torch.no_grad():
        for states in (_states(4), tuple(tensor.double() for tensor in _states(1)), _states(1)):
            own.update(*states)
            theirs.update(*states)
        assert _same(own, theirs)
        layer = GrowingLayer()
        layer.update(*_states(4))
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            layer.update(*_states(1, batch=3))


def test_gradients_pass_several_forwards_over_one_cache() -> None:
    """This includes gradients of queries only, for which autograd keeps the keys of each forward."""
    states = [_states(tokens) for tokens in (4, 1, 1)]
    grads = []
    for layer in (GrowingLayer(), DynamicLayer()):
        query = torch.ones(2, 3, 1, 8, requires_grad=True)
        total = sum((query @ layer.update(*each)[0].transpose(-1, -2)).square().sum() for each in states)
        total.backward()
        grads.append(query.grad)
    assert torch.equal(*grads)
    keys, values = _states(2)
    layer.update(keys.requires_grad_(), values)
    assert layer.keys.requires_grad


@torch.no_grad()
def test_replaced_keys_are_freed() -> None:
    for replace in (
        lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
        lambda layer: layer.batch_select_indices(torch.tensor([0])),
        *([lambda layer: layer.reset()] if RESET_DROPS else []),
    ):
        layer = GrowingLayer()
        layer.update(*_states(10))
        memory = [weakref.ref(tensor._base) for tensor in _held(layer)]
        replace(layer)
        assert all(ref() is None for ref in memory)


def test_a_cache_filled_in_inference_mode_grows_outside_of_it() -> None:
    own, theirs = GrowingLayer(), DynamicLayer()
    with torch.inference_mode():
        first = _states(4)
        own.update(*first)
        theirs.update(*first)
    for _ in range(3):
        states = _states(1)
        own.update(*states)
        theirs.update(*states)
    assert _same(own, theirs)


@pytest.mark.parametrize("name", [QWEN, OSS])
def test_caches_of_a_patched_model_grow_and_give_the_same_logits(name: str) -> None:
    model = torch_mesh.patch(TINY_MODELS[name].build(), resident=0.5)
    ids = torch.randint(3, 100, (2, 9))
    with torch.inference_mode():
        caches: dict[bool, Any] = {}
        logits: dict[bool, list[Tensor]] = {}
        for grows in (True, False):
            if not grows:
                torch_mesh.hf.kv_cache.uninstall_caches(model)
            caches[grows] = cache = DynamicCache(config=model.config)
            parts = ids.split([4, 1, 1, 1, 2], dim=1)
            logits[grows] = [model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in parts]
    assert all(torch.equal(*pair) for pair in zip(logits[True], logits[False], strict=True))
    full = [type(layer) is DynamicLayer for layer in caches[False].layers]
    assert any(full)
    assert [type(layer) is GrowingLayer for layer in caches[True].layers] == full
    assert all(_same(*pair) for pair in zip(caches[True].layers, caches[False].layers, strict=True))


def test_generate_and_a_cache_without_config_grow() -> None:
    patched = _patched()
    ids = torch.randint(3, 100, (1, 5))
    given = patched.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert all(type(layer) is GrowingLayer for layer in given.past_key_values.layers)
    cache = DynamicCache()
    with torch.inference_mode():
        patched(input_ids=ids, past_key_values=cache, use_cache=True)
    assert all(type(layer) is GrowingLayer for layer in cache.layers)
    assert len(cache.layers) == patched.config.num_hidden_layers


def _hooks(model: PreTrainedModel) -> int:
    return len(model._forward_pre_hooks)


def test_unpatch_and_patching_that_fails_leave_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = _patched()
    assert _hooks(patched) == _hooks(copy.deepcopy(patched)) == 1
    model = torch_mesh.unpatch(patched)
    assert _hooks(model) == 0
    monkeypatch.setattr(
        torch_mesh.patching.modes, "set_config_metadata", lambda *_: (_ for _ in ()).throw(OSError("no"))
    )
    with pytest.raises(OSError, match="no"):
        torch_mesh.patch(model, resident=0.5)
    assert _hooks(model) == 0
    assert not modules.has_attributes(model)


def test_unpatching_a_copy_leaves_the_original_patched() -> None:
    patched = _patched()
    clone = copy.deepcopy(patched)
    torch_mesh.unpatch(clone)
    assert _hooks(clone) == 0
    assert _hooks(patched) == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_forward_does_not_replace_the_cache() -> None:
    patched = _patched()
    ids = torch.randint(3, 100, (1, 5))
    with torch.inference_mode():
        cache = DynamicCache(config=patched.config)
        torch.compile(patched, backend="eager")(input_ids=ids, past_key_values=cache, use_cache=True)
        assert all(type(layer) is DynamicLayer for layer in cache.layers)
        patched(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    assert all(type(layer) is GrowingLayer for layer in cache.layers)
    assert cache.get_seq_length() == 6
