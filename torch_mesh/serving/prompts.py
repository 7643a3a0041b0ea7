"""Convert the messages of a request to inputs of the model, by its chat template."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torch_mesh.serving.errors import RequestError
from torch_mesh.serving.left_out import leave_out
from torch_mesh.serving.requests import RESERVED_ARGUMENTS, check_names, is_parts, wrong
from torch_mesh.serving.response_tools import qualified_name
from torch_mesh.serving.tool_formats import AnswerFormat, answer_format

NO_TEMPLATE = (
    "has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), as models that are not "
    "made for chats: put one beside its tokenizer (for Qwen's models ChatML, which docs/serving.md has), or use a "
    "server's /v1/completions."
)
_ROLES = ("system", "user", "assistant", "tool")
_INSTRUCTING = ("system", "developer")
# Names of a message's fields. The template may read others.
_NAMES = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
# gpt-oss's template raises this. Content beside a call is reasoning there.
_ONE_TEXT = "Cannot pass both content and thinking in an assistant message with tool calls"
_TEXTS = ("text", "input_text", "output_text")
# The processor's component for each kind of part, and the field with its content.
_MEDIA = {
    "image_url": ("image_processor", "image"),
    "input_image": ("image_processor", "image"),
    "video_url": ("video_processor", "video"),
    "audio_url": ("feature_extractor", "audio"),
    "input_audio": ("feature_extractor", "audio"),
}


def template_of(processor: Any) -> str | None:
    """The chat template of a processor or a tokenizer; several are joined."""
    tokenizer = getattr(processor, "tokenizer", processor)
    found = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    return "\n".join(found.values()) if isinstance(found, dict) else found


def _reads(template: str | None, variable: str) -> bool:
    return re.search(rf"\b{re.escape(variable)}\b", template or "") is not None


def check_template_arguments(template: str | None, options: Mapping[str, Any]) -> None:
    """Raises ValueError for a variable of ``--chat-template-kwargs`` that the server sets or ``template`` does not
    read. ``options``: those of a server."""
    for name in options["arguments"]:
        if name in RESERVED_ARGUMENTS:
            problem = "the server sets: give variables of the chat template only"
        elif not _reads(template, name) and not (name == "enable_thinking" and options["reasoning"] != "auto"):
            problem = "this model's chat template does not read: leave it out"
        else:
            continue
        raise ValueError(f"--chat-template-kwargs has {name!r}, which {problem}")


class Prompts:
    """Renders and tokenizes for one model.

    Args:
        name: of the model, for errors.
        processor: of transformers: a tokenizer, or one for pictures and sound, too.
        template_arguments: variables of the chat template, unless a request gives others.
        fetch_media: fetch pictures, videos and sound from http(s) addresses.
    """

    def __init__(
        self, name: str, processor: Any, model: Any, template_arguments: Mapping[str, Any], fetch_media: bool = False
    ) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self._name = name
        self._model_type, self._device = model.config.model_type, model.device
        self.default_arguments = dict(template_arguments)
        self._fetches = fetch_media

    @property
    def template(self) -> str | None:
        return template_of(self.processor)

    @property
    def special_ids(self) -> set[int]:
        """Ids of tokens that are no text, such as those that begin and end messages."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {*self.tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}

    @property
    def format(self) -> AnswerFormat:
        return answer_format(self.template, self._model_type)

    def encode_text(self, text: str) -> dict[str, Any]:
        return dict(self.tokenizer(text, return_tensors="pt").to(self._device))

    def encode_tokens(self, ids: Sequence[int]) -> dict[str, Any]:
        found = torch.tensor([list(ids)], device=self._device)
        return {"input_ids": found, "attention_mask": torch.ones_like(found)}

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        field: str,
        continues: bool = False,
    ) -> dict[str, Any]:
        """Inputs for the model's turn after ``messages``.

        Args:
            tools: in the form of chat completions.
            arguments: variables of the chat template.
            field: field of the request with the messages.
            continues: the last message is the beginning of the answer.

        Raises RequestError for messages that the template or the model does not accept.
        """
        template = self.template
        if not template:
            raise RequestError(f"This model {self._name} {NO_TEMPLATE}", field)
        if tools and "tools" not in template:
            raise RequestError("This model's chat template has no tools: ask without them.", "tools")
        messages = [_without_parsed(message) for message in messages]
        for index, message in enumerate(messages):
            self._check_message(f"{field}[{index}]", message, field)
        rendered = [self._message(message, template, field) for message in messages]
        written = self.format.tools
        if written is not None and written.shows_ids:
            _number_calls(rendered)
        joined = _join_instructions(rendered)

        def apply(messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
            return self.processor.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **options,
                **{**self.default_arguments, **arguments},
            )

        def render(**options: Any) -> Any:
            try:
                return apply(rendered, **options)
            except TypeError:  # DeepSeek's templates join arguments to text; most iterate over a mapping
                return apply(_with_text_arguments(rendered), **options)

        later = {index + joined: each for index, each in enumerate(rendered) if index and each["role"] in _INSTRUCTING}
        rendered = _with_media_apart(rendered)
        try:
            inputs = render(return_tensors="pt", return_dict=True, tokenize=True)
            shown = render(tokenize=False) if later else ""
        except MemoryError:
            raise
        except Exception as error:  # templates and processors may raise anything
            if _has_media(rendered) and _succeeds(lambda: render(tokenize=False)):  # which opens none
                raise RequestError(
                    f"{field} has a picture, video or sound that cannot be read: {error}.", field
                ) from error
            raise RequestError(
                f"The model's chat template does not accept this request: {error}. "
                f"Change {field}, tools or chat_template_kwargs.",
                field,
            ) from error
        for index, message in later.items():
            if not all(text.strip() in shown for text in _texts(message["content"])):
                raise RequestError(
                    f"{field}[{index}] is a {messages[index]['role']} message that the model's chat template leaves "
                    "out there: put it first.",
                    field,
                )
        return dict(inputs.to(self._device))

    def decode_end(self, inputs: Mapping[str, Any]) -> str:
        """The last tokens of a prompt as text."""
        text: str = self.tokenizer.decode(inputs["input_ids"][0, -16:].tolist())
        return text

    def _check_address(self, kind: str, address: str, field: str) -> None:
        """Raises RequestError for an address that is not to be opened: transformers would open local files too.

        ``kind``: what it is of, one of ``_MEDIA``.
        """
        schemes: tuple[str, ...] = ("http://", "https://") if self._fetches else ()
        if _MEDIA[kind][1] != "video":
            schemes += ("data:",)
            needed = 'its data, as in "data:image/png;base64,..."'
            needed += ", or an http(s) address" if self._fetches else ", as --fetch-media is off"
        elif self._fetches:
            needed = "an http(s) address, the only kind that transformers reads videos from"
        else:
            needed = "none: transformers reads videos from http(s) addresses only, and --fetch-media is off"
        if not address.startswith(schemes):
            raise wrong(field, f"{kind} of {field}", address, needed)

    def reads(self, variable: str) -> bool:
        return _reads(self.template, variable)

    def _check_message(self, where: str, message: Mapping[str, Any], field: str) -> None:
        """Raises RequestError for a role or a field that the chat template does not read."""
        role = message["role"]
        if role not in (*_ROLES, "developer") and not re.search(rf"['\"]{re.escape(role)}['\"]", self.template or ""):
            raise wrong(field, f"{where}.role", role, f"{', '.join(_ROLES)} or developer")
        check_names(where, message, [*_NAMES, *filter(self.reads, message)], field)

    def _message(self, message: Mapping[str, Any], template: str, field: str) -> dict[str, Any]:
        made = {name: copy.deepcopy(value) for name, value in message.items() if value is not None}
        if made["role"] == "developer" and "developer" not in template:
            made["role"] = "system"
        for function in _functions(made):
            arguments = function.get("arguments")
            if arguments is None or isinstance(arguments, str):
                function["arguments"] = json.loads((arguments or "").strip() or "{}")
        content = made.get("content")
        if isinstance(content, list):
            parts = [self._part(part, field, made["role"]) for part in content]
            if all(part["type"] == "text" for part in parts) and self.processor is self.tokenizer:
                made["content"] = "\n".join(part["text"] for part in parts)
            else:
                made["content"] = parts
        elif content is None:
            made["content"] = ""
        elif self.processor is not self.tokenizer:
            made["content"] = [{"type": "text", "text": content}]
        if _ONE_TEXT in template and made.get("tool_calls") and "thinking" not in made:
            made["thinking"] = "\n\n".join(filter(None, [made.pop("reasoning_content", ""), *_texts(made["content"])]))
            made["content"] = ""
        return made

    def _part(self, part: Mapping[str, Any], field: str, role: str) -> dict[str, Any]:
        kind = part["type"]
        if kind in _TEXTS:
            return {"type": "text", "text": part["text"]}
        if kind == "refusal":
            return {"type": "text", "text": part["refusal"]}
        needed, name = _MEDIA[kind]
        if getattr(self.processor, needed, None) is None:
            if role == "tool" and name == "image":  # the client of an agent has no other way on
                leave_out("pictures in results of tools", "This model reads no pictures: it is told where one was.")
                return {"type": "text", "text": "[picture left out: this model reads text]"}
            raise RequestError(
                f"{field} has a part of type {kind}, which this model does not support: give text.", field
            )
        given = part["image_url" if kind == "input_image" else kind]
        if kind == "input_audio":  # without "data:", base64 text may be a path
            data, encoding = (given["data"], given.get("format")) if isinstance(given, dict) else (given, None)
            url = data if data.startswith("data:") else f"data:audio/{encoding or 'wav'};base64,{data}"
        else:
            url = given["url"] if isinstance(given, dict) else given
        self._check_address(kind, url, field)
        return {"type": name, "url": url}


def _without_parsed(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out ``parsed``, in which openai's client repeats the content of an answer in JSON."""
    if message["role"] != "assistant":
        return message
    return {name: value for name, value in message.items() if name != "parsed"}


def _functions(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Names and arguments of a message's calls."""
    return [call.get("function") or call for call in message.get("tool_calls", ())]


def _number_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Make the id of each call ``functions.NAME:N``, with N counted over the conversation, also in its result."""
    count = itertools.count()
    ids: dict[Any, str] = {}
    for message in messages:
        for call, function in zip(message.get("tool_calls", ()), _functions(message), strict=True):
            made = f"functions.{function['name']}:{next(count)}"
            ids[call.get("id")] = call["id"] = made
        if "tool_call_id" in message:
            message["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])


def _with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    found = copy.deepcopy(messages)
    for message in found:
        for function in _functions(message):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return found


def _with_media_apart(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move pictures and sound from results of tools into the user's message after them: many templates show only the
    text of a result."""
    found: list[dict[str, Any]] = []
    media: list[Any] = []
    for message in messages:
        if media and message["role"] == "user":
            message["content"], media = [*media, *message["content"]], []
        elif media and message["role"] != "tool":
            found.append({"role": "user", "content": media})
            media = []
        if message["role"] == "tool" and isinstance(message["content"], list):
            media += [part for part in message["content"] if part["type"] != "text"]
            message["content"] = [{"type": "text", "text": "\n".join(_texts(message["content"]))}]
        found.append(message)
    return [*found, {"role": "user", "content": media}] if media else found


def _join_instructions(messages: list[dict[str, Any]]) -> int:
    """Join system and developer messages at the beginning into the first one, the only one that many templates read.

    Returns the number of messages that are gone. One with a name stays.
    """
    instructing = (each["role"] in _INSTRUCTING and each.keys() == {"role", "content"} for each in messages)
    count = len(list(itertools.takewhile(bool, instructing)))
    if count < 2:
        return 0
    contents = [each["content"] for each in messages[:count]]
    texts = all(isinstance(each, str) for each in contents)
    messages[0]["content"] = "\n\n".join(contents) if texts else [part for each in contents for part in each]
    del messages[1:count]
    return count - 1


def _has_media(messages: Iterable[Mapping[str, Any]]) -> bool:
    contents = (message["content"] for message in messages)
    return any(part["type"] != "text" for content in contents if not isinstance(content, str) for part in content)


def _succeeds(work: Callable[[], Any]) -> bool:
    try:
        work()
    except Exception:  # noqa: BLE001
        return False
    return True


def _texts(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def response_messages(content: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Messages of chat completions for the input of the Responses API, which has been checked."""
    if isinstance(content, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    elif is_parts(content):
        messages = [{"role": "user", "content": list(content)}]
    else:
        messages = list(_messages_of_items(content))
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    return messages


def _messages_of_items(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []

    def assistant() -> dict[str, Any]:
        """Collects a turn of the model, whose reasoning, text and calls are separate items."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        if thoughts:
            earlier = messages[-1].get("reasoning_content")
            messages[-1]["reasoning_content"] = "\n\n".join(filter(None, [earlier, *thoughts]))
            thoughts.clear()
        return messages[-1]

    for item in items:
        kind = item.get("type")
        if kind == "reasoning":
            text = "".join(part["text"] for part in item.get("content") or ())
            thoughts += [text] if text else []
        elif item.get("role") == "assistant":
            messages.append({"role": "assistant", "content": item.get("content")})
            assistant()
        elif kind == "function_call" and "role" not in item:
            call = {"name": qualified_name(item), "arguments": item.get("arguments")}
            calls = assistant().setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": call})
        else:
            if thoughts:
                assistant()
            if "role" in item:
                messages.append({"role": item["role"], "content": item.get("content")})
            else:
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item.get("output")})
    if thoughts:
        assistant()
    return messages
