"""Speculation in calls of ``generate``: streamers, return values, and calls and models that are refused."""

from __future__ import annotations

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafted import (
    NEXT,
    OSS,
    PROMPTS,
    QWEN,
    Streamed,
    always,
    assert_same_answers,
    check_tokens,
    generate,
    generate_plainly,
    knowing,
    patched,
    random_inputs,
    rows_are_exact,
    spread_model,
)
from peft import LoraConfig, get_peft_model
from tiny_models import TINY_MODELS
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    TextIteratorStreamer,
)

import torch_mesh
from torch_mesh import MeshConfig, UnsupportedModelError
from torch_mesh.speculation import decoding
from torch_mesh.speculation.models import SpeculatingModel


def test_stop_strings_work_where_generate_speculates_by_itself(original: PreTrainedModel, tokenizer: Any) -> None:
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    options = {"stop_strings": ["append(value)"], "tokenizer": tokenizer}
    plain = generate(patched(original), inputs, **options)
    model = patched(original, speculation="lookup")
    model._mesh_speculation = always(7)
    assert torch.equal(generate(model, inputs, **options), plain)
    assert torch_mesh.stats(model).speculation.accepted > 0


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_streamer_gets_tokens_one_by_one(original: PreTrainedModel, tokenizer: Any, by_itself: bool) -> None:
    """transformers passes no streamer to a custom_generate. If it begins to, ``_call_of_generate`` can be removed."""
    model = patched(original, speculation="lookup" if by_itself else "off")
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    streamed = Streamed()
    options = {} if by_itself else {"custom_generate": always(7)}
    tokens = generate(model, inputs, streamer=streamed, **options)[0].tolist()
    assert [token for part in streamed.parts for token in part] == tokens and streamed.ended
    assert all(len(part) == 1 for part in streamed.parts[1:])
    reader = TextIteratorStreamer(tokenizer, timeout=5)
    generate(model, inputs, streamer=reader, **options)
    assert "".join(reader) == tokenizer.decode(tokens)


class _Object:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)


def _on_another_thread(inner: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(inner, *args, **kwargs).result()

    return run


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: lambda *args, **kwargs: inner(*args, **kwargs),
        lambda inner: lambda *args, **kwargs: (_Object(_Object(inner)))(*args, **kwargs),
        lambda inner: functools.partial(inner),
        lambda inner: functools.partial(_Object(_Object(inner))),
        _Object,
        _on_another_thread,
        lambda inner: _Object(_on_another_thread(_Object(inner))),
    ],
    ids=["lambda", "nested", "partial", "partial object", "object", "thread", "thread in objects"],
)
def test_a_streamer_is_found_through_wrapper_functions(original: PreTrainedModel, tokenizer: Any, around: Any) -> None:
    model = patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    reader = TextIteratorStreamer(tokenizer, timeout=20)
    tokens = generate(model, inputs, streamer=reader, max_new_tokens=12, custom_generate=around(always(7)))[0]
    assert "".join(reader) == tokenizer.decode(tokens)


def test_concurrent_calls_have_their_own_streamers(original: PreTrainedModel, tokenizer: Any) -> None:
    model = patched(original)

    def call(words: str) -> bool:
        inputs, reader = tokenizer(words, return_tensors="pt"), TextIteratorStreamer(tokenizer, timeout=20)
        how = {"streamer": reader, "max_new_tokens": 12, "custom_generate": _on_another_thread(always(3))}
        tokens = model.generate(**inputs, do_sample=False, pad_token_id=0, **how)[0]
        return "".join(reader) == tokenizer.decode(tokens)

    with ThreadPoolExecutor(2) as executor:
        assert all(executor.map(call, [PROMPTS["rewriting"], "In the beginning"]))


@pytest.mark.parametrize("given", [True, None])
def test_a_call_whose_forwards_are_synced_is_refused(
    original: PreTrainedModel, tokenizer: Any, given: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers does not pass synced_gpus to a custom_generate either."""
    if given is None:
        monkeypatch.setattr(decoding, "is_deepspeed_zero3_enabled", lambda: True)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match="synced_gpus wants.*Leave custom_generate out"):
        generate(
            original, tokenizer("Once", return_tensors="pt"), synced_gpus=given, custom_generate=torch_mesh.speculate()
        )


def test_generate_returns_the_same_outputs_as_plain_decoding(original: PreTrainedModel, tokenizer: Any) -> None:
    model = patched(original)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.01,
    }
    plain, drafted = (generate(model, inputs, **options, **more) for more in ({}, {"custom_generate": always(7)}))
    assert type(drafted) is type(plain) and drafted.keys() == plain.keys()
    assert len(drafted.scores) == len(drafted.logits) == 60
    assert drafted.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
    if rows_are_exact(model, inputs["input_ids"]):
        for one, other in zip((*plain.scores, *plain.logits), (*drafted.scores, *drafted.logits), strict=True):
            assert torch.equal(one, other)
    # A conversation can continue with the cache.
    more = {"input_ids": torch.cat([plain.sequences, inputs["input_ids"]], dim=1)}
    answers = [
        generate(model, more, past_key_values=each.past_key_values, custom_generate=always(3))
        for each in (plain, drafted)
    ]
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"num_beams": 2}, "beam search"),
        ({"num_return_sequences": 5, "do_sample": True}, "up to 4 texts at a time, and here are 5"),
        ({"use_cache": False}, "use_cache=False leaves none"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
    ],
)
def test_unsupported_options_of_generate_are_refused(options: dict[str, Any], message: str) -> None:
    model = TINY_MODELS[QWEN].build()
    with pytest.raises(ValueError, match=message):
        generate(model, random_inputs(9), custom_generate=torch_mesh.speculate(), **options)


def test_models_and_caches_that_cannot_be_rewound_are_refused() -> None:
    model = TINY_MODELS[NEXT].build()
    with pytest.raises(ValueError, match="linear attention can be rewound in dynamic caches only"):
        generate(model, random_inputs(9), cache_implementation="static", custom_generate=torch_mesh.speculate())
    for name, message in (("ZayaExperts", "keys and a state"), ("DeepseekV4Experts", "which cannot be rewound")):
        model = TINY_MODELS[name].build()
        with pytest.raises(ValueError, match=message):
            generate(model, random_inputs(9), custom_generate=torch_mesh.speculate())
        with pytest.raises(UnsupportedModelError, match=message):
            torch_mesh.patch(model, resident=0.5, speculation="lookup")
    with pytest.raises(UnsupportedModelError, match="no generate"):
        torch_mesh.patch(TINY_MODELS[QWEN].build().model, resident=0.5, speculation="lookup")
    sliding = TINY_MODELS[OSS].build()
    with pytest.raises(ValueError, match="torch_mesh.compile gives one"):
        generate(sliding, random_inputs(9), cache_implementation="static", custom_generate=torch_mesh.speculate())


@pytest.mark.parametrize("lengths", [(), (0,), (16,), (3, "7"), (True, 2.5)])
def test_wrong_draft_lengths_are_refused(lengths: Any) -> None:
    with pytest.raises(ValueError, match="numbers of drafted tokens"):
        torch_mesh.speculate(lengths=lengths)


def test_unpatched_models_speculate_too() -> None:
    model = spread_model(QWEN)
    inputs = random_inputs(40)
    plain = generate_plainly(model, inputs, eos_token_id=None)
    found = generate(model, inputs, eos_token_id=None, custom_generate=knowing(plain.sequences, 7))
    check_tokens(model, inputs, plain, found)
    torch_mesh.patch(model, resident=0.5)
    assert torch_mesh.stats(model).speculation.accepted > 0


def test_the_speculation_field_works_until_unpatch(original: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    model = patched(original, speculation="lookup")
    cls = type(model)
    assert isinstance(model, SpeculatingModel) and isinstance(model, type(original))
    assert (cls.__name__, cls.__module__) == (type(original).__name__, type(original).__module__)
    assert "speculation=lookup" in repr(model)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    expected = generate(patched(original), inputs)
    assert torch_mesh.stats(model).speculation is None
    assert torch.equal(generate(model, inputs), expected)
    counts = torch_mesh.stats(model).speculation
    assert counts.tokens == 59 and counts.forwards <= 59
    assert (
        str(counts) in str(torch_mesh.stats(model)) and torch_mesh.stats(model).to_dict()["speculation"]["tokens"] == 59
    )
    copied = copy.deepcopy(model)
    assert torch.equal(generate(copied, inputs), expected)
    torch_mesh.reset_stats(model)
    assert torch_mesh.stats(model).speculation.tokens == 0
    chosen = {name: patched(original, attention="auto", speculation=name) for name in ("lookup", "off")}
    ours = {name: vars(each.model.layers[0].self_attn).get("_mesh_attention", False) for name, each in chosen.items()}
    assert ours["lookup"] and (not ours["off"] or torch_mesh.modules.dense.computes_dense(chosen["off"]))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=MeshConfig(resident=0.5, attention="mesh", speculation="lookup"),
    )
    assert again.config.architectures == [type(original).__name__]
    assert torch.equal(generate(again, inputs), expected)
    torch_mesh.unpatch(model)
    assert type(model) is type(original) and not any("specul" in name for name in vars(model))


def test_other_ways_to_decode_do_not_speculate(original: PreTrainedModel, tokenizer: Any) -> None:
    plain, model = patched(original), patched(original, speculation="lookup")
    inputs = tokenizer(PROMPTS["prose"], return_tensors="pt")
    five = {name: tensor.repeat(5, 1) for name, tensor in inputs.items()}
    for asked, options in [
        (five, {}),
        (inputs, {"num_beams": 2}),
        (inputs, {"use_cache": False, "max_new_tokens": 9}),
        (inputs, {"return_dict_in_generate": True, "output_hidden_states": True}),
        (inputs, {"prompt_lookup_num_tokens": 3}),
        (inputs, {"assistant_model": original}),
        (inputs, {"assistant_model": plain}),
    ]:
        options = {"max_new_tokens": 12} | options
        expected, found = generate(plain, asked, **options), generate(model, asked, **options)
        if not isinstance(expected, torch.Tensor):
            expected, found = expected.sequences, found.sequences
        assert torch.equal(found, expected), options
    assert torch_mesh.stats(model).speculation is None
    # The model also works as an assistant.
    assert torch.equal(generate(plain, inputs, assistant_model=model), generate(plain, inputs, assistant_model=plain))
    assert torch_mesh.stats(model).speculation is None


def test_a_recorded_model_does_not_speculate(original: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    """Rejected drafts would be tokens of the trace."""
    plain, model = patched(original), patched(original, speculation="lookup")
    model._mesh_speculation = always(7)
    inputs = tokenizer(PROMPTS["rewriting"], return_tensors="pt")
    found = []
    adapted = get_peft_model(model, LoraConfig(target_modules=["o_proj"]))  # changes nothing before training
    for name, each in (("plain", plain), ("lookup", model), ("inner", model.model), ("peft", adapted)):
        with torch_mesh.record_trace(each, tmp_path / name):
            generate(plain if each is plain else model, inputs, max_new_tokens=12)
        found.append(torch_mesh.load_trace(tmp_path / name))
    adapted.unload()
    assert torch_mesh.stats(model).speculation is None
    for field in ("ids", "offsets", "forwards"):
        expected = getattr(found[0], field)
        assert all(np.array_equal(getattr(trace, field), expected) for trace in found), field
    with torch_mesh.record_trace(model, tmp_path / "outer"), torch_mesh.record_trace(plain, tmp_path / "plain"):
        with torch_mesh.record_trace(plain, tmp_path / "inner"):
            plain(**inputs)
        with pytest.raises(ValueError, match="rejected drafts"):
            generate(plain, inputs, custom_generate=always(7))
        model(**inputs)
    generate(plain, inputs, custom_generate=always(7))
    generate(model, inputs)
    assert all(torch_mesh.stats(each).speculation.accepted > 0 for each in (plain, model))


@pytest.mark.parametrize("assisted", [False, True])
def test_speculation_of_transformers_gives_the_greedy_tokens(
    original: PreTrainedModel, tokenizer: Any, assisted: bool
) -> None:
    model = patched(original, resident=0.25)
    how: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if assisted:
        how = {"assistant_model": patched(original, weights="int4", resident=0.25)}
    assert_same_answers(model, tokenizer(PROMPTS["rewriting"], return_tensors="pt"), how)
