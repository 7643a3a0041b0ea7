"""Anthropic's API: messages, as a body or a stream, and token counts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch_mesh.serving.answer_parser import Reasoning
from torch_mesh.serving.answers import Answer, Part, whole_body
from torch_mesh.serving.errors import RequestError, ThreadError, describe, for_anthropic
from torch_mesh.serving.generate_options import BOOL, FRACTION, TEMPERATURE, Kind, whole
from torch_mesh.serving.left_out import leave_out
from torch_mesh.serving.openai_api import event, new_id
from torch_mesh.serving.requests import (
    ANY,
    FUNCTION,
    LIST,
    NAME,
    OBJECT,
    TEXT,
    check,
    check_object,
    known_fields,
    leave_out_tools,
    only,
    wrong,
)
from torch_mesh.serving.service import Service, Tools, json_schema
from torch_mesh.serving.tool_formats import Call

Body = dict[str, Any]

_TEXT_OR_LIST = Kind("text, or a list of blocks", lambda value: isinstance(value, str | list))
_ROLE = Kind("user, assistant or system", lambda value: value in ("user", "assistant", "system"))
_FIELDS: dict[str, Kind] = {
    "messages": Kind("a list of messages, one at least", lambda value: isinstance(value, list) and value != []),
    "max_tokens": whole(1),
    "system": _TEXT_OR_LIST,
    "stop_sequences": Kind(
        "a list of texts", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)
    ),
    "stream": BOOL,
    "temperature": TEMPERATURE,
    "top_p": FRACTION,
    "top_k": whole(0),
    "tools": LIST,
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "output_config": OBJECT,
    "metadata": OBJECT,  # names the user; changes no answer
    "service_tier": only("auto", "standard_only"),
    "cache_control": OBJECT,  # no effect here or in blocks: keys and values are kept anyway
    "container": only(),
    "context_management": only({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),  # nothing is cleared
    "mcp_servers": only([]),
}
_BLOCK_FIELDS = {"type": ANY, "cache_control": ANY}
# The blocks of a message, by role and type: their needed fields, and others.
_Blocks = dict[str, tuple[dict[str, Kind], dict[str, Kind]]]
_PARTS: _Blocks = {"text": ({"text": TEXT}, _BLOCK_FIELDS), "image": ({"source": OBJECT}, _BLOCK_FIELDS)}
_RESULT: _Blocks = {**_PARTS, "tool_reference": ({"tool_name": NAME}, _BLOCK_FIELDS)}
_BLOCKS: dict[str, _Blocks] = {
    "user": {
        **_PARTS,
        "tool_result": ({"tool_use_id": TEXT}, {"content": _TEXT_OR_LIST, "is_error": BOOL, **_BLOCK_FIELDS}),
    },
    "assistant": {
        "text": _PARTS["text"],
        "tool_use": ({"id": TEXT, "name": TEXT, "input": OBJECT}, _BLOCK_FIELDS),
        "thinking": ({"thinking": TEXT}, {"signature": TEXT, **_BLOCK_FIELDS}),
    },
}
_TOOL_FIELDS = {
    "type": only("custom"),
    "description": TEXT,
    "strict": BOOL,
    "cache_control": ANY,
    "eager_input_streaming": BOOL,  # when arguments are delivered, which are never validated before
    "allowed_callers": only(["direct"]),
    "defer_loading": BOOL,
}
_DISPLAY = {"display": only("summarized", "omitted", "updates")}  # updates: text between calls, and no reasoning
_THINKING: dict[str, dict[str, Kind]] = {  # its fields, by type
    "enabled": {"budget_tokens": whole(1), **_DISPLAY},
    "adaptive": _DISPLAY,
    "disabled": {},
}
_EFFORT = only("low", "medium", "high", "xhigh", "max")
# Claude Code's first block of `system`. It differs in each request, and a prompt that begins with it is never reused.
_BILLING = "x-anthropic-billing-header:"
# Begins the signature of an omitted block of reasoning, which carries its text to the next turn.
_OMITTED = "torch-mesh:"
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Anthropic:
    """Answers requests of this API through a Service. Each method returns a body, or the events of a stream.

    Invalid requests raise RequestError. Errors of the computation are raised, or are the last event of a stream.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def messages(self, body: Mapping[str, Any]) -> Body | AsyncGenerator[str, None]:
        given = await asyncio.to_thread(self._checked, body, ("messages", "max_tokens"))

        def prepare() -> Answer:
            inputs, tools, continues = self._inputs(given)
            output = given.get("output_config", {})
            (answer,) = self._service.answers(
                inputs,
                given | {"stop": [text for text in given.get("stop_sequences", ()) if text]},
                prompt_field="messages",
                limit_field="max_tokens",
                format=self._service.prompts.format,
                continues=continues,
                tools=tools,
                schema=json_schema(output["format"], "output_config") if output.get("format") else None,
            )
            return answer

        answer = await asyncio.to_thread(prepare)
        omits = given.get("thinking", {}).get("display") in ("omitted", "updates")
        message = _Message(self._service.served, answer, omits)
        if given.get("stream"):
            return message.events()
        return await whole_body(answer, message)

    async def count_tokens(self, body: Mapping[str, Any]) -> Body:
        given = await asyncio.to_thread(self._checked, body, ("messages",))
        inputs, *_ = await asyncio.to_thread(self._inputs, given)
        return {"input_tokens": inputs["input_ids"].shape[-1]}

    def _checked(self, body: Mapping[str, Any], needed: Sequence[str]) -> Body:
        if body.get("thread") is not None:
            raise ThreadError
        given = known_fields(body, _FIELDS, needed, self._service.served)
        check_object("metadata", given.get("metadata", {}), "metadata", {}, {"user_id": TEXT})
        return given

    def _inputs(self, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tools | None, bool]:
        """Inputs of the model, the tools that it may call, and whether the last message begins the answer.

        Raises RequestError.
        """
        tools, functions = self._tools(given)
        messages = _joined(_messages(given, functions))
        output = given.get("output_config", {})
        check_object("output_config", output, "output_config", {}, {"format": OBJECT, "effort": _EFFORT})
        effort = output.get("effort")
        if effort is not None and not self._service.prompts.reads("reasoning_effort"):
            if effort != "high":  # the API's default, which clients send to all models
                leave_out("output_config.effort", "This model's chat template has no setting for the effort.")
            effort = None
        arguments = self._service.template_arguments({}, effort, "output_config") | self._thinking(given)
        continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        shown = None if tools is None else tools.shown
        inputs = self._service.prompts.encode_messages(messages, shown, arguments, "messages", continues)
        if inputs["input_ids"].shape[-1] == 0:
            raise RequestError("messages has no tokens: give some text.", "messages")
        return inputs, tools, continues

    def _thinking(self, given: Mapping[str, Any]) -> Body:
        """Variables of the chat template for ``thinking``. Raises RequestError."""
        prompts = self._service.prompts
        thinking = given.get("thinking")
        if thinking is None:  # none, as in Anthropic's API, unless --reasoning or --chat-template-kwargs say otherwise
            off = prompts.reads("enable_thinking") and "enable_thinking" not in prompts.default_arguments
            return {"enable_thinking": False} if off else {}
        kind = thinking.get("type")
        if kind not in list(_THINKING):
            raise wrong("thinking", "thinking.type", kind, " or ".join(_THINKING))
        check_object("thinking", thinking, "thinking", {"type": ANY}, _THINKING[kind])
        has_switch = prompts.reads("enable_thinking")
        if kind == "disabled" and prompts.format.reasons and not has_switch:
            raise RequestError("This model's chat template has no switch for thinking: leave it out.", "thinking")
        if kind == "enabled" and not prompts.format.reasons:
            leave_out("thinking", "This model does not reason.")
        elif (thinking.get("budget_tokens") or math.inf) < given.get("max_tokens", 0):
            leave_out("thinking.budget_tokens", "Reasoning has no budget beside max_tokens.")
        return {"enable_thinking": kind == "enabled"} if has_switch and kind != "adaptive" else {}

    def _tools(self, given: Mapping[str, Any]) -> tuple[Tools | None, dict[str, Body]]:
        """``Service.tools`` of these fields, converted to OpenAI's, and the functions by name.

        Deferred tools are shown by ``tool_reference`` alone, unless none of the functions could search for them.
        """
        functions: list[Body] = []
        others: list[str] = []
        for index, tool in enumerate(given.get("tools", ())):
            where = f"tools[{index}]"
            check(where, tool, OBJECT, "tools")
            if (kind := tool.get("type")) not in (None, "custom"):
                check(f"{where}.type", kind, TEXT, "tools")
                others.append(kind)
                continue
            check_object(where, tool, "tools", {"name": FUNCTION, "input_schema": OBJECT}, _TOOL_FIELDS)
            function = {"name": tool["name"], "parameters": tool["input_schema"]}
            passed = ("description", "strict", "defer_loading")
            function |= {name: tool[name] for name in passed if tool.get(name) is not None}
            functions.append(function)
        deferred = {function["name"] for function in functions if function.get("defer_loading")}
        if len(deferred) == len(functions) or any(kind.startswith("tool_search_tool") for kind in others):
            deferred = set()
        for function in functions:
            if function["name"] in deferred:
                function.pop("defer_loading")
        leave_out_tools(others, functions)
        choice = given.get("tool_choice", {"type": "auto"})
        kind = choice.get("type")
        named = {"type": "function", "function": {"name": choice.get("name")}}
        meanings: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        if not isinstance(kind, str) or kind not in meanings:
            raise wrong("tool_choice", "tool_choice.type", kind, "auto, any, tool or none")
        needed = {"name": TEXT} if kind == "tool" else {}
        optional = {"type": ANY} if kind == "none" else {"type": ANY, "disable_parallel_tool_use": BOOL}
        check_object("tool_choice", choice, "tool_choice", needed, optional)
        several = not choice.get("disable_parallel_tool_use")
        tools = self._service.tools({"tools": functions, "tool_choice": meanings[kind], "parallel_tool_calls": several})
        if tools is not None:
            shown = [tool for tool in tools.shown if tool["function"]["name"] not in deferred]
            tools = dataclasses.replace(tools, shown=shown)
        return tools, {function["name"]: function for function in functions}


def _messages(given: Mapping[str, Any], functions: Mapping[str, Body]) -> Iterator[Body]:
    """Convert to the form of chat completions. ``functions``: the tools by name.

    A system message in ``messages`` becomes a user's: templates refuse or omit a late one, and moving it to the
    beginning would change the prompt that earlier turns have computed.
    """
    if system := _system(given.get("system", "")):
        yield {"role": "system", "content": system}
    for index, message in enumerate(given["messages"]):
        where = f"messages[{index}]"
        check_object(where, message, "messages", {"role": _ROLE, "content": _TEXT_OR_LIST})
        role, content = message["role"], message["content"]
        if role == "system":
            yield {"role": "user", "content": _texts(f"{where}.content", content, "messages")}
        elif isinstance(content, str):
            yield {"role": role, "content": content}
        else:
            yield from _turns(where, role, content, functions)


def _joined(messages: Iterable[Body]) -> list[Body]:
    """Join messages to those of the same role before them, as the API does: templates may require that roles alternate.

    The next turn's are joined alike, so that its prompt begins with this one.
    """
    joined: list[Body] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if last.keys() - {"reasoning_content"} == {"role", "content"} and last["role"] == message["role"]:
            made = last | message | {"content": _joined_contents(last["content"], message["content"])}
            if reasoning := last.get("reasoning_content", "") + message.get("reasoning_content", ""):
                made["reasoning_content"] = reasoning
            joined[-1] = made
        else:
            joined.append(message)
    return joined


def _joined_contents(first: str | Sequence[Any], second: str | Sequence[Any]) -> str | Sequence[Any]:
    if not first or not second:
        return first or second
    *before, last = _parts(first)
    following, *after = _parts(second)
    if last["type"] == following["type"] == "text":  # templates write nothing between parts
        return [*before, {"type": "text", "text": f"{last['text']}\n{following['text']}"}, *after]
    return [*before, last, following, *after]


def _parts(content: str | Sequence[Any]) -> Sequence[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _turns(where: str, role: str, blocks: Sequence[Any], functions: Mapping[str, Body]) -> Iterator[Body]:
    """Convert a message. Each tool's result becomes a message before it."""
    parts: list[Body] = []
    calls: list[Body] = []
    reasoning = ""
    results = 0
    for index, block in enumerate(blocks):
        path = f"{where}.content[{index}]"
        kind = _checked_kind(path, block, _BLOCKS[role])
        if kind in _PARTS:
            parts.append(_part(path, block))
        elif kind == "tool_result":
            found, is_error = block.get("content") or "", block.get("is_error", False)
            content = _result(f"{path}.content", found, is_error, functions)
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
            results += 1
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
        else:
            signature = block.get("signature") or ""
            reasoning += signature.removeprefix(_OMITTED) if signature.startswith(_OMITTED) else block["thinking"]
    if not parts and results:
        return
    message: Body = {"role": role, "content": parts if role == "user" else "\n".join(part["text"] for part in parts)}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = reasoning
    yield message


def _checked_kind(where: str, block: Any, kinds: _Blocks) -> str:
    check(where, block, OBJECT, "messages")
    kind: Any = block.get("type")
    if kind not in list(kinds):
        raise wrong("messages", f"{where}.type", kind, " or ".join(kinds))
    check_object(where, block, "messages", *kinds[kind])
    return str(kind)


def _part(where: str, block: Mapping[str, Any], functions: Mapping[str, Body] = {}) -> Body:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] == "tool_reference":
        name = block["tool_name"]
        if name not in functions:
            raise wrong("messages", f"{where}.tool_name", name, "the name of one of tools")
        shown = {key: value for key, value in functions[name].items() if key != "strict"}
        return {"type": "text", "text": f"<function>{json.dumps(shown, ensure_ascii=False)}</function>"}
    return {"type": "image_url", "image_url": {"url": _address(where, block["source"])}}


def _result(
    where: str, content: str | Sequence[Any], is_error: bool, functions: Mapping[str, Body]
) -> str | list[Body]:
    """The content of a tool's message: its text, and then its pictures."""
    blocks = _parts(content)
    for index, block in enumerate(blocks):
        _checked_kind(f"{where}[{index}]", block, _RESULT)
    parts = [_part(f"{where}[{index}]", block, functions) for index, block in enumerate(blocks)]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    text = f"Error: {text}" if is_error else text  # templates have no field for it
    pictures = [part for part in parts if part["type"] != "text"]
    return [{"type": "text", "text": text}, *pictures] if pictures else text


def _system(content: Any) -> str:
    text = _texts("system", content, "system")
    if isinstance(content, str):
        return text
    return "\n".join(block["text"] for block in content if not block["text"].startswith(_BILLING))


def _texts(where: str, content: Any, field: str) -> str:
    check(where, content, _TEXT_OR_LIST, field)
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        path = f"{where}[{index}]"
        check_object(path, block, field, {"type": only("text"), "text": TEXT}, {"cache_control": ANY})
    return "\n".join(block["text"] for block in content)


def _address(where: str, source: Mapping[str, Any]) -> str:
    where = f"{where}.source"
    if source.get("type") == "base64":
        check_object(where, source, "messages", {"type": TEXT, "media_type": TEXT, "data": TEXT})
        return f"data:{source['media_type']};base64,{source['data']}"
    check_object(where, source, "messages", {"type": only("base64", "url"), "url": TEXT})
    return str(source["url"])


class _Message:
    """An answer as blocks of content, whose opening, growth and closing are events.

    ``omits``: blocks of reasoning stay empty, and their signatures have the text.
    """

    def __init__(self, served: str, answer: Answer, omits: bool = False) -> None:
        self._served, self._answer, self._omits = served, answer, omits
        self._id = new_id("msg_")
        self._blocks: list[Body] = []
        self._open = False
        self._omitted = ""

    def body(self, ended: bool = True) -> Body:
        answer = self._answer
        stop = answer.stopped_by if answer.finish == "stop" else None  # clients run calls after tool_use alone
        reason = "stop_sequence" if stop is not None else _STOPS[answer.finish]
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._served,
            "content": list(self._blocks),
            "stop_reason": reason if ended else None,
            "stop_sequence": stop if ended else None,
            "usage": self._usage(),
        }

    async def events(self) -> AsyncGenerator[str, None]:
        yield _event("message_start", message=self.body(ended=False))
        try:
            async with contextlib.aclosing(self._answer.parts()) as parts:
                async for part in parts:
                    for each in self.add(part):
                        yield each
        except Exception as error:  # noqa: BLE001  the status has been sent
            body, status = describe(error)
            yield f"event: error\n{event(for_anthropic(body, status))}"
            return
        for each in self.close():
            yield each
        body = self.body()
        delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=delta, usage=body["usage"])
        yield _event("message_stop")

    def add(self, part: Part) -> list[str]:
        events: list[str] = []
        for piece in part.pieces:
            if isinstance(piece, Call):
                block = {"type": "tool_use", "id": new_id("toolu_"), "name": piece.name, "input": {}}
                delta: Body = {"type": "input_json_delta", "partial_json": piece.arguments}
                events += [*self.close(), *self._begin(block), self._delta(delta)]
                self._blocks[-1] = block | {"input": json.loads(piece.arguments)}
                events += self.close()
                continue
            kind = "thinking" if isinstance(piece, Reasoning) else "text"
            if not self._open or self._blocks[-1]["type"] != kind:
                signature = {"signature": ""} if kind == "thinking" else {}
                events += [*self.close(), *self._begin({"type": kind, kind: "", **signature})]
            if kind == "thinking" and self._omits:
                self._omitted += piece.text
                continue
            self._blocks[-1][kind] += piece.text
            events.append(self._delta({"type": f"{kind}_delta", kind: piece.text}))
        return events

    def _begin(self, block: Body) -> list[str]:
        self._blocks.append(dict(block))
        self._open = True
        return [_event("content_block_start", index=len(self._blocks) - 1, content_block=block)]

    def close(self) -> list[str]:
        if not self._open:
            return []
        self._open = False
        events: list[str] = []
        if self._omitted:
            self._blocks[-1]["signature"] = _OMITTED + self._omitted
            events.append(self._delta({"type": "signature_delta", "signature": _OMITTED + self._omitted}))
            self._omitted = ""
        return [*events, _event("content_block_stop", index=len(self._blocks) - 1)]

    def _delta(self, delta: Body) -> str:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _usage(self) -> Body:
        job = self._answer.job
        return {
            "input_tokens": len(job.prompt) - job.reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": job.reused,
            "output_tokens": self._answer.count,
        }


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\n{event({'type': kind, **fields})}"
