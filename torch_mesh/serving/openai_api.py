"""OpenAI's API: chat completions, completions and responses, as bodies and as streams."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_mesh.serving.answer_parser import Content, Reasoning
from torch_mesh.serving.answers import Answer, Part, running, whole_body
from torch_mesh.serving.errors import RequestError, describe
from torch_mesh.serving.processors import TokenLogprobs
from torch_mesh.serving.prompts import response_messages
from torch_mesh.serving.requests import (
    CHAT,
    COMPLETIONS,
    OBJECT,
    OUTPUT_LOGPROBS,
    RESPONSES,
    TEXT,
    check_object,
    checked_request,
    only,
)
from torch_mesh.serving.response_tools import qualified_name, shown_functions
from torch_mesh.serving.service import Service, json_schema
from torch_mesh.serving.text import token_bytes
from torch_mesh.serving.tool_formats import Call

Body = dict[str, Any]
Events = AsyncGenerator[str, None]
_DONE = "data: [DONE]\n\n"
_SUMMARY = only("auto", "concise", "detailed")  # reasoning comes as text


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex[:24]}"


@dataclass
class Collected:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, part: Part) -> None:
        for piece in part.pieces:
            if isinstance(piece, Call):
                self.calls.append(piece)
            elif isinstance(piece, Reasoning):
                self.reasoning.append(piece.text)
            else:
                self.content.append(piece.text)
        self.logprobs += [token.logprobs for token in part.tokens if token.logprobs is not None]

    @property
    def text(self) -> str:
        return "".join(self.content)


async def collect_all(answers: Sequence[Answer]) -> list[Collected]:
    found = [Collected() for _ in answers]
    async with contextlib.aclosing(merged(answers)) as parts:
        async for index, part in parts:
            if part is not None:
                found[index].add(part)
    return found


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Part | None], None]:
    """Parts of several answers as they are generated, with the answer's index; None after the last part of one. All
    end if one fails or the client disconnects."""
    queue: asyncio.Queue[tuple[int, Part | None] | BaseException] = asyncio.Queue()

    async def read(index: int, answer: Answer) -> None:
        try:
            async with contextlib.aclosing(answer.parts()) as parts:
                async for part in parts:
                    queue.put_nowait((index, part))
            queue.put_nowait((index, None))
        except Exception as error:  # noqa: BLE001  raised below
            queue.put_nowait(error)

    async with running(*(read(index, answer) for index, answer in enumerate(answers))):
        left = len(answers)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= item[1] is None
            yield item


class OpenAI:
    """Answers requests of this API through a Service. Each method returns a body, or the events of a stream.

    Invalid requests raise RequestError. Errors of the computation are raised, or are the last event of a stream.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def check(self, kind: str, body: Mapping[str, Any]) -> None:
        """Raise what answering would raise before it computes. ``kind``: CHAT, COMPLETIONS or RESPONSES."""
        service = self._service
        prepare = {CHAT: self._chat_answers, COMPLETIONS: self._completion_answers, RESPONSES: self._response_answer}
        prepare[kind](checked_request(kind, body, service.served, service.vocabulary))

    async def _checked(self, kind: str, body: Mapping[str, Any]) -> Body:
        """``checked_request`` in a thread, as a body may have millions of values."""
        service = self._service
        return await asyncio.to_thread(checked_request, kind, body, service.served, service.vocabulary)

    # Chat completions

    async def chat(self, body: Mapping[str, Any]) -> Body | Events:
        service = self._service
        given = await self._checked(CHAT, body)
        answers = await asyncio.to_thread(self._chat_answers, given)
        name, created = new_id("chatcmpl-"), int(time.time())
        head = {"id": name, "created": created, "model": service.served, "service_tier": "default"}
        if given.get("stream"):
            usage = given.get("stream_options", {}).get("include_usage", False)
            return self._chat_events(head, answers, bool(given.get("logprobs")), usage)
        choices: list[Body] = []
        for index, (answer, said) in enumerate(zip(answers, await collect_all(answers), strict=True)):
            message: Body = {"role": "assistant", "content": said.text, "refusal": None}
            if said.reasoning:
                message["reasoning_content"] = "".join(said.reasoning)
            if said.calls:
                message["content"] = said.text or None
                message["tool_calls"] = [_call(call) for call in said.calls]
            logprobs = {"content": [self._token(each) for each in said.logprobs]} if given.get("logprobs") else None
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish})
        return {**head, "object": "chat.completion", "choices": choices, "usage": _usage(answers)}

    def _chat_answers(self, given: Mapping[str, Any]) -> list[Answer]:
        service = self._service
        limit_field = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        tools = service.tools(given)
        arguments = service.template_arguments(given, given.get("reasoning_effort"), "reasoning_effort")
        inputs = service.prompts.encode_messages(
            given["messages"], None if tools is None else tools.shown, arguments, "messages"
        )
        return service.answers(
            _not_empty(inputs, "messages"),
            given,
            prompt_field="messages",
            limit_field=limit_field,
            count=given.get("n", 1),
            top=given.get("top_logprobs", 0) if given.get("logprobs") else None,
            format=service.prompts.format,
            tools=tools,
            schema=json_schema(given["response_format"], "response_format") if "response_format" in given else None,
        )

    async def _chat_events(self, head: Body, answers: Sequence[Answer], logprobs: bool, usage: bool) -> Events:
        def chunk(index: int, delta: Body, finish: str | None = None, tokens: Sequence[Any] = ()) -> str:
            choice: Body = {"index": index, "delta": delta, "finish_reason": finish}
            if logprobs:
                found = [self._token(token.logprobs) for token in tokens if token.logprobs is not None]
                choice["logprobs"] = {"content": found} if found else None
            more: Body = {"usage": None} if usage else {}
            if finish is not None and not usage and len(answers) == 1:  # clients may read it in the last chunk
                more = {"usage": _usage(answers)}
            return event({**head, "object": "chat.completion.chunk", "choices": [choice], **more})

        calls = [0] * len(answers)
        for index in range(len(answers)):
            yield chunk(index, {"role": "assistant", "content": ""})
        async with contextlib.aclosing(merged(answers)) as parts:
            async for index, part in parts:
                if part is None:
                    yield chunk(index, {}, answers[index].finish)
                    continue
                tokens = part.tokens
                deltas: list[Body] = []
                for piece in part.pieces:
                    if isinstance(piece, Call):
                        deltas.append({"tool_calls": [{"index": calls[index], **_call(piece)}]})
                        calls[index] += 1
                    else:
                        name = "reasoning_content" if isinstance(piece, Reasoning) else "content"
                        if deltas and name in deltas[-1]:
                            deltas[-1][name] += piece.text
                        else:
                            deltas.append({name: piece.text})
                for delta in deltas or ([{}] if logprobs and tokens else []):
                    yield chunk(index, delta, tokens=tokens)
                    tokens = ()
        if usage:
            yield event({**head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(answers)})
        yield _DONE

    def _token(self, found: TokenLogprobs) -> Body:
        top = [self._named(token, logprob, found.begins_text) for token, logprob in found.top]
        return {**self._named(found.token, found.logprob, found.begins_text), "top_logprobs": top}

    def _named(self, token: int, logprob: float, is_first: bool) -> Body:
        raw = self._bytes(token, is_first)
        return {"token": _shown(raw), "logprob": max(logprob, -9999.0), "bytes": list(raw)}

    def _bytes(self, token: int, is_first: bool) -> bytes:
        return token_bytes(self._service.prompts.tokenizer, token, is_first)

    # Completions

    async def completions(self, body: Mapping[str, Any]) -> Body | Events:
        service = self._service
        given = await self._checked(COMPLETIONS, body)
        count, top = int(given.get("n", 1)), given.get("logprobs")
        best = given.get("best_of", count)
        head = {
            "id": new_id("cmpl-"),
            "created": int(time.time()),
            "model": service.served,
            "service_tier": "default",
        }
        inputs, flat = await asyncio.to_thread(self._completion_answers, given)
        scores = given.get("max_tokens") == 0
        prompt_tokens = sum(each["input_ids"].shape[-1] for each in inputs)
        if given.get("stream"):
            usage = given.get("stream_options", {}).get("include_usage", False)
            return self._completion_events(head, flat, top is not None, prompt_tokens if usage else None, best)
        collected = [Collected() for _ in flat] if scores else await collect_all(flat)
        choices: list[Body] = []
        for index, each in enumerate(inputs):
            echoed, known = "", []
            if given.get("echo"):
                echoed = service.prompts.tokenizer.decode(each["input_ids"][0], skip_special_tokens=True)
                if top is not None:
                    known = await service.engine.run(lambda each=each: service.score(each, top))
            candidates = list(zip(flat, collected, strict=True))[index * best : (index + 1) * best]
            if best > count:
                candidates.sort(key=lambda pair: -_mean_logprob(pair[1]))
            for answer, found in candidates[:count]:
                logprobs = None
                if top is not None:
                    ids = each["input_ids"][0].tolist() if given.get("echo") else []
                    logprobs = await asyncio.to_thread(self._completion_logprobs, ids, [*known, *found.logprobs])
                finish = "length" if scores else answer.finish
                choices.append(
                    {"index": len(choices), "text": echoed + found.text, "logprobs": logprobs, "finish_reason": finish}
                )
        usage = _usage([] if scores else flat, prompt_tokens, best)
        return {**head, "object": "text_completion", "choices": choices, "usage": usage}

    def _completion_answers(self, given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Answer]]:
        """The inputs of each prompt, and the answers to all of them."""
        service, prompts = self._service, given["prompt"]
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        inputs = [
            service.prompts.encode_text(each) if isinstance(each, str) else service.prompts.encode_tokens(each)
            for each in prompts
        ]
        count, top = given.get("n", 1), given.get("logprobs")
        best = given.get("best_of", count)
        given = {**given, "max_tokens": 1} if given.get("max_tokens") == 0 else given
        top = top if best == count or top is not None else 0  # best_of compares probabilities
        answers: list[Answer] = []
        for each in inputs:
            answers += service.answers(
                _not_empty(each, "prompt"), given, prompt_field="prompt", limit_field="max_tokens", count=best, top=top
            )
            if given.get("echo") and given.get("logprobs") is not None:
                service.check_score(each)
        return inputs, answers

    def _completion_logprobs(
        self, prompt: Sequence[int], found: Sequence[TokenLogprobs | None], start: int = 0
    ) -> Body:
        """Log-probabilities of tokens; only the first token of a prompt has none."""
        ids = [prompt[index] if each is None else each.token for index, each in enumerate(found)]
        tokenizer = self._service.prompts.tokenizer
        hidden = frozenset(tokenizer.all_special_ids)  # the text leaves them out
        first = next((index for index, token in enumerate(ids) if token not in hidden), None) if prompt else None
        raw = [
            self._bytes(token, index == first or (each is not None and each.begins_text))
            for index, (token, each) in enumerate(zip(ids, found, strict=True))
        ]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may have several tokens
        offsets, offset = [], start
        for token, each in zip(ids, raw, strict=True):
            offsets.append(offset)
            offset += 0 if token in hidden else len(decoder.decode(each))
        return {
            "tokens": [_shown(each, "bytes:") for each in raw],
            "token_logprobs": [None if each is None else max(each.logprob, -9999.0) for each in found],
            "top_logprobs": [None if each is None else self._top(each) for each in found],
            "text_offset": offsets,
        }

    def _top(self, found: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens and the chosen one. If tokens have the same text, the most probable one counts."""
        named: dict[str, float] = {}
        for token, logprob in (*found.top, (found.token, found.logprob)):
            named.setdefault(_shown(self._bytes(token, found.begins_text), "bytes:"), max(logprob, -9999.0))
        return named

    async def _completion_events(
        self, head: Body, answers: Sequence[Answer], logprobs: bool, usage_of: int | None, per_prompt: int
    ) -> Events:
        """``usage_of``: tokens of all prompts, for an event with the usage; None for no such event. ``per_prompt``:
        answers to each prompt."""
        none = {} if usage_of is None else {"usage": None}
        lengths = [0] * len(answers)
        async with contextlib.aclosing(merged(answers)) as parts:
            async for index, part in parts:
                choice: Body = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
                if part is None:
                    choice["finish_reason"] = answers[index].finish
                else:
                    choice["text"] = "".join(piece.text for piece in part.pieces if isinstance(piece, Content))
                    if logprobs:
                        found = [token.logprobs for token in part.tokens]
                        choice["logprobs"] = self._completion_logprobs((), found, lengths[index])
                    if not choice["text"] and not part.tokens:
                        continue
                    lengths[index] += len(choice["text"])
                yield event({**head, "object": "text_completion", "choices": [choice], **none})
        if usage_of is not None:
            usage = _usage(answers, usage_of, per_prompt)
            yield event({**head, "object": "text_completion", "choices": [], "usage": usage})
        yield _DONE

    # Responses

    async def responses(self, body: Mapping[str, Any]) -> Body | Events:
        given = await self._checked(RESPONSES, body)
        answer, origins = await asyncio.to_thread(self._response_answer, given)
        made = _Response(self, given, answer, origins)
        if given.get("stream"):
            return made.events()
        return await whole_body(answer, made)

    def _response_answer(self, given: Mapping[str, Any]) -> tuple[Answer, dict[str, Body]]:
        """The answer, and the client's names of functions in namespaces by those that the model sees."""
        service = self._service
        reasoning, text = given.get("reasoning", {}), given.get("text", {})
        check_object("reasoning", reasoning, "reasoning", {}, {"effort": TEXT, "summary": _SUMMARY})
        check_object("text", text, "text", {}, {"format": OBJECT, "verbosity": only("medium")})
        includes = OUTPUT_LOGPROBS in given.get("include", ())
        if "top_logprobs" in given and not includes:
            raise RequestError('top_logprobs needs include: ["message.output_text.logprobs"].', "top_logprobs")

        functions, origins = shown_functions(given.get("tools", ()))
        choice = given.get("tool_choice", "auto")
        if isinstance(choice, dict) and choice.get("namespace") is not None:
            check_object("tool_choice", choice, "tool_choice", dict.fromkeys(("type", "name", "namespace"), TEXT))
            choice = {"type": choice["type"], "name": qualified_name(choice)}
        tools = service.tools({**given, "tools": functions, "tool_choice": choice})
        arguments = service.template_arguments(given, reasoning.get("effort"), "reasoning")
        messages = response_messages(given["input"], given.get("instructions"))
        inputs = service.prompts.encode_messages(messages, None if tools is None else tools.shown, arguments, "input")
        (answer,) = service.answers(
            _not_empty(inputs, "input"),
            given,
            prompt_field="input",
            limit_field="max_output_tokens",
            top=given.get("top_logprobs", 0) if includes else None,
            format=service.prompts.format,
            tools=tools,
            schema=json_schema(text["format"], "text") if text.get("format") else None,
        )
        return answer, origins


class _Response:
    """An answer of the Responses API: output items, whose opening, growth and closing are events."""

    def __init__(
        self,
        api: OpenAI,
        given: Mapping[str, Any],
        answer: Answer,
        origins: Mapping[str, Body] = {},
    ) -> None:
        self._api, self._given, self._answer = api, given, answer
        self._origins = origins
        self._id, self._created = new_id("resp_"), int(time.time())
        self._output: list[Body] = []
        self._open: Body | None = None
        self._tokens: list[Body] = []  # log-probabilities of tokens whose text is held back
        self._number = 0

    def body(self, status: str | None = None, error: Body | None = None) -> Body:
        """The response's body. ``status``: None once the answer has ended."""
        given, ended = self._given, status is None
        cut = ended and self._answer.finish == "length"
        sampling = self._answer.job.config
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status or ("incomplete" if cut else "completed"),
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata", {}),
            "model": self._api._service.served,
            "output": list(self._output),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "temperature": given.get("temperature", sampling.temperature),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [_shown_tool(tool) for tool in given.get("tools", ())],
            "top_p": given.get("top_p", sampling.top_p),
            "text": given.get("text", {"format": {"type": "text"}}),
            "truncation": given.get("truncation", "disabled"),
            "service_tier": "default",
            "usage": self._usage() if ended else None,
        }

    async def events(self) -> Events:
        yield self._event("response.created", response=self.body("in_progress"))
        yield self._event("response.in_progress", response=self.body("in_progress"))
        try:
            async with contextlib.aclosing(self._answer.parts()) as parts:
                async for part in parts:
                    for each in self.add(part):
                        yield each
        except Exception as error:  # noqa: BLE001  the status has been sent
            found = describe(error)[0]["error"]
            code = found["code"] or found["type"]
            yield self._event("error", code=code, message=found["message"], param=found["param"])
            failed = {"code": "server_error", "message": found["message"]}
            yield self._event("response.failed", response=self.body("failed", failed))
            return
        for each in self.close():
            yield each
        body = self.body()
        yield self._event(f"response.{body['status']}", response=body)

    def add(self, part: Part) -> list[str]:
        events = []
        self._tokens += [self._api._token(token.logprobs) for token in part.tokens if token.logprobs is not None]
        for piece in part.pieces:
            if isinstance(piece, Call):
                events += self._close() + self._call(piece)
                continue
            kind = "reasoning" if isinstance(piece, Reasoning) else "message"
            if self._open is None or self._open["type"] != kind:
                events += self._close() + self._begin(kind)
            assert self._open is not None
            events.append(self._delta(piece.text))
        if part.pieces:
            self._tokens = []  # those of reasoning or a call
        return events

    def close(self) -> list[str]:
        """Close the open item. An answer without a message or a call gets an empty message."""
        events = []
        if not any(item["type"] != "reasoning" for item in (*self._output, *filter(None, (self._open,)))):
            events += self._close() + self._begin("message")
        if self._tokens and self._open is not None and self._open["type"] == "message":
            events.append(self._delta(""))
        return events + self._close()

    def _delta(self, text: str) -> str:
        """Add ``text`` to the open item; a message also gets the log-probabilities."""
        assert self._open is not None
        content = self._open["content"][0]
        content["text"] += text
        more: Body = {"delta": text}
        if "logprobs" in content:
            content["logprobs"] += self._tokens
            more["logprobs"], self._tokens = self._tokens, []
        return self._event(f"response.{content['type']}.delta", **self._location(), **more)

    def _begin(self, kind: str) -> list[str]:
        if kind == "message":
            part: Body = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._open = {
                "id": new_id("msg_"),
                "type": kind,
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
        else:
            part = {"type": "reasoning_text", "text": ""}
            self._open = {"id": new_id("rs_"), "type": kind, "summary": [], "status": "in_progress", "content": []}
        added = self._event("response.output_item.added", output_index=len(self._output), item=self._open)
        self._open["content"] = [part]
        return [added, self._event("response.content_part.added", **self._location(), part=part)]

    def _close(self) -> list[str]:
        if self._open is None:
            return []
        item = self._open
        cut = self._answer.finish == "length"
        item["status"] = "incomplete" if cut and item["type"] == "message" else "completed"
        (part,) = item["content"]
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        events = [
            self._event(f"response.{part['type']}.done", **self._location(), text=part["text"], **more),
            self._event("response.content_part.done", **self._location(), part=part),
            self._event("response.output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._open = None
        return events

    def _call(self, call: Call) -> list[str]:
        name = new_id("call_")
        named = self._origins.get(call.name, {"name": call.name})
        item = {"id": new_id("fc_"), "type": "function_call", "call_id": name, **named}
        location = {"output_index": len(self._output), "item_id": item["id"]}
        begun = {**item, "arguments": "", "status": "in_progress"}
        done = {**item, "arguments": call.arguments, "status": "completed"}
        self._output.append(done)
        index = location["output_index"]
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **location, delta=call.arguments),
            self._event(
                "response.function_call_arguments.done", **location, name=named["name"], arguments=call.arguments
            ),
            self._event("response.output_item.done", output_index=index, item=done),
        ]

    def _location(self) -> Body:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        made = f"event: {kind}\n{event({'type': kind, 'sequence_number': self._number, **fields})}"
        self._number += 1
        return made

    def _usage(self) -> Body:
        prompt, made = len(self._answer.job.prompt), self._answer.count
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._answer.job.reused},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self._answer.reasoning_count},
            "total_tokens": prompt + made,
        }


def event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _call(call: Call) -> Body:
    return {
        "id": new_id("call_"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _shown_tool(tool: Body) -> Body:
    """A tool as the Responses API shows it: a function has no inner level. Others come back as they were given."""
    kind = tool.get("type", "function")
    return {"type": kind, **tool.get("function", tool)} if kind == "function" else tool


def _usage(answers: Sequence[Answer], prompts: int | None = None, per_prompt: int | None = None) -> Body:
    """``prompts``: tokens of all prompts; None for a single one. ``per_prompt``: answers to each; None for all."""
    prompts = len(answers[0].job.prompt) if prompts is None else prompts
    made = sum(answer.count for answer in answers)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": made,
        "total_tokens": prompts + made,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.job.reused for answer in answers[:: per_prompt or len(answers) or 1])
        },
    }


def _shown(token: bytes, prefix: str = "") -> str:
    """A token as text; as ``\\xf0\\x9f`` where it is a part of a character, after ``prefix`` as OpenAI's APIs do."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)


def _mean_logprob(collected: Collected) -> float:
    return sum(each.logprob for each in collected.logprobs) / max(1, len(collected.logprobs))


def _not_empty(inputs: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    if inputs["input_ids"].shape[-1] == 0:
        raise RequestError(f"{field} has no tokens: give some text.", field)
    return inputs
