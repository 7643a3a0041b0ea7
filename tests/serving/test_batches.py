"""Batches: each request is decoded with its own sampling, whatever else is asked while continuous batching restarts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from torch_mesh.serving import batches
from torch_mesh.serving.admission import LayerSize, Needs
from torch_mesh.serving.batches import Batches
from torch_mesh.serving.engine import Job
from torch_mesh.serving.errors import StoppingError

LONG = 100  # tokens of a prompt whose answer goes on


class _Manager:
    """Answers each request with one token, which is 1 if it samples."""

    def __init__(self, config: GenerationConfig) -> None:
        self.config = config
        self.background_thread_status = SimpleNamespace(fatal_error=None)
        self.continuous_batching_config = SimpleNamespace(page_size=16, block_size=None)
        self.batch_processor: Any = None
        self.output_router = SimpleNamespace(result_handlers={}, output_queue=queue.SimpleQueue())
        self.starts = True
        self.is_computing = False  # a forward that takes longer than any time limit
        self.before_blocks: Callable[[], None] | None = None  # called while the blocks are awaited

    def start(self) -> None:
        if self.before_blocks is None:
            self.batch_processor = SimpleNamespace(cache=SimpleNamespace(num_blocks=4))

    def is_running(self) -> bool:
        if self.before_blocks is not None:
            self.before_blocks()
        return self.starts

    def stop(self, block: bool = True, timeout: float | None = None) -> None:
        self.batch_processor = None
        self.starts = self.is_computing and (timeout is not None or not block)

    def register_result_handler(self, name: str, handler: Callable[[Any], None]) -> None:
        self.output_router.result_handlers[name] = handler

    def add_request(self, prompt: list[int], request_id: str, **_: Any) -> str:
        made, handlers = [int(bool(self.config.do_sample))], self.output_router.result_handlers
        ends = len(prompt) < LONG
        handlers[request_id](SimpleNamespace(error=None, generated_tokens=made, is_finished=lambda: ends))
        if ends:
            del handlers[request_id]  # as transformers does, after the last output only
        return "added"

    def cancel_request(self, name: str) -> None:
        pass


class _Model:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.generation_config = GenerationConfig(temperature=0.5, top_p=0.9, pad_token_id=3)
        self.managers: list[_Manager] = []
        self.before_blocks: Callable[[], None] | None = None

    def init_continuous_batching(self, generation_config: GenerationConfig, **_: Any) -> _Manager:
        assert not any(manager.starts for manager in self.managers), "two managers share the model and the memory"
        self.managers.append(_Manager(generation_config))
        self.managers[-1].before_blocks, self.before_blocks = self.before_blocks, None
        return self.managers[-1]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("torch_mesh.serving.engine.Progress", lambda *_: None)
    engine = Batches(SimpleNamespace(model=_Model(), admission=None), None, {"max_memory_percent": 0.1})
    yield engine
    engine.worker.stop(10)


def _job(**options: Any) -> Job:
    return Job({"input_ids": torch.tensor([[1, 2]])}, GenerationConfig(max_new_tokens=4, eos_token_id=9, **options))


async def _ask(engine: Batches, job: Job) -> list[int]:
    return [token.id async for tokens in engine.tokens(job) for token in tokens]


def test_a_request_that_is_checked_while_batching_restarts_changes_no_sampling(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_thread = asyncio.to_thread

    async def then_another(*call: Any, **options: Any) -> Any:
        result = await in_thread(*call, **options)
        await in_thread(engine.check, _job(do_sample=False))
        return result

    assert asyncio.run(_ask(engine, _job(do_sample=False))) == [0]
    monkeypatch.setattr(batches.asyncio, "to_thread", then_another)
    assert asyncio.run(_ask(engine, _job(do_sample=True, temperature=2.0))) == [1]


def test_a_request_whose_manager_is_replaced_is_checked_with_the_next(engine: Any) -> None:
    model = engine.kept.model
    model.before_blocks = lambda: asyncio.run(_ask(engine, _job(do_sample=True)))
    engine.check(_job(do_sample=False))
    first, second = model.managers
    assert not first.config.do_sample and first.batch_processor is None
    assert second.config.do_sample and engine.manager is second


def test_a_request_is_not_checked_after_the_end(engine: Any) -> None:
    engine.check(_job(do_sample=False))
    engine.stop()
    with pytest.raises(StoppingError):
        engine.check(_job(do_sample=False))
    assert len(engine.kept.model.managers) == 1


def test_a_manager_starts_after_the_forward_of_the_last_one(engine: Any) -> None:
    """A client that disconnects leaves its forward running."""
    assert asyncio.run(_ask(engine, _job(do_sample=False))) == [0]
    engine.manager.is_computing = True
    assert asyncio.run(_ask(engine, _job(do_sample=True))) == [1]
    last = engine.manager
    last.is_computing = True
    engine.stop()
    assert last.starts, "the end of a server has a time limit"


def test_batching_does_not_restart_after_the_end(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ends closes the pools, which ends the forward that a restart waits for."""
    assert asyncio.run(_ask(engine, _job(do_sample=False))) == [0]
    stop = engine.manager.stop
    monkeypatch.setattr(engine.manager, "stop", lambda **given: (engine.abort(), stop(**given)))
    with pytest.raises(StoppingError):
        asyncio.run(_ask(engine, _job(do_sample=True)))
    assert len(engine.kept.model.managers) == 1


def test_a_request_that_is_cancelled_while_batching_restarts_stops_no_other(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_thread, late = asyncio.to_thread, []

    async def begin_late(*call: Any, **options: Any) -> Any:
        if late:
            return await in_thread(*call, **options)
        late.append(functools.partial(*call, **options))
        return await asyncio.Event().wait()

    async def ask() -> None:
        assert await _ask(engine, _job(do_sample=False)) == [0]
        monkeypatch.setattr(batches.asyncio, "to_thread", begin_late)
        cancelled = asyncio.create_task(_ask(engine, _job(do_sample=True)))
        while not late:
            await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        async for _ in engine.tokens(_job(do_sample=False)):
            late[0]()
            assert len(engine.kept.model.managers) == 1 and engine.manager.starts

    asyncio.run(ask())


def test_a_request_that_ends_early_leaves_nothing(engine: Any) -> None:
    """As after a disconnect, or at a stop sequence."""

    async def ask() -> None:
        async with contextlib.aclosing(engine.tokens(job)) as tokens:
            async for _ in tokens:
                engine.manager.output_router.output_queue.put("an output of an earlier request")
                break

    job = Job({"input_ids": torch.ones(1, LONG, dtype=torch.long)}, _job(do_sample=False).config)
    asyncio.run(ask())
    router = engine.manager.output_router
    assert not router.result_handlers and router.output_queue.empty()


def test_sequences_of_a_batch_share_the_models_options(engine: Any) -> None:
    """Options that a request leaves out are the model's, as in generate."""
    assert asyncio.run(_ask(engine, _job(do_sample=True, top_p=0.5))) == [1]
    used = engine.manager.config
    assert (used.do_sample, used.temperature, used.top_p, used.pad_token_id) == (True, 0.5, 0.5, 3)
    assert asyncio.run(_ask(engine, _job(do_sample=True, top_p=0.5, temperature=0.5))) == [1]
    assert len(engine.kept.model.managers) == 1


def test_a_function_that_a_stop_ends_fails_as_a_request_does(engine: Batches) -> None:
    def fail() -> None:
        raise RuntimeError("the pool is closed")

    def stop() -> None:
        engine.abort()
        fail()

    with pytest.raises(RuntimeError, match="is closed"):
        asyncio.run(engine.run(fail))
    with pytest.raises(StoppingError):
        asyncio.run(engine.run(stop))


def test_blocks_are_limited_to_what_requests_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(vocab_size=1000))
    model = SimpleNamespace(device=torch.device("cpu"), config=config)

    def sized(positions: int, free: int, **given: Any) -> tuple[int | None, int | None]:
        needs = Needs((LayerSize(0, 1024, None),), 512, 2, positions)
        monkeypatch.setattr(batches, "left_bytes", lambda: batches.RESERVE_BYTES + free)
        made = batches._sized_config(given, SimpleNamespace(model=model, admission=SimpleNamespace(needs=needs)))
        assert made.max_memory_percent <= 0.6
        return made.num_blocks, made.max_batch_tokens

    assert sized(2000, 16 << 30) == (16 * 8, 2000)  # of 256 tokens
    assert sized(100_000, 1 << 40) == (16 * 391, 8192)
    assert sized(100_000, 16 << 30) == (None, None)  # as many as fit
    assert sized(2000, 16 << 30, max_memory_percent=1e-4) == (None, None)
    assert sized(2000, 16 << 30, num_blocks=3) == (3, 8192)
    assert sized(2000, 16 << 30, max_batch_tokens=64) == (16 * 8, 64)
