"""A conversation in the terminal, on the display and with the commands of transformers chat.

The loop of transformers chat ends, and loses the conversation, at a request that the server refuses, at a wrong option
and at Ctrl-C. This one says what was wrong and goes on.
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import AsyncInferenceClient
from huggingface_hub.errors import HTTPError
from rich.markup import escape
from transformers import GenerationConfig
from transformers.cli.chat import (
    DEFAULT_EXAMPLES,
    RichInterface,
    get_username,
    new_chat_history,
    parse_generate_flags,
    save_chat,
)

_DEFAULTS = {"do_sample": True}  # as transformers chat. The server has the limit of tokens.
_CONTINUE = "Please continue. Do not repeat text."


class Conversation:
    """A conversation with ``model``, which the server at ``address`` serves.

    ``options``: options of generate. ``save_folder``: the folder of ``!save`` without a file.
    """

    def __init__(
        self, model: str, address: str, options: dict[str, Any], *, system_prompt: str | None, save_folder: str
    ) -> None:
        self._model, self._address = model, address
        self._system_prompt, self._save_folder = system_prompt, save_folder
        self._options = GenerationConfig(**_DEFAULTS)
        self._options.update(**options)
        self._messages = new_chat_history(system_prompt)
        self._display = RichInterface(escape(model), get_username(), address)

    def run(self) -> None:
        """Answer lines until ``!exit``, the end of the input, or Ctrl-C at the prompt. Ctrl-C stops an answer."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # _answer refuses a line that is not UTF-8
        self._display.clear()
        self._display.print_help(minimal=True)
        while True:
            try:
                line = self._display.input()
            except (EOFError, KeyboardInterrupt):
                return
            if line == "!exit":
                return
            try:
                question: str | None = self._command(line) if line.startswith("!") else line
                while question is not None:
                    question = self._answer(question)
            except KeyboardInterrupt:
                self._display.print_color("Stopped.", "yellow")
            except (HTTPError, OSError, ValueError) as error:
                self._display.print_color(escape(_message(error)), "red")

    def _command(self, line: str) -> str | None:
        """Run a command. Return a question that it asks, if any."""
        name, *arguments = line.split()
        if name == "!example" and len(arguments) == 1:
            return self._example(arguments[0])
        if name == "!set" and arguments:
            self._options.update(**parse_flags(arguments))
        elif name == "!save" and len(arguments) <= 1:
            self._save(*arguments)
        elif line == "!clear":
            self._messages = new_chat_history(self._system_prompt)
            self._display.clear()
        elif line == "!status":
            self._display.print_status(escape(str(self._options)))  # type: ignore[arg-type]  # it is formatted
        else:
            if line != "!help":
                self._display.print_color(escape(f"{line!r} is not a command:"), "red")
            self._display.print_help()
        return None

    def _example(self, name: str) -> str:
        if name not in DEFAULT_EXAMPLES:
            raise ValueError(f"There is no example {name!r}. Give one of {', '.join(DEFAULT_EXAMPLES)}.")
        question = DEFAULT_EXAMPLES[name]["text"]
        self._messages = new_chat_history(self._system_prompt)
        self._display.clear()
        self._display.print_user_message(escape(question))
        return question

    def _save(self, file: str | None = None) -> None:
        # A model given by path would replace the folder.
        name = Path(self._model).resolve().name if Path(self._model).exists() else self._model
        default = Path(self._save_folder, name, time.strftime("chat_%Y-%m-%d_%H-%M-%S.json"))
        path = (default if file is None else Path(file)).absolute()
        settings = {"base_url": self._address, "model_id": self._model, "config": self._options.to_dict()}
        save_chat(str(path), self._messages, settings)
        self._display.print_color(escape(f"Chat saved to {path}"), "green")

    def _answer(self, question: str) -> str | None:
        """Ask a question. Return the next one, if the user wants more of an answer that was cut off.

        A question without an answer leaves the conversation as it was.
        """
        try:
            question.encode()
        except UnicodeEncodeError as error:
            raise ValueError("The line has bytes that are not UTF-8.") from error
        asked = [*self._messages, {"role": "user", "content": question}]
        pieces: list[str] = []
        reason = None
        try:
            reason = asyncio.run(self._ask(asked, pieces))
        except KeyboardInterrupt:
            self._display.print_color("Stopped.", "yellow")
        answer = "".join(pieces)
        if answer:
            self._messages = [*asked, {"role": "assistant", "content": answer}]
        elif reason == "length":
            self._display.print_color(
                "The token limit was reached within the reasoning, before an answer: !set max_new_tokens=N gives it "
                "more, and the question can be asked again.",
                "yellow",
            )
        if not answer or reason != "length":
            return None
        self._display.print_color("Generation stopped after reaching the token limit.", "yellow")
        try:
            more = self._display.confirm("Continue generating?")
        except (EOFError, KeyboardInterrupt):
            more = False
        if not more:
            return None
        self._display.print_user_message(_CONTINUE)
        return _CONTINUE

    async def _ask(self, messages: list[dict[str, str]], pieces: list[str]) -> str | None:
        """Show the answer to ``messages``, and append its text to ``pieces``. Return why it ended."""
        body = {"generation_config": self._options.to_json_string(), "model": self._model}
        async with AsyncInferenceClient(base_url=self._address) as client:

            async def answer() -> AsyncIterator[Any]:
                chunks = await client.chat_completion(messages, model=self._model, stream=True, extra_body=body)
                is_reasoning = False
                async for chunk in chunks:
                    delta = chunk.choices[0].delta
                    content, reasoning = delta.content or "", delta.get("reasoning_content") or ""
                    pieces.append(content)  # templates drop the reasoning of earlier turns
                    if reasoning and not is_reasoning:
                        reasoning = f"<think>\n{reasoning}"
                    elif content and is_reasoning:
                        content = f"\n</think>\n\n{content}"
                    is_reasoning = bool(reasoning) or (is_reasoning and not content)
                    if is_reasoning and chunk.choices[0].finish_reason is not None:
                        content = "\n</think>"
                    delta.content = reasoning + content  # the display shows content alone
                    yield chunk

            async def awaited() -> AsyncIterator[Any]:  # as stream_output takes it
                return answer()

            _, reason = await self._display.stream_output(awaited())
        return reason


def parse_flags(flags: Sequence[str]) -> dict[str, Any]:
    """The options of generate that are given as NAME=VALUE.

    Raises ValueError for those that the server would refuse, and for words that are none.
    """
    from torch_mesh.serving.generate_options import SEQUENCE_COUNTS, check_options

    known = vars(GenerationConfig())
    for flag in flags:
        name, given, _ = flag.partition("=")
        if not given or name not in known:
            raise ValueError(
                f"{flag!r} is not NAME=VALUE with the name of one of generate's options, such as max_new_tokens=500"
            )
    try:
        options = parse_generate_flags(list(flags))
        check_options(options)
        for name in SEQUENCE_COUNTS:  # the server would refuse each turn
            if options.get(name) not in (None, 1):
                raise ValueError(f"{name} is {options[name]!r}: a chat shows one answer as it is made; give 1.")
        GenerationConfig(**options).validate()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{' '.join(flags)!r} is not possible: {error}") from error
    return options


def _message(error: Exception) -> str:
    """The message of the server, if it sent one: as the answer's body, or in the stream."""
    try:
        return str(error.response.json()["error"]["message"])  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        sent = error.args[0] if error.args else None
        return str(sent["message"]) if isinstance(sent, dict) and "message" in sent else str(error)
