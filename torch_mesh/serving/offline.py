"""Requests from a file, answered into another one: many at once, and never twice."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from torch_mesh.config import MeshConfig
from torch_mesh.errors import MeshError
from torch_mesh.serving.admission import Admission, check_blocks, find_needs
from torch_mesh.serving.answers import running
from torch_mesh.serving.batches import Batches
from torch_mesh.serving.engine import Engine, Job, Token
from torch_mesh.serving.errors import AnsweredError, RequestTooLongError, describe
from torch_mesh.serving.kept_keys import KeptKeys
from torch_mesh.serving.openai_api import OpenAI, new_id
from torch_mesh.serving.opening import check_source, config_of, open_for_serving, source_of
from torch_mesh.serving.requests import CHAT, COMPLETIONS, PROMPTS, RESPONSES
from torch_mesh.serving.server_options import complete_options
from torch_mesh.serving.service import Service
from torch_mesh.system.atomic_files import new_file

_LOG = logging.getLogger(__name__)
_KINDS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS, "/v1/responses": RESPONSES}
_FIELDS = {"custom_id", "method", "url", "body"}  # the fields of a line of OpenAI's batch files
_ANSWER_ID = "batch_req_"
_LINE_START = f'{{"id": "{_ANSWER_ID}'.encode()  # of each line that _write writes
DEFAULT_AT_ONCE = 32
_MAX_NAMED = 5  # an error names at most this many mistakes
_PAGE = 256  # default for the tokens of a block of transformers' continuous batching
_STOP_SECONDS = 60.0  # how long an interrupted run waits for its forward
_MAX_ROWS = 4096  # rows of a forward: transformers makes a mask of each row with every key
# The sampling options, which all sequences of a batch share.
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "generation_config")


@dataclass(frozen=True)
class Request:
    line: int
    id: str
    kind: str
    body: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """A digest of the request's contents. It shows that an answer is this request's."""
        text = json.dumps([self.kind, self.body], sort_keys=True)
        return f"req_{hashlib.blake2b(text.encode('utf-8', 'backslashreplace'), digest_size=12).hexdigest()}"


def read_requests(path: Path) -> list[Request]:
    """Read all lines of a file in OpenAI's batch format, or with the bodies alone. Raises ValueError naming the first
    wrong lines, OSError for a file that cannot be read."""
    found: list[Request] = []
    wrong: list[str] = []
    lines: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                request = _request(number, line)
                if (other := lines.setdefault(request.id, number)) != number:
                    raise ValueError(f"custom_id {request.id!r} is that of line {other} too")
                found.append(request)
            except ValueError as error:
                wrong.append(f"line {number}: {error}")
    _raise_if(wrong, path)
    if not found:
        raise ValueError(f"{path} has no requests: give one JSON object a line")
    return found


def _request(number: int, line: bytes) -> Request:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from None
    _check_object(given, "the line")
    if "body" in given or "url" in given:
        return _of_batch(number, given)
    kind = next((kind for kind in _KINDS.values() if PROMPTS[kind] in given), None)
    if kind is None:
        raise ValueError("none of messages, prompt, input, or of custom_id, method, url and body")
    body = {name: value for name, value in given.items() if name != "custom_id"}
    return Request(number, _id(given.get("custom_id", f"line-{number}")), kind, body)


def _of_batch(number: int, given: Mapping[str, Any]) -> Request:
    if given.keys() != _FIELDS:
        raise ValueError(f"a line has custom_id, method, url and body, and this one {', '.join(sorted(given))}")
    if given["method"] != "POST":
        raise ValueError(f"method is {given['method']!r}: give POST")
    kind = _KINDS.get(given["url"]) if isinstance(given["url"], str) else None
    if kind is None:
        raise ValueError(f"url is {given['url']!r}: give one of {', '.join(_KINDS)}")
    _check_object(given["body"], "body")
    return Request(number, _id(given["custom_id"]), kind, given["body"])


def _check_object(given: object, name: str) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{name} is not a JSON object")  # noqa: TRY004  as every other mistake in a file


def _id(given: object) -> str:
    if not isinstance(given, str) or not given:
        raise ValueError(f"custom_id is {given!r}: give some text")
    return given


def _raise_if(wrong: Sequence[str], path: Path) -> None:
    if wrong:
        more = f", and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise ValueError(f"{path} is not right, and nothing was computed: {'; '.join(wrong[:_MAX_NAMED])}{more}")


def unanswered(requests: Sequence[Request], out: Path, model: str) -> list[Request]:
    """Return the ``requests`` without an answer in ``out``. Removes failed answers and an incomplete line from ``out``.

    Raises ValueError for a file with anything else, with an answer to another request of that custom_id, or with one of
    another model than that of the name ``model``; OSError for a file that cannot be written.
    """
    try:
        with out.open("rb+") as file:
            lines = file.readlines()
    except FileNotFoundError:
        return list(requests)
    pending = {request.id: request for request in requests}
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            answer = json.loads(line)
            name, response = answer["custom_id"], answer["response"]
            status, digest = response["status_code"], response["request_id"]
            by = str(response["body"]["model"]) if status == 200 else model
        except (ValueError, TypeError, KeyError):
            if not line.endswith(b"\n") and line.startswith(_LINE_START[: len(line)]):
                break  # a killed run left this line incomplete
            raise ValueError(f"{out} line {number} is no answer of an earlier run: name another file") from None
        request = pending.get(name)
        if request is None or digest != request.digest:
            raise ValueError(
                f"{out} line {number} answers another request than {name!r} of this file: name another file"
            )
        if by != model and os.path.realpath(by) != os.path.realpath(model):
            raise ValueError(f"{out} line {number} was answered by {by}, and not by {model}: name another file")
        if status == 200 and line.endswith(b"\n"):
            kept.append(line)
            del pending[name]
    if len(kept) != len(lines):
        with new_file(out) as file:
            file.writelines(kept)
    return [request for request in requests if request.id in pending]


def check_arguments(model: str, given: Mapping[str, Any]) -> str:
    """The name of the model, as answers have it. Raises ValueError for an invalid name or option (OPTIONS by name), and
    StoreError for a path that does not exist."""
    complete_options(given)
    return source_of(model).name


class _Need(NamedTuple):
    """A sequence to generate: its tokens, those of its prompt, its line, and whether its limit may be lowered."""

    tokens: int
    prompt: int
    line: int
    may_shorten: bool


class _SizedBatches(Batches):
    """Batches with blocks and forwards sized for the jobs that are computed at once. By default transformers takes all
    free memory."""

    _STOP_SECONDS = _STOP_SECONDS

    def __init__(self, kept: KeptKeys, tokenizer: Any, configured: dict[str, Any], at_once: int) -> None:
        super().__init__(kept, tokenizer, configured)
        self._at_once = at_once
        self._slots = asyncio.Semaphore(at_once)
        self._page = configured.get("block_size") or _PAGE
        self.line = 0  # of the request that is checked
        self._needs: list[_Need] = []  # of the sequences that were checked
        self._lowered: dict[int, int] = {}  # limits by the prompt's number of tokens, of requests that gave none
        self._sized = False

    def check(self, job: Job, count: int = 1) -> None:
        """Check all but the memory: ``choose_sizes`` checks it when all jobs are known."""
        self.check_options(job)
        prompt, new = len(job.prompt), job.config.max_new_tokens
        if (blocks := self._configured.get("num_blocks")) is not None:
            check_blocks(blocks * self._page, prompt, new)
        if job.may_shorten and new > (room := self._lowered.get(prompt, new)):
            raise RequestTooLongError("its limit was lowered", room)
        if not self._sized:
            self._needs += [_Need(prompt + new, prompt, self.line, job.may_shorten)] * count

    async def tokens(self, job: Job) -> AsyncGenerator[list[Token], None]:
        async with self._slots, contextlib.aclosing(super().tokens(job)) as batches:
            async for batch in batches:
                yield batch

    def choose_sizes(self) -> None:
        """Choose the number of blocks and rows, and lower the limits of requests that gave none to what fits. Raises
        ValueError if the longest sequence does not fit."""
        admission = self.kept.admission
        assert admission is not None
        while True:
            self._needs.sort(reverse=True)
            longest = self._needs[0]
            try:
                admission.check(longest.prompt, longest.tokens - longest.prompt, known=0, held=0)
                break
            except RequestTooLongError as error:
                if not longest.may_shorten or error.room < 1:
                    raise ValueError(f"line {longest.line}: {error}") from error
                self._lowered[longest.prompt] = error.room
                tokens = longest.prompt + error.room
                for index, each in enumerate(self._needs):
                    if each.may_shorten and each.prompt == longest.prompt:
                        self._needs[index] = each._replace(tokens=min(each.tokens, tokens))
        self._sized = True
        free, chosen = admission.free_bytes(), self._needs[: self._at_once]
        # Beside the keys, each layer has copies of them, and masks of every row with every key.
        while len(chosen) > 1 and 2 * sum(admission.needs.cache(each.tokens) for each in chosen) > free:
            chosen.pop()
        pages = sum(-(-each.tokens // self._page) for each in chosen)
        rows = min(_MAX_ROWS, sum(each.prompt for each in chosen) + len(chosen))
        sized: dict[str, Any] = {"num_blocks": pages, "max_batch_tokens": rows}
        if len(chosen) == len(self._needs[: self._at_once]) and "num_blocks" not in self._configured:
            sized["safety_margin"] = 0.0  # all sequences have their blocks to the end: no prompt waits for free blocks
        self._configured = {**sized, **self._configured}


@contextlib.contextmanager
def open_service(
    name: str,
    config: MeshConfig,
    given: Mapping[str, Any],
    at_once: int | None = None,
    speculation: str | None = None,
) -> Iterator[Service]:
    """Open the model ``name``, and close it when the block ends.

    Args:
        given: OPTIONS by name.
        at_once: how many answers are computed together. None: ``DEFAULT_AT_ONCE`` where the model can.
        speculation: that of the command line, which is refused where it has no effect.

    Raises ValueError for an invalid option, or one without an effect, and what opening a model raises.
    """
    source = source_of(name)
    options = complete_options(given)
    if source.file is None and (options["blocks"] or at_once or speculation):
        # Before the model is opened, which may take long. Of a GGUF file the config alone takes long too.
        check_source(source)
        _check_unused(speculation, options, at_once, _has_batched_layers(config_of(source, options)))
    model, prompts = open_for_serving(source, config, options)
    kept = KeptKeys(model, 0, Admission(model, find_needs(model, keeps_windows=False)))
    can_batch = hasattr(model, "init_continuous_batching") and _has_batched_layers(model.config)
    _check_unused(speculation, options, at_once, can_batch)
    if can_batch:
        engine: Engine = _SizedBatches(kept, prompts.tokenizer, options["blocks"], at_once or DEFAULT_AT_ONCE)
    else:
        _LOG.warning("transformers computes %s one sequence at a time: it has no continuous batching.", source.name)
        engine = Engine(kept, prompts.tokenizer)
    try:
        yield Service(source.name, model, prompts, engine, batches=can_batch)
    finally:
        engine.stop()
        engine.worker.stop(timeout=_STOP_SECONDS)


def _has_batched_layers(config: Any) -> bool:
    """Whether transformers' continuous batching supports all layers of a model with the ``config``."""
    layers = {type(layer) for layer in DynamicCache(config=config.get_text_config(decoder=True)).layers}
    return layers <= {DynamicLayer, DynamicSlidingWindowLayer}


def _check_unused(speculation: str | None, options: Mapping[str, Any], at_once: int | None, can_batch: bool) -> None:
    """Raises ValueError for an option that would have no effect. ``speculation``: as given on the command line."""
    if can_batch:
        if speculation not in (None, "off"):
            raise ValueError(
                f"--speculation {speculation} is not possible where requests are computed together: leave it out"
            )
    elif options["blocks"] or (at_once or 1) > 1:
        name = f"cb-{next(iter(options['blocks']))}".replace("_", "-") if options["blocks"] else "at-once"
        raise ValueError(
            f"--{name} has no effect: transformers computes this model one sequence at a time. Leave it out"
        )


def check(service: Service, requests: Sequence[Request], path: Path) -> None:
    """Raises ValueError naming the first lines that would be refused."""
    api, wrong = OpenAI(service), []
    for request in requests:
        if isinstance(service.engine, _SizedBatches):
            service.engine.line = request.line
        try:
            if request.body.get("stream"):
                raise ValueError("stream is true: leave it out")
            api.check(request.kind, request.body)
        except (AnsweredError, ValueError) as error:
            wrong.append(f"line {request.line}: {error}")
    if not wrong and isinstance(service.engine, _SizedBatches):
        try:
            service.engine.choose_sizes()
        except ValueError as error:
            wrong.append(str(error))
    _raise_if(wrong, path)


async def answer(
    service: Service, requests: Sequence[Request], out: Path, at_once: int, progress: Callable[[int, int], None]
) -> int:
    """Add a line to ``out`` for each request as soon as it is answered; ``at_once`` are computed together. Returns how
    many failed.

    Raises MeshError if the model can compute no more, OSError for a full disk. Lines written before stay.
    """
    api = OpenAI(service)
    # Sort by sampling options, since sequences with others wait for each other.
    order = iter(
        sorted(requests, key=lambda each: json.dumps([each.body.get(name) for name in _SAMPLING_FIELDS], default=str))
    )
    done, failed = 0, 0
    with out.open("ab", buffering=0) as file:

        async def work() -> None:
            nonlocal done, failed
            for request in order:
                status, body = await _answered(service, api, request)
                _write(file, request, status, body)
                done, failed = done + 1, failed + (status != 200)
                progress(done, len(requests))

        try:
            async with running(*(work() for _ in range(min(at_once, len(requests))))) as tasks:
                await asyncio.gather(*tasks)
        finally:
            # Before the loop ends: a forward that still runs delivers its tokens to it.
            await asyncio.to_thread(service.engine.stop)
    return failed


async def _answered(service: Service, api: OpenAI, request: Request) -> tuple[int, Any]:
    answers = {CHAT: api.chat, COMPLETIONS: api.completions, RESPONSES: api.responses}
    try:
        return 200, await answers[request.kind](request.body)
    except Exception as error:
        if not service.engine.is_healthy():
            raise MeshError(f"The model computes no more ({error}): run this again to go on.") from error
        if not isinstance(error, AnsweredError):
            _LOG.error("Line %d has failed", request.line, exc_info=error)
        body, status = describe(error)
        return status, body


def _write(file: Any, request: Request, status: int, body: Any) -> None:
    response = {"status_code": status, "request_id": request.digest, "body": body}
    line = {"id": new_id(_ANSWER_ID), "custom_id": request.id, "response": response, "error": None}
    left = memoryview(json.dumps(line).encode() + b"\n")
    try:
        while left:
            left = left[os.write(file.fileno(), left) :]
    except OSError as error:  # of a full disk, and does not name the file
        raise OSError(error.errno, error.strerror, file.name) from error
