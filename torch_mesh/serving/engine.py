"""Run ``generate`` for requests in a thread, one at a time, and pass on tokens as they are generated."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from torch_mesh.serving.errors import AnsweredError, FailedRequestError, RequestError, StoppingError
from torch_mesh.serving.kept_keys import KeptKeys
from torch_mesh.serving.processors import Recorder, TokenLogprobs
from torch_mesh.serving.progress import Progress

_LOG = logging.getLogger(__name__)
# Errors of generate for invalid or contradictory options.
_OPTION_ERRORS = (
    ValueError,
    TypeError,
    NotImplementedError,
    AttributeError,
    LookupError,
    ArithmeticError,
    ImportError,  # an option that needs a package
)
_MAX_LOGGED = 500  # characters of an error that a client can cause


@dataclass(frozen=True)
class Token:
    id: int
    logprobs: TokenLogprobs | None = None


@dataclass(eq=False)
class Job:
    """One sequence to generate.

    Attributes:
        inputs: of the model; ``input_ids`` [1, n].
        config: of ``generate``, with ``max_new_tokens``.
        processors: of logits, in order.
        seed: of this sequence's sampling. None: the server's random numbers.
    """

    inputs: Mapping[str, Any]
    config: GenerationConfig
    processors: Sequence[LogitsProcessor] = ()
    seed: int | None = None
    own_options: bool = False  # the client gave options of generate
    may_shorten: bool = False  # the client gave no limit: it may be lowered to what fits
    cancelled: threading.Event = field(default_factory=threading.Event)
    reused: int = 0  # tokens of the prompt that were cached; known once it is computed

    @property
    def prompt(self) -> Tensor:
        ids: Tensor = self.inputs["input_ids"][0]
        return ids


class Worker:
    """A thread that runs functions in order. Compiled graphs keep their state per thread."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="torch-mesh-serve", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((work, future))
        return future

    def stop(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the running function."""
        self._work.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:  # noqa: BLE001  passed on to the caller
                    future.set_exception(error)
                else:
                    future.set_result(result)
            work = future = result = item = None  # type: ignore[assignment]  # references would keep a model alive


class Engine:
    def __init__(self, kept: KeptKeys, tokenizer: Any, counts_layers: bool = True) -> None:
        self.kept = kept
        self.progress = Progress(kept.model, counts_layers)
        self._tokenizer = tokenizer
        self.worker = Worker()
        self._streams: set[_Stream] = set()
        self._stopping = False

    def check(self, job: Job, count: int = 1) -> None:
        """Raises RequestError for a job that does not fit in memory or in the model's positions.

        ``count``: the number of such jobs, for engines that compute some together.
        """
        self.kept.check(job.prompt, job.config.max_new_tokens)

    async def tokens(self, job: Job) -> AsyncGenerator[list[Token], None]:
        """Yield the tokens of ``job``, some at a time. Closing this iterator ends the computation."""
        if self._stopping:
            raise StoppingError
        stream = _Stream(asyncio.get_running_loop(), job)
        self._streams.add(stream)
        running = self.worker.submit(lambda: self._generate(job, stream))
        try:
            while (items := await stream.get()) is not None:
                yield items
        finally:
            job.cancelled.set()
            running.cancel()
            self._streams.discard(stream)

    async def run(self, work: Callable[[], Any]) -> Any:
        if self._stopping:
            raise StoppingError
        try:
            return await asyncio.wrap_future(self.worker.submit(work))
        except RuntimeError as error:
            if self._stopping and not isinstance(error, AnsweredError):
                raise StoppingError from error
            raise

    def abort(self) -> None:
        """End all jobs with StoppingError, and accept no more. Callable from any thread."""
        self._stopping = True
        for stream in list(self._streams):
            stream.fail(StoppingError())
            stream.job.cancelled.set()

    def stop(self) -> None:
        """Called when no job runs any more."""

    def is_healthy(self) -> bool:
        return True

    def _generate(self, job: Job, stream: _Stream) -> None:
        if job.cancelled.is_set():
            return
        reused = self.kept.counts.reused_tokens

        def read() -> None:
            self.progress.end()
            job.reused = self.kept.counts.reused_tokens - reused

        try:
            stream.read = read
            with _seeded(job.seed, self.kept.model.device), self.progress.reading(len(job.prompt)):
                self.kept.generate(
                    may_shorten=job.may_shorten,
                    **job.inputs,
                    generation_config=job.config,
                    tokenizer=self._tokenizer,
                    streamer=stream,
                    stopping_criteria=StoppingCriteriaList([_Cancelled(job)]),
                    logits_processor=LogitsProcessorList(job.processors) or None,
                )
            stream.finish()
        except Exception as error:  # noqa: BLE001  passed on to the client
            stopped = self._stopping and isinstance(error, RuntimeError)
            stream.fail(StoppingError() if stopped else client_error(error, job, has_begun=stream.read is None))


def client_error(error: Exception, job: Job, has_begun: bool = False) -> Exception:
    """The error for the client. Other errors than those for clients are logged with their traceback.

    ``has_begun``: there is a first token, so that ``generate`` has accepted the options.
    """
    if isinstance(error, AnsweredError):
        return error
    if job.own_options and not has_begun and isinstance(error, _OPTION_ERRORS):
        # In one line, since clients decide how often; perhaps not because of the options.
        about = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_LOGGED]
        _LOG.warning("A request with a generation_config has failed: %s", about)
        return RequestError(f"generate does not accept this generation_config: {error}", "generation_config")
    _LOG.error("A request has failed", exc_info=error)
    return FailedRequestError(f"{type(error).__name__}: {error}")


class _Cancelled(StoppingCriteria):
    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self._job.cancelled.is_set(), device=input_ids.device)


class _Stream(BaseStreamer):
    """Passes tokens from the generating thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, job: Job) -> None:
        self.job = job
        self._loop = loop
        self._queue: asyncio.Queue[list[Token] | Exception | None] = asyncio.Queue()
        self._recorder = next((each for each in job.processors if isinstance(each, Recorder)), None)
        self._position = 0
        self.read: Callable[[], None] | None = None  # called with the first token

    async def get(self) -> list[Token] | None:
        """The next tokens; None at the end. Raises the job's error."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        while item is not None and not self._queue.empty():
            more = self._queue.get_nowait()
            if not isinstance(more, list):
                self._queue.put_nowait(more)
                break
            item += more
        return item

    def put(self, value: Tensor) -> None:
        ids = value.reshape(-1).tolist()
        if not self._position:  # generate begins with the prompt
            self._position = len(ids)
            return
        if self.read is not None:
            self.read()
            self.read = None
        made = []
        for token in ids:
            logprobs = None if self._recorder is None else self._recorder.take(self._position, token)
            made.append(Token(token, logprobs))
            self._position += 1
        self._send(made)

    def end(self) -> None:  # generate calls it; an error may still follow
        pass

    def finish(self) -> None:
        self._send(None)

    def fail(self, error: Exception) -> None:
        self._send(error)

    def _send(self, item: list[Token] | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


@contextlib.contextmanager
def _seeded(seed: int | None, device: torch.device) -> Any:
    """Sample with ``seed`` in the body, and restore the state of the random numbers."""
    if seed is None:
        yield
        return
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield
