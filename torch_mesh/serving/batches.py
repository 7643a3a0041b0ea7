"""Compute concurrent requests together, by transformers' continuous batching."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from torch_mesh.hf.generation_compat import forget_request
from torch_mesh.serving.admission import RESERVE_BYTES, check_blocks, check_positions
from torch_mesh.serving.engine import Engine, Job, Token, client_error
from torch_mesh.serving.errors import AnsweredError, RequestError, StoppingError
from torch_mesh.system.memory import left_bytes

_LOG = logging.getLogger(__name__)
_MAX_FRACTION = 0.6  # the largest fraction of free memory for blocks on the CPU, as in transformers
_MAX_ROWS = 8192  # tokens in a forward, transformers' default
_MAX_SEQUENCES = 16  # as long as the model allows, for which there are blocks if memory allows
_LOGIT_ROWS = 1024  # for which transformers reserves memory
# Sampling options of generate, which all sequences of a batch share.
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_OF_REQUESTS = (*_SAMPLING, "max_new_tokens", "eos_token_id", "transformers_version")  # may differ from the model's
# Values of options that change nothing, beside False.
_NEUTRAL = {
    "use_cache": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_p": 0,
}


class BatchesEndedError(AnsweredError):
    """Continuous batching has failed and accepts no more requests."""

    status = 503


class NoBlocksError(AnsweredError):
    """There is no memory for the blocks of continuous batching at present."""

    status = 503


class Batches(Engine):
    """An Engine whose jobs share forwards. Jobs with other sampling options wait until none runs.

    Args:
        configured: the given options of transformers' ``ContinuousBatchingConfig``.
    """

    _STOP_SECONDS = 2.0  # how long ``stop`` waits for a forward

    def __init__(self, kept: Any, tokenizer: Any, configured: dict[str, Any]) -> None:
        super().__init__(kept, tokenizer, counts_layers=False)  # forwards mix prompts and steps
        self._configured = configured
        self._manager: Any = None
        self._starting = threading.Lock()
        self._sampling: dict[str, Any] | None = None  # the manager's
        self._active = 0
        self._turn = asyncio.Lock()  # in the order of arrival
        self._idle = asyncio.Event()
        self._idle.set()
        self._waiting: set[asyncio.Queue[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._count = 0

    @property
    def manager(self) -> Any:
        """transformers' manager, running."""
        return self._manager

    def check(self, job: Job, count: int = 1) -> None:
        self.check_options(job)
        check_blocks(self._capacity(job), len(job.prompt), job.config.max_new_tokens)

    def check_options(self, job: Job) -> None:
        """Raises RequestError for options that continuous batching or the model does not support."""
        config = job.config
        for name, value in vars(config).items():
            if name in _OF_REQUESTS or name.startswith("_") or value is None:
                continue
            models = getattr(self.kept.model.generation_config, name, None)
            neutral = models is None and (value is False or value == _NEUTRAL.get(name))
            if value != models and not neutral:
                raise RequestError(f"{name} is not possible with --continuous-batching: leave it out.", name)
        if len(job.inputs) > 2:
            raise RequestError("--continuous-batching takes text alone.", "messages")
        if self.kept.admission is not None:
            check_positions(self.kept.admission.needs.positions, len(job.prompt), config.max_new_tokens)

    async def tokens(self, job: Job) -> AsyncGenerator[list[Token], None]:
        if self._stopping:
            raise StoppingError
        self._loop = asyncio.get_running_loop()
        sampling = self._sampling_of(job)
        async with self._turn:
            if sampling != self._sampling:
                await self._idle.wait()
            try:
                manager = await asyncio.to_thread(self._start, sampling, job)
            except asyncio.CancelledError:
                job.cancelled.set()  # the thread may still wait for others
                raise
            self._active += 1
            self._idle.clear()
            queue: asyncio.Queue[Any] = asyncio.Queue()
            self._waiting.add(queue)
        name = f"request-{self._count}"
        self._count += 1
        try:
            self._add(manager, job, name, queue)
            sent = 0
            while True:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                if output.error is not None:
                    _raise_if_ended(manager)
                    raise client_error(RuntimeError(output.error), job)
                made = output.generated_tokens[sent:]
                sent += len(made)
                if made:
                    yield [Token(token) for token in made]
                if output.is_finished():
                    return
        finally:
            manager.cancel_request(name)
            forget_request(manager, name)
            self._waiting.discard(queue)
            self._active -= 1
            if not self._active:
                self._idle.set()

    def abort(self) -> None:
        self._stopping = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all requests with it
                self._loop.call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        for queue in list(self._waiting):
            queue.put_nowait(StoppingError())

    def stop(self) -> None:
        self._stopping = True
        with self._starting:
            self._stop_manager()

    def is_healthy(self) -> bool:
        return self._manager is None or self._manager.background_thread_status.fatal_error is None

    def _add(self, manager: Any, job: Job, name: str, queue: asyncio.Queue[Any]) -> None:
        _raise_if_ended(manager)
        manager.register_result_handler(name, queue.put_nowait)
        added = manager.add_request(
            job.prompt.tolist(),
            request_id=name,
            streaming=True,
            max_new_tokens=job.config.max_new_tokens,
            eos_token_id=job.config.eos_token_id,
        )
        if added is None:
            _raise_if_ended(manager)
            raise BatchesEndedError("Continuous batching has ended and accepts no more requests.")

    def _start(self, sampling: dict[str, Any], job: Job | None = None) -> Any:
        """Return the running manager, after starting one with ``sampling`` if there is none.

        ``job``: also replace one with other sampling, which has no requests, unless this job has been cancelled.
        """
        with self._starting:
            if job is not None and not job.cancelled.is_set() and sampling != self._sampling:
                self._stop_manager()
            if self._stopping:  # perhaps while the line above waited
                raise StoppingError
            if self._manager is None:
                config = copy.deepcopy(self.kept.model.generation_config)
                for name, value in {**sampling, "use_cache": False}.items():  # its blocks replace a cache
                    setattr(config, name, value)
                manager = self.kept.model.init_continuous_batching(
                    generation_config=config, continuous_batching_config=_sized_config(self._configured, self.kept)
                )
                manager.start()
                self._manager, self._sampling = manager, sampling
            return self._manager

    def _stop_manager(self) -> None:
        """The caller holds ``_starting``."""
        if self._manager is not None:
            # Cancelled requests leave a forward running, which uses the model's attention and the blocks.
            self._manager.stop(block=True, timeout=self._STOP_SECONDS if self._stopping else None)
            self._manager = None

    def _capacity(self, job: Job) -> int:
        """Tokens in the blocks of the running manager, which is started if there is none."""
        while True:
            manager = self._start(self._sampling_of(job))

            def end(failed: Any = manager) -> None:
                with self._starting:
                    if failed is self._manager:
                        self._stop_manager()

            try:
                return tokens_in_blocks(manager, lambda: self._stopping, end)
            except BatchesEndedError:
                with self._starting:
                    if manager is self._manager:
                        raise

    def _sampling_of(self, job: Job) -> dict[str, Any]:
        """The sampling options of ``job``, which are the model's where it has none."""
        models = self.kept.model.generation_config
        given = {name: getattr(job.config, name, None) for name in _SAMPLING}
        found = {name: getattr(models, name, None) if value is None else value for name, value in given.items()}
        return found if found["do_sample"] else {"do_sample": False}


def _raise_if_ended(manager: Any) -> None:
    if manager.background_thread_status.fatal_error is not None:
        raise BatchesEndedError("Continuous batching has ended with an error, which is in the server's log.")


def _sized_config(configured: dict[str, Any], kept: Any) -> Any:
    """A config with the given number of blocks, or those of ``_MAX_SEQUENCES``, or as many as fit in the free memory:
    transformers ignores cgroups and other processes."""
    import psutil
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig(**configured)
    left = max(0, left_bytes() - RESERVE_BYTES)
    theirs = psutil.virtual_memory().total - psutil.Process().memory_info().rss
    allowed = _MAX_FRACTION * left
    if config.max_memory_percent is not None:
        allowed = min(left, config.max_memory_percent * theirs)
    if config.num_blocks is None and kept.model.device.type == "cpu":
        _limit_blocks(config, kept, allowed)
    # transformers 5.17 would choose the tokens of a forward by memory: as many as fit with masks of each token with
    # every other.
    if config.num_blocks is not None and config.max_batch_tokens is None:
        config.max_batch_tokens = _MAX_ROWS
    if config.max_memory_percent is None:
        config.max_memory_percent = min(_MAX_FRACTION, left / theirs)
    return config


def _limit_blocks(config: Any, kept: Any, left: float) -> None:
    """Set ``num_blocks`` for ``_MAX_SEQUENCES`` if they take less than ``left`` bytes by a high estimate."""
    needs = None if kept.admission is None else kept.admission.needs
    if needs is None or needs.positions is None:
        return
    rows = config.max_batch_tokens or min(_MAX_ROWS, needs.positions)
    block = _block_tokens(config)
    blocks = _MAX_SEQUENCES * -(-needs.positions // block)
    caches = _MAX_SEQUENCES * needs.cache(needs.positions)
    masks = 2 * 4 * rows * (blocks * block + rows)  # two of them in fp32
    vocabulary = kept.model.config.get_text_config(decoder=True).vocab_size
    activations = (rows + _LOGIT_ROWS) * (needs.token_bytes + 4 * vocabulary)
    if 4 * caches + masks + activations < left:  # transformers reserves copies of a layer's keys and values too
        config.num_blocks, config.max_batch_tokens = blocks, rows


def _block_tokens(config: Any) -> int:
    """Tokens of a block. transformers called them ``block_size`` before ``page_size``."""
    return int(config.page_size if hasattr(config, "page_size") else config.block_size)


def tokens_in_blocks(batching: Any, is_stopping: Callable[[], bool], end: Callable[[], None]) -> int:
    """Wait for the thread that allocates the blocks of ``batching``, and return their number of tokens."""
    status = batching.background_thread_status
    while (processor := batching.batch_processor) is None and batching.is_running():
        if is_stopping():
            raise StoppingError
        time.sleep(0.01)
    if processor is not None:
        config = batching.continuous_batching_config
        return int(processor.cache.num_blocks * _block_tokens(config))
    if status.fatal_error is None:
        raise BatchesEndedError("Continuous batching has ended.")  # the server is stopping
    problem = str(status.fatal_error)  # the error itself refers to frames, and these to the model
    end()  # the next request may find more memory
    raise NoBlocksError(
        f"There is no memory for the blocks of continuous batching ({problem}): "
        "give a smaller --resident or --cb-max-batch-tokens."
    )
