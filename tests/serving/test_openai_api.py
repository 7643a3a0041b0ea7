"""Each field of OpenAI's API has its effect or is refused by name. Requests are from OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import first_quick
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from torch_mesh import MeshConfig

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

TEXT = "In the beginning"
CHAT = [{"role": "user", "content": TEXT}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "the weather", "parameters": WEATHER}}
    for name in ("weather", "forecast")
]


class Short(pydantic.BaseModel):
    ok: bool


@pytest.fixture(scope="module")
def server(serving: Callable[..., Any], folder: Path) -> Any:
    # Keys of a decode step may differ from a prompt's in the last bit, which may decide a near tie.
    return serving(folder, MeshConfig(resident=1.0), kept_bytes=0)


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[Any, Any]:
    """The model without a server, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(resident=1.0))
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def chat(client: Any, server: Any) -> Callable[..., Any]:
    def ask(**more: Any) -> Any:
        given = {"model": server.model, "messages": CHAT, "max_tokens": 8, "temperature": 0} | more
        return client.chat.completions.create(**given)

    return ask


@pytest.fixture
def complete(client: Any, server: Any) -> Callable[..., Any]:
    def ask(**more: Any) -> Any:
        given = {"model": server.model, "prompt": TEXT, "max_tokens": 8, "temperature": 0} | more
        return client.completions.create(**given)

    return ask


def _text(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_seed_determines_the_sample(chat: Callable[..., Any]) -> None:
    """Even though the model's own options do not enable sampling."""
    drawn = [chat(temperature=1.5, seed=seed).choices[0].message.content for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    greedy = chat().choices[0].message.content
    assert drawn[0] != greedy == chat(temperature=1.5, top_p=0, seed=5).choices[0].message.content
    assert _text(chat(temperature=1.5, seed=3, stream=True)) == drawn[0]
    assert chat(temperature=1.5, extra_body={"top_k": 1}).choices[0].message.content == greedy


def test_generation_config_leaves_the_other_options_to_the_model(
    client: Any, chat: Callable[..., Any], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(**options: Any) -> str:
        body = {"generation_config": json.dumps({"max_new_tokens": 8, "temperature": 5.0} | options)}
        answer = client.chat.completions.create(model=server.model, messages=CHAT, seed=3, extra_body=body)
        return answer.choices[0].message.content

    free = chat(temperature=5, seed=3).choices[0].message.content
    assert ask(do_sample=True) == free
    models = server._service.model.generation_config
    monkeypatch.setattr(models, "do_sample", True)
    assert ask() == free, "generate's default is the 50 most probable tokens"
    monkeypatch.setattr(models, "top_k", 1)
    assert ask() == ask(do_sample=True) == chat().choices[0].message.content != free
    assert ask(top_k=0) == free


def test_several_answers(chat: Callable[..., Any], complete: Callable[..., Any]) -> None:
    several = chat(n=3, temperature=1.5, seed=3)
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[0] == chat(temperature=1.5, seed=3).choices[0].message.content
    assert several.usage.completion_tokens == 24
    streamed = ["", "", ""]
    for chunk in chat(n=3, temperature=1.5, seed=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert len({choice.text for choice in complete(n=2, temperature=1.5, seed=1).choices}) == 2
    best = complete(n=1, best_of=3, temperature=1.5, seed=3, logprobs=0).choices
    some = complete(n=3, temperature=1.5, seed=3, logprobs=0).choices
    assert len(best) == 1 and best[0].text == max(some, key=lambda each: sum(each.logprobs.token_logprobs)).text


def test_stop_sequences_end_an_answer_before_them(chat: Callable[..., Any], complete: Callable[..., Any]) -> None:
    whole = complete(max_tokens=12).choices[0].text
    for stop in (whole[5:8], [whole[9:11], whole[5:8]], "never said"):
        first = min(
            (place for each in ([stop] if isinstance(stop, str) else stop) if (place := whole.find(each)) >= 0),
            default=None,
        )
        for stream in (False, True):
            answer = complete(max_tokens=12, stop=stop, stream=stream)
            choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
            assert "".join(choice.text for choice in choices) == whole[:first]
            assert choices[-1].finish_reason == ("length" if first is None else "stop")


def _two_steps(logits: torch.Tensor) -> float:
    """Two steps of bf16: logits may differ by them, since a prompt in a server has another number of rows."""
    return 2 * 2.0**-7 * logits.abs().max().item()


def test_log_probabilities_are_the_models(chat: Callable[..., Any], plain: tuple[Any, Any]) -> None:
    model, tokenizer = plain
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**inputs, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    expected = [logits[0].float().log_softmax(-1) for logits in made.logits]
    allowed = max(map(_two_steps, made.logits))
    # Neither a temperature nor a bias changes the reported log probabilities.
    found = chat(logprobs=True, top_logprobs=3, logit_bias={"7": -100}).choices[0].logprobs.content
    streamed = [
        token
        for chunk in chat(logprobs=True, top_logprobs=3, stream=True)
        for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    for tokens in (found, streamed):
        assert len(tokens) == 8
        for token, row in zip(tokens, expected, strict=True):
            assert token.logprob == pytest.approx(row.max().item(), abs=allowed)
            top = [each.logprob for each in token.top_logprobs]
            assert top == pytest.approx(row.topk(3).values.tolist(), abs=allowed)
    assert "".join(token.token for token in found) == chat().choices[0].message.content
    assert chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize("given", [True, False])
def test_log_probabilities_are_those_before_a_repetition_penalty(
    given: bool, chat: Callable[..., Any], plain: tuple[Any, Any], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The penalty is the request's or the model's own."""
    model, tokenizer = plain
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(
        **inputs,
        max_new_tokens=8,
        do_sample=False,
        repetition_penalty=5.0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    more: dict[str, Any] = {"extra_body": {"repetition_penalty": 5}} if given else {}
    if not given:
        monkeypatch.setattr(server._service.model.generation_config, "repetition_penalty", 5.0)
    found = chat(logprobs=True, top_logprobs=3, **more).choices[0].logprobs.content
    assert "".join(token.token for token in found) == chat(**more).choices[0].message.content
    allowed = max(map(_two_steps, made.logits))
    ids = made.sequences[0, -8:].tolist()
    assert [token.token for token in found] == [tokenizer.decode([token]) for token in ids]
    for each, logits, token in zip(found, made.logits, ids, strict=True):
        row = logits[0].float().log_softmax(-1)
        assert each.logprob == pytest.approx(row[token].item(), abs=allowed)
        top = [other.logprob for other in each.top_logprobs]
        assert top == pytest.approx(row.topk(3).values.tolist(), abs=allowed)


def test_log_probabilities_are_refused_with_options_that_change_them(
    chat: Callable[..., Any], complete: Callable[..., Any], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"extra_body": {"generation_config": '{"max_new_tokens": 8, "no_repeat_ngram_size": 2}'}}
    calls: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
        (chat, {"logprobs": True}),
        (complete, {"logprobs": 1}),
        (complete, {"best_of": 2}),
    )
    for ask, more in calls:
        with pytest.raises(openai.BadRequestError, match="no_repeat_ngram_size") as error:
            ask(**more, **own)
        assert error.value.param == "no_repeat_ngram_size"
    assert len(chat(**own).choices) == 1
    empty = {"max_new_tokens": 8, "suppress_tokens": [], "begin_suppress_tokens": []}
    nothing = chat(logprobs=True, extra_body={"generation_config": json.dumps(empty)})
    assert nothing.choices[0].message.content == chat().choices[0].message.content
    monkeypatch.setattr(server._service.model.generation_config, "suppress_tokens", [65])
    with pytest.raises(openai.BadRequestError, match="suppress_tokens"):
        chat(logprobs=True)


ONE_OF_TWO = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"enum": ["yes", "no"]}}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_new_tokens", 20),
        ("no_repeat_ngram_size", 1),
        ("begin_suppress_tokens", [1, 2]),
        ("suppress_tokens", [1]),
        ("bad_words_ids", [[1]]),
        ("token_healing", True),
    ],
)
def test_grammars_are_refused_with_options_that_leave_no_token(
    name: str, value: Any, chat: Callable[..., Any], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"generation_config": json.dumps({"max_new_tokens": 8, name: value})}
    for more in ({"response_format": ONE_OF_TWO}, {"tools": TOOLS, "tool_choice": "required"}):
        with pytest.raises(
            openai.BadRequestError, match=f"{name} may leave no token that {next(reversed(more))}"
        ) as error:
            chat(**more, extra_body=own)
        assert error.value.param == name
    if "suppress" in name:  # the model's own: no request can leave it out
        monkeypatch.setattr(server._service.model.generation_config, name, [1])
    assert chat(response_format=ONE_OF_TWO).choices[0].message.content in ('"yes"', '"no"')


def test_a_schema_without_any_value_is_refused(chat: Callable[..., Any]) -> None:
    for schema in ({"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}):
        asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match="no answer can begin") as error:
            chat(response_format=asked)
        assert error.value.param == "response_format"


def test_log_probabilities_are_refused_where_the_models_own_options_change_them(
    chat: Callable[..., Any], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._service.model.generation_config, "suppress_tokens", [1])
    with pytest.raises(openai.BadRequestError, match="model's own suppress_tokens .* leave out logprobs") as error:
        chat(logprobs=True)
    assert error.value.param == "logprobs"


def test_a_request_without_a_limit_is_answered_as_far_as_there_are_positions(client: Any, server: Any) -> None:
    positions = server._service.model.config.max_position_embeddings
    asked = {"model": server.model, "prompt": [65] * (positions - 3), "temperature": 0}
    answer = client.completions.create(**asked, logit_bias={"65": 100})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")
    with pytest.raises(openai.BadRequestError, match="shorten the prompt"):
        client.completions.create(**asked | {"prompt": [65] * positions})


@pytest.mark.parametrize("name", ['a"b', "a b", "a\\b", "a>b", "a{b", "", "a\n", 3])
def test_names_of_functions_that_end_a_call_are_refused(name: Any, chat: Callable[..., Any]) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": WEATHER}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.function\.name"):
        chat(tools=[tool])


def test_log_probabilities_have_the_bytes_of_their_tokens(
    complete: Callable[..., Any], chat: Callable[..., Any], plain: tuple[Any, Any]
) -> None:
    """A character may have several tokens."""
    text = "a\N{GRINNING FACE}b"
    ids = plain[1](text)["input_ids"]
    found = complete(prompt=text, echo=True, max_tokens=0, logprobs=1).choices[0].logprobs
    assert found.tokens == ["a", *(f"bytes:\\x{byte:02x}" for byte in "\N{GRINNING FACE}".encode()), "b"]
    assert found.text_offset == [0, 1, 1, 1, 1, 2] and len(ids) == 6
    part = ids[1]
    (token,) = chat(logprobs=True, max_tokens=1, logit_bias={str(part): 100}).choices[0].logprobs.content
    assert (token.token, token.bytes) == ("\\xf0", [0xF0])


def test_echo_scores_a_prompt(complete: Callable[..., Any], plain: tuple[Any, Any]) -> None:
    model, tokenizer = plain
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].float()
    rows, allowed = logits.log_softmax(-1), _two_steps(logits)
    expected = [row[token].item() for row, token in zip(rows, ids[0, 1:].tolist(), strict=False)]
    for asked in ({"prompt": TEXT}, {"prompt": ids[0].tolist()}, {"prompt": [TEXT, TEXT]}):
        for tokens in (0, 1):
            answer = complete(**asked, max_tokens=tokens, echo=True, logprobs=2)
            assert len(answer.choices) == (
                2 if isinstance(asked["prompt"][0], str) and len(asked["prompt"]) == 2 else 1
            )
            for choice in answer.choices:
                found = choice.logprobs
                assert choice.text.startswith(TEXT) and found.token_logprobs[0] is None
                assert found.token_logprobs[1 : len(expected) + 1] == pytest.approx(expected, abs=allowed)
                assert len(found.tokens) == len(found.text_offset) == len(expected) + 1 + tokens
                assert all(len(top) in (2, 3) for top in found.top_logprobs[1:])
    assert complete(echo=True).choices[0].text == TEXT + complete().choices[0].text


@pytest.mark.parametrize("ends", [True, False])
def test_tokens_that_a_completion_does_not_show_have_log_probabilities(
    ends: bool, complete: Callable[..., Any], plain: tuple[Any, Any]
) -> None:
    """Harnesses drop the entries of generated tokens by their number."""
    tokenizer = plain[1]
    ids, hidden = tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id
    own = {"eos_token_id": hidden if ends else hidden + 1}
    asked: dict[str, Any] = {"prompt": ids, "logprobs": 1, "max_tokens": 3, "logit_bias": {str(hidden): 100}}
    asked["extra_body"] = {"generation_config": json.dumps(own)}
    answer = complete(**asked, echo=True)
    made, found = answer.usage.completion_tokens, answer.choices[0].logprobs
    assert answer.choices[0].text == TEXT and made == (1 if ends else 3)
    scored = complete(**asked | {"max_tokens": 0}, echo=True).choices[0].logprobs
    assert found.token_logprobs[:-made] == scored.token_logprobs
    assert found.tokens[-made:] == [tokenizer.decode(hidden)] * made
    assert found.text_offset[-made:] == [len(TEXT)] * made
    streamed = [chunk.choices[0].logprobs for chunk in complete(**asked, stream=True)]
    assert sum(len(each.tokens) for each in streamed if each is not None) == made


def test_offsets_of_tokens_take_one_length_each() -> None:
    from torch_mesh.serving.openai_api import OpenAI
    from torch_mesh.serving.processors import TokenLogprobs

    lengths = []

    class Text(str):
        def __len__(self) -> int:
            lengths.append(1)
            return super().__len__()

    tokenizer = SimpleNamespace(decode=lambda ids, **_: Text("a" * sum(each % 4 for each in ids)), all_special_ids=[])
    api = OpenAI(SimpleNamespace(prompts=SimpleNamespace(tokenizer=tokenizer)))  # type: ignore[arg-type]
    found = [TokenLogprobs(token, -1.0, ()) for token in range(1, 40)]
    offsets = api._completion_logprobs([0], [None, *found], 5)["text_offset"]
    assert len(lengths) <= 3 * len(offsets)
    assert offsets == [5 + sum(each % 4 for each in range(token)) for token in range(40)]


def test_a_characters_tokens_have_their_log_probabilities_in_the_responses_api(folder: Path) -> None:
    from torch_mesh.serving.answers import Answer
    from torch_mesh.serving.engine import Job, Token
    from torch_mesh.serving.openai_api import OpenAI, _Response
    from torch_mesh.serving.processors import TokenLogprobs

    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def tokens(job: Any) -> AsyncGenerator[list[Token], None]:
        for token in ids:
            yield [Token(token, TokenLogprobs(token, -1.0, ()))]

    api = OpenAI(SimpleNamespace(prompts=SimpleNamespace(tokenizer=tokenizer), served="a"))  # type: ignore[arg-type]
    job = Job({"input_ids": torch.tensor([[1]])}, GenerationConfig(max_new_tokens=99))

    async def read() -> list[str]:
        return [each async for each in response.events()]

    for text, cut in (("\N{GRINNING FACE} a\N{GRINNING FACE}", 0), ("a\N{GRINNING FACE}", 1)):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) > len(text)
        ids = ids[: len(ids) - cut]  # the last character may be incomplete
        response = _Response(api, {}, Answer(SimpleNamespace(tokens=tokens), job, tokenizer))
        events = [json.loads(each.partition("data: ")[2]) for each in asyncio.run(read())]
        deltas = [each for each in events if each["type"] == "response.output_text.delta"]
        (done,) = (each for each in events if each["type"] == "response.output_text.done")
        whole = text.encode()[: len(text.encode()) - cut]
        assert bytes(byte for each in done["logprobs"] for byte in each["bytes"]) == whole
        assert [each for delta in deltas for each in delta["logprobs"]] == done["logprobs"]


def test_penalties_and_biases(chat: Callable[..., Any], plain: tuple[Any, Any]) -> None:
    _, tokenizer = plain
    tokens = tokenizer(chat(max_tokens=40).choices[0].message.content)["input_ids"]
    counted = chat(max_tokens=40, frequency_penalty=2, presence_penalty=2).choices[0].message.content
    assert len(set(tokenizer(counted)["input_ids"])) > len(set(tokens))
    assert chat(logit_bias={"65": 100}).choices[0].message.content == tokenizer.decode([65] * 8)
    assert chat(extra_body={"repetition_penalty": 5}).choices[0].message.content != chat().choices[0].message.content


def test_usage_at_the_end_of_a_stream(chat: Callable[..., Any], complete: Callable[..., Any]) -> None:
    for ask in (chat, complete):
        chunks = list(ask(stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
        assert all(chunk.usage is None for chunk in chunks[:-1])
    several = {"prompt": ["a", "b c d"], "n": 2}
    *_, last = complete(**several, stream=True, stream_options={"include_usage": True})
    assert last.usage == complete(**several).usage


def test_an_answer_has_one_limit(chat: Callable[..., Any]) -> None:
    for limit in ({"max_tokens": None}, {"max_tokens": 3}):
        answer = chat(max_completion_tokens=3, **limit)
        assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError) as refused:
        chat(max_completion_tokens=3, max_tokens=4)
    assert refused.value.param == "max_completion_tokens"


def test_answers_that_are_json(client: Any, server: Any, chat: Callable[..., Any]) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    for seed in range(3):
        drawn = {"temperature": 2, "seed": seed, "max_tokens": 300, "response_format": form}
        found = json.loads(chat(**drawn).choices[0].message.content)
        assert set(found) == {"city", "days"} and 1 <= found["days"] <= 9 and len(found["city"]) <= 4
        assert json.loads(_text(chat(**drawn, stream=True))) == found
    ask = {"model": server.model, "input": TEXT, "max_output_tokens": 300, "temperature": 2}
    answer = client.responses.create(**ask, text={"format": {"type": "json_schema", "name": "w", "schema": WEATHER}})
    assert set(json.loads(answer.output_text)) == {"city", "days"}
    parsed = client.chat.completions.parse(model=server.model, messages=CHAT, max_tokens=300, response_format=Short)
    chat(messages=[*CHAT, parsed.choices[0].message, *CHAT])
    with pytest.raises(openai.BadRequestError, match="schema") as error:
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}})
    assert error.value.param == "response_format"


@pytest.mark.parametrize("stream", first_quick(True, False))
def test_a_tool_that_has_to_be_called(stream: bool, chat: Callable[..., Any]) -> None:
    pytest.importorskip("llguidance")

    def calls(**more: Any) -> list[tuple[str, dict[str, Any]]]:
        answer = chat(tools=TOOLS, temperature=2, max_tokens=300, stream=stream, **more)
        if stream:
            chunks = [chunk.choices[0] for chunk in answer]
            found = [call for choice in chunks for call in choice.delta.tool_calls or ()]
            assert chunks[-1].finish_reason == "tool_calls" and [call.index for call in found] == list(
                range(len(found))
            )
        else:
            found = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
        return [(call.function.name, json.loads(call.function.arguments)) for call in found]

    named = {"type": "function", "function": {"name": "forecast"}}
    for seed in range(2):
        ((name, arguments),) = calls(tool_choice=named, seed=seed)
        assert name == "forecast" and set(arguments) == {"city", "days"}
        ((name, arguments),) = calls(tool_choice="required", parallel_tool_calls=False, seed=seed)
        assert name in ("weather", "forecast") and 1 <= arguments["days"] <= 9


def test_a_tool_in_the_responses_api(client: Any, server: Any) -> None:
    pytest.importorskip("llguidance")
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    ask = {"model": server.model, "input": TEXT, "tools": tools, "max_output_tokens": 300, "temperature": 2}
    choice = {"type": "function", "name": "weather"}
    answer = client.responses.create(**ask, tool_choice=choice)
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "weather" and "city" in json.loads(call.arguments)
    events = list(client.responses.create(**ask, tool_choice=choice, stream=True))
    assert events[-1].type == "response.completed" and events[-1].response.output[0].name == "weather"
    # The next turn contains the call and its result.
    turn = [
        {"role": "user", "content": TEXT},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    assert client.responses.create(**ask | {"input": turn}, tool_choice="none").output[0].type == "message"


def test_tools_that_may_not_be_called_are_not_shown(chat: Callable[..., Any]) -> None:
    assert chat(tools=TOOLS, tool_choice="none").choices[0].message == chat().choices[0].message


def test_a_strict_schema_holds_when_the_model_chooses_to_call(chat: Callable[..., Any], plain: tuple[Any, Any]) -> None:
    pytest.importorskip("llguidance")
    _, tokenizer = plain
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    begin = [*tokenizer("<tool_call>")["input_ids"]]
    # Favours the beginning of a call over the end of the answer.
    bias = {str(token): 30.0 for token in begin} | {str(tokenizer.eos_token_id): -100.0}
    answer = chat(tools=strict, logit_bias=bias, temperature=1, seed=2, max_tokens=400).choices[0].message
    for call in answer.tool_calls or ():
        assert set(json.loads(call.function.arguments)) == {"city", "days"}


def test_a_strict_tool_of_a_model_that_writes_arguments_between_tags(
    client: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    template = "{{ tools }}{{ messages[0].content }}{# <tool_call> <function= #}"
    monkeypatch.setattr(server.prompts.processor, "chat_template", template)
    for city, left_out in (({"enum": ["Rome", "Ur"]}, None), (WEATHER["properties"]["city"], "tools.strict (f.city)")):
        parameters = WEATHER | {"properties": WEATHER["properties"] | {"city": city}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
        asked = {"model": server.model, "messages": CHAT, "tools": tools, "temperature": 2, "seed": 2}
        answer = client.chat.completions.with_raw_response.create(**asked, max_tokens=8)
        assert answer.headers.get("x-torch-mesh-left-out") == left_out
        if left_out is None:
            forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
            (call,) = client.chat.completions.create(**asked, **forced).choices[0].message.tool_calls
            found = json.loads(call.function.arguments)
            assert found["city"] in ("Rome", "Ur") and 1 <= found["days"] <= 9


# By path, the unsupported fields with a value of the right type.
NOT_HERE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "audio": {"voice": "alloy", "format": "wav"},
        "functions": [{"name": "f"}],
        "function_call": "auto",
        "modalities": ["text", "audio"],
        "prediction": {"type": "content", "content": "a"},
        "verbosity": "low",
        "web_search_options": {},
        "store": True,
        "service_tier": 7,
        "reasoning_effort": "high",  # the template does not know it
        "top_logprobs": 3,  # without logprobs
        "stream_options": {"include_usage": True},  # without stream
        "tool_choice": "required",  # without tools
        "response_format": {"type": "grammar"},
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        "tools": [{"type": "custom", "custom": {"name": "a"}}],
        "nothing": 1,
    },
    "/v1/completions": {
        "suffix": "the end",
        "best_of": 1,  # with n 2
        "max_tokens": 0,  # without echo
        "tools": TOOLS,
        "max_completion_tokens": 3,
    },
    "/v1/responses": {
        "background": True,
        "conversation": "a",
        "include": ["file_search_call.results"],
        "max_tool_calls": 3,
        "previous_response_id": "resp_1",
        "prompt": {"id": "a"},
        "reasoning": {"effort": "high"},
        "store": True,
        "text": {"verbosity": "low"},
        "top_logprobs": 3,
        "truncation": "some",
        "tools": [{"type": "web_search"}],
        "stop": ["a"],
    },
}


@pytest.mark.parametrize("path", NOT_HERE)
def test_unsupported_fields_are_refused_by_name(path: str, client: Any) -> None:
    needed: dict[str, Any] = {
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
        "/v1/completions": {"prompt": "a", "max_tokens": 1, "n": 2},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
    }[path]
    for name, value in NOT_HERE[path].items():
        with pytest.raises(openai.BadRequestError) as error:
            client.post(path.removeprefix("/v1"), body=needed | {name: value}, cast_to=object)
        assert error.value.param == name, (name, error.value)


def test_one_model_by_its_name(client: Any, server: Any) -> None:
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_requests_that_batches_cannot_honour_are_refused(
    serving: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serving(folder, MeshConfig(resident=1.0), continuous_batching=True, cb_num_blocks=8)
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        ask = {"model": server.model, "messages": CHAT, "max_tokens": 4}
        for more in (
            {"seed": 3},
            {"logprobs": True},
            {"logit_bias": {"65": 100}},
            {"frequency_penalty": 1},
            {"response_format": {"type": "json_object"}},
        ):
            with pytest.raises(openai.BadRequestError, match="--continuous-batching") as error:
                client.chat.completions.create(**ask | more)
            assert error.value.param == next(iter(more))
        with pytest.raises(openai.BadRequestError, match="best_of is not possible") as error:
            client.completions.create(model=server.model, prompt=TEXT, max_tokens=4, best_of=2)
        assert error.value.param == "best_of"
        for name, value in {
            "suppress_tokens": list(range(97, 123)),
            "stop_strings": ["e"],
            "min_new_tokens": 2,
            "max_time": 0.1,
            "no_repeat_ngram_size": 1,
            "top_h": 0.5,
        }.items():
            options = json.dumps({"max_new_tokens": 4, name: value})
            with pytest.raises(openai.BadRequestError, match="--continuous-batching") as error:
                client.chat.completions.create(**ask, temperature=0, extra_body={"generation_config": options})
            assert error.value.param == name
        # Sampled and greedy requests are computed separately.
        greedy = client.chat.completions.create(**ask, temperature=0).choices[0].message.content
        drawn = {client.chat.completions.create(**ask, temperature=2).choices[0].message.content for _ in range(4)}
        assert len(drawn) > 1
        neutral = {
            "num_beams": 1,
            "use_cache": True,
            "repetition_penalty": 1,
            "no_repeat_ngram_size": 0,
            "renormalize_logits": False,
        }
        options = json.dumps({"max_new_tokens": 4, "do_sample": False} | neutral)
        same = client.chat.completions.create(**ask, extra_body={"generation_config": options})
        assert same.choices[0].message.content == greedy
        assert client.chat.completions.create(**ask, temperature=0).choices[0].message.content == greedy
        assert len(client.chat.completions.create(**ask, temperature=2, n=3).choices) == 3
        monkeypatch.setattr(server._service.model.generation_config, "top_k", 1)
        options = json.dumps({"max_new_tokens": 4, "do_sample": True, "temperature": 5.0})
        models = client.chat.completions.create(**ask, extra_body={"generation_config": options})
        assert models.choices[0].message.content == greedy
    server.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_cached_tokens_of_all_prompts(stream: bool, folder: Path, serving: Callable[..., Any]) -> None:
    server = serving(folder, MeshConfig(resident=1.0))
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        given = {"model": server.model, "prompt": [TEXT, TEXT + TEXT, "Other"], "max_tokens": 2, "temperature": 0}
        client.completions.create(**given | {"prompt": TEXT})
        if stream:
            *_, last = client.completions.create(**given, stream=True, stream_options={"include_usage": True})
        else:
            last = client.completions.create(**given)
        alone = client.completions.create(**given | {"prompt": TEXT}).usage
    server.stop()
    assert last.usage.prompt_tokens > alone.prompt_tokens
    assert last.usage.prompt_tokens_details.cached_tokens > alone.prompt_tokens_details.cached_tokens > 0


def test_generation_without_streaming_ends_when_its_client_disconnects(server: Any) -> None:
    counts = server.kept.counts
    before = counts.generated_tokens
    impatient = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=0.5)
    with impatient, pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model=server.model, prompt=TEXT, max_tokens=1900, logit_bias={"0": -100})
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=300) as client:
        client.completions.create(model=server.model, prompt=TEXT, max_tokens=1)  # queues behind the first request
    assert counts.generated_tokens - before < 1900
