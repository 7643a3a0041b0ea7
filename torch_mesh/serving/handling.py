"""Wrappers of transformers' request handlers: checks, shutdown, and meaningful errors."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_mesh.hf.compat import batching_config, batching_manager, running_batches, set_batching_config, stream_error
from torch_mesh.serving.admission import RESERVE_BYTES, check_blocks, check_positions
from torch_mesh.serving.errors import (
    AnsweredError,
    FailedRequestError,
    RequestError,
    RequestTooLongError,
    StoppingError,
    describe,
)
from torch_mesh.serving.generation import OptionError, settle
from torch_mesh.serving.requests import CHAT, COMPLETIONS, DECISIONS, PROMPTS, RESPONSES, checked_request
from torch_mesh.system.memory import left_bytes

if TYPE_CHECKING:
    from transformers import GenerationConfig

_LOG = logging.getLogger(__name__)

_CB_SHARE = 0.6  # the largest fraction of memory that transformers gives to blocks on a CPU
_KINDS = {
    "ChatCompletionHandler": CHAT,
    "CompletionHandler": COMPLETIONS,
    "ResponseHandler": RESPONSES,
    "SystemOneHandler": DECISIONS,
}
# What generate raises for invalid options or combinations.
_OPTION_ERRORS = (ValueError, TypeError, NotImplementedError, AttributeError, LookupError, ArithmeticError)


@dataclass(frozen=True)
class _Request:
    kind: str
    body: Mapping[str, Any]


_CURRENT: ContextVar[_Request] = ContextVar("request")


class Requests:
    """The requests of one server.

    ``manager``: transformers' manager of models, with the attribute ``kept``. ``generation``: transformers' state of
    generation, whose managers are wrapped. ``served``: name of the model.
    """

    def __init__(self, manager: Any, generation: Any, served: str) -> None:
        self._manager = manager
        self._generation = generation
        self._served = served
        self._blocks = batching_config(generation)
        self._find_manager = generation.get_manager
        generation.get_manager = self._get_manager
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cut_off = asyncio.Event()
        self._streams: weakref.WeakSet[_Stream] = weakref.WeakSet()

    def wrap_handler(self, handler: Any) -> None:
        """Wrap ``handler``, if it is one of transformers' that generate."""
        if kind := _KINDS.get(type(handler).__name__):
            handler.handle_request = functools.partial(self._handle, handler.handle_request, kind)

    def cut_off(self) -> None:
        """Answer all pending requests with StoppingError. May be called from any thread."""
        self._stopping = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all requests with it
                self._loop.call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        self._cut_off.set()
        for stream in list(self._streams):
            stream.cut_off()

    async def _handle(
        self, handle: Callable[..., Awaitable[Any]], kind: str, body: Mapping[str, Any], request_id: str
    ) -> Any:
        from starlette.exceptions import HTTPException

        self._loop = asyncio.get_running_loop()
        if self._stopping:
            raise StoppingError
        vocabulary = self._manager.kept.model.config.get_text_config(decoder=True).vocab_size
        request = _Request(kind, checked_request(kind, body, self._served, vocabulary))
        _CURRENT.set(request)
        try:
            answer = await self._unless_cut_off(handle(dict(request.body), request_id))
        except HTTPException:
            raise
        except Exception as error:
            explained = self._explain(error, request)
            if explained is error:
                raise
            raise explained from error
        if hasattr(answer, "body_iterator"):
            answer.body_iterator = _with_its_error(answer.body_iterator)
        return answer

    async def _unless_cut_off(self, answer: Awaitable[Any]) -> Any:
        work = asyncio.ensure_future(answer)
        cut_off = asyncio.ensure_future(self._cut_off.wait())
        try:
            await asyncio.wait({work, cut_off}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise StoppingError
        finally:
            cut_off.cancel()
            work.cancel()

    def _explain(self, error: Exception, request: _Request) -> Exception:
        """The client's version of ``error``. Errors that are not the client's are logged with a traceback."""
        from transformers.cli.serving.utils import CBWorkerDeadError

        if self._stopping and isinstance(error, RuntimeError) and not isinstance(error, RequestError):
            return StoppingError()
        if isinstance(error, AnsweredError | CBWorkerDeadError):
            return error
        if "generation_config" in request.body and isinstance(error, _OPTION_ERRORS):
            return RequestError(f"generate does not accept this generation_config: {error}", "generation_config")
        _LOG.error("A request has failed", exc_info=error)
        return FailedRequestError(f"{type(error).__name__}: {error}")

    def _get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        if use_cb and batching_manager(self._generation) is None:
            set_batching_config(self._generation, _blocks_that_fit(self._blocks))
        found = self._find_manager(model_id, use_cb=use_cb)
        if "generate_streaming" not in vars(found):
            found.generate_streaming = functools.partial(self._generate_streaming, found.generate_streaming)
            found.generate_non_streaming = functools.partial(self._generate, found.generate_non_streaming)
            found.init_cb = _settled(found.init_cb)
            if not use_cb:
                found.async_submit = functools.partial(_submit, found.submit)
        return found

    def _generate(
        self, generate: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._check(model, inputs["input_ids"], gen_config)
        return generate(model, processor, inputs, gen_config, *args, **kwargs)

    def _generate_streaming(
        self, generate: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[_Stream, Any]:
        if self._cut_off.is_set():
            raise StoppingError
        request = _CURRENT.get()
        self._check(model, inputs["input_ids"], gen_config)
        queue, streamer = generate(model, processor, inputs, gen_config, *args, **kwargs)
        stream = _Stream(queue, streamer, lambda error: self._explain(error, request), request.kind != RESPONSES)
        self._streams.add(stream)
        return stream, streamer

    def _check(self, model: Any, prompt: Any, config: Any) -> None:
        """Raises RequestError before a request is queued; transformers would answer it until memory runs out."""
        _settle(config, model)
        asked = PROMPTS[_CURRENT.get().kind]
        batched = isinstance(prompt, list)  # continuous batching
        length = len(prompt) if batched else prompt.shape[-1]
        if length == 0:
            raise RequestError(f"{asked} has no tokens: give some text.", asked)
        new = config.max_new_tokens
        if batched:
            check_positions(self._manager.kept.admission.needs.positions, length, new)
            check_blocks(_tokens_in_blocks(self._generation, lambda: self._stopping), length, new)
        else:
            self._manager.kept.check(prompt[0], new)


class _Stream:
    """Replaces a stream's queue, and raises the error that ends it, after everything before.

    transformers writes the text of an error into JSON unescaped. For the Responses API it does not, and ``raises`` is
    False.
    """

    def __init__(
        self, queue: asyncio.Queue[Any], streamer: Any, explain: Callable[[Exception], Exception], raises: bool
    ) -> None:
        self._queue = queue
        self._streamer = streamer
        self._explain = explain
        self._raises = raises
        self._error: Any = None  # of transformers' class for an error in a stream, which has only its text

    async def get(self) -> Any:
        item = await self._queue.get() if self._error is None else self._error
        if not _is_error(item):
            return item
        failure = self._streamer.__dict__.pop(_FAILURE, None)
        error = self._explain(FailedRequestError(item.msg) if failure is None else failure)
        if self._raises:
            raise error
        return type(item)(str(error))

    def get_nowait(self) -> Any:
        if self._error is None and _is_error(item := self._queue.get_nowait()):
            self._error = item
        if self._error is not None:
            raise asyncio.QueueEmpty
        return item

    def cut_off(self) -> None:
        self._queue.put_nowait(stream_error()(str(StoppingError())))
        self._streamer.cancel()


_FAILURE = "_mesh_failure"  # attribute of a streamer: the exception that ended its generate


def noting_failures(generate: Callable[..., Any]) -> Callable[..., Any]:
    """``generate`` that leaves its exception with the streamer: transformers passes on only the text."""

    def noting(**arguments: Any) -> Any:
        try:
            return generate(**arguments)
        except Exception as error:
            if (streamer := arguments.get("streamer")) is not None:
                vars(streamer)[_FAILURE] = error
            raise

    return noting


def blaming_messages(render: Callable[..., Any]) -> Callable[..., Any]:
    """``render`` of a chat template, with every error as one about messages: templates may raise anything."""

    def blaming(*args: Any, **kwargs: Any) -> Any:
        try:
            return render(*args, **kwargs)
        except MemoryError:
            raise
        except Exception as error:
            request = _CURRENT.get(None)
            asked = PROMPTS[CHAT if request is None else request.kind]
            raise RequestError(
                f"The model's chat template rejects this request: {error}. Change {asked}, tools or "
                "chat_template_kwargs.",
                asked,
            ) from error

    return blaming


def keeping_unparsed(tokenizer: Any) -> Callable[..., dict[str, Any]]:
    """``parse_response`` of ``tokenizer``, which returns incomplete and invalid tool calls as text."""
    parse = tokenizer.parse_response

    def parse_response(response: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            parsed: dict[str, Any] = parse(response, *args, **kwargs)
            if all(_is_call(call) for call in parsed.get("tool_calls") or ()):
                return parsed
        return {"content": tokenizer.decode(response, skip_special_tokens=True)}

    return parse_response


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and {"name", "arguments"} <= function.keys()


def _is_error(item: Any) -> bool:
    return isinstance(item, stream_error())


async def _with_its_error(parts: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The parts of a stream, then its error, if any."""
    try:
        async for part in parts:
            yield part
    except Exception as error:  # noqa: BLE001  # the answer has begun: its status cannot say so any more
        if not isinstance(error, AnsweredError):  # an error in writing instead of computing
            _LOG.error("A stream has failed", exc_info=error)
        yield f"data: {json.dumps(describe(error)[0])}\n\n"
    finally:  # the client has gone: transformers' generator cancels its request
        await parts.aclose()


def _submit(submit: Callable[..., Any], work: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
    """``async_submit`` of transformers' manager, with a future that may be cancelled, which drops its work."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def run() -> None:
        if future.cancelled():
            return
        try:
            result = work(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # whatever it is, who waits gets it
            loop.call_soon_threadsafe(settle, future.set_exception, error)
        else:
            loop.call_soon_threadsafe(settle, future.set_result, result)

    submit(run)
    return future


def _settled(begin: Any) -> Any:
    """Settles the options of the first request, which continuous batching uses for all."""

    def settled(model: Any, gen_config: Any) -> None:
        _settle(gen_config, model)
        begin(model, gen_config)

    return settled


def _settle(config: GenerationConfig, model: Any) -> None:
    try:
        settle(config, model.generation_config)
    except OptionError as error:
        if error.name == "max_new_tokens":
            raise RequestError(f"{error} OpenAI's name for it is max_tokens.", "max_tokens") from error
        raise RequestError(str(error), error.name) from error
    if config.max_new_tokens is None:  # its size would be unknown
        raise RequestError(
            "This request has no limit of generated tokens: give max_new_tokens in generation_config.",
            "generation_config",
        )


def _blocks_that_fit(configured: Any) -> Any:
    """As many blocks as memory allows, unless given; transformers ignores cgroups and other processes."""
    import psutil
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig() if configured is None else copy.copy(configured)
    if config.max_memory_percent is None:
        theirs = psutil.virtual_memory().total - psutil.Process().memory_info().rss
        config.max_memory_percent = min(_CB_SHARE, max(0, left_bytes() - RESERVE_BYTES) / theirs)
    return config


def _tokens_in_blocks(generation: Any, is_stopping: Callable[[], bool]) -> int:
    """Tokens that fit continuous batching's blocks, which it makes in its own thread."""
    from transformers.cli.serving.utils import CBWorkerDeadError

    batching = running_batches(generation)
    status = batching.background_thread_status
    while (processor := batching.batch_processor) is None and batching.is_running():
        if is_stopping():
            raise StoppingError
        time.sleep(0.01)
    if processor is not None:
        config = batching.continuous_batching_config
        return int(processor.cache.num_blocks * getattr(config, "page_size", config.block_size))  # until 5.17
    if status.fatal_error is None:
        raise CBWorkerDeadError("Continuous batching has ended.")  # as when the server ends
    problem = str(status.fatal_error)  # the error's frames would keep the model alive
    generation.shutdown()  # the next request may find more memory
    raise RequestTooLongError(
        f"Memory is not left for the blocks of continuous batching ({problem}): start the server with a smaller "
        "--resident or --cb-max-batch-tokens."
    )
