"""Keep keys and values on disk, for prompts that begin like an earlier one of any conversation or process.

A sequence is divided into blocks of 64 tokens and a shorter last one. A block's name follows from the model's identity
and all tokens up to its end, so that equal beginnings share their blocks. Linear attention has states of all tokens
before them instead of rows: these are kept for a few positions alone.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.hf import cache_state
from torch_mesh.serving.model_identity import ModelIdentity
from torch_mesh.speculation.linear_attention import Checkpoints
from torch_mesh.store.disk_cache import prefix_folder
from torch_mesh.store.prefix_blocks import PrefixBlocks
from torch_mesh.system.background import BackgroundThread, Flag, TaskThreads

_LOG = logging.getLogger(__name__)
BLOCK = 64  # tokens
_ROWS, _WINDOW, _STATE = "rows", "window", "state"  # kinds of files of a block
_READERS = 4  # threads
_MAX_PENDING = 1 << 30  # maximum bytes waiting to be written; further sequences are not kept
_ENDING = 10.0  # seconds to write pending files when the cache is closed
# A state of linear attention takes as much as the rows of hundreds of tokens. States are kept at the ends of a prompt's
# longest messages: at most so many messages, each of at least so many tokens.
_MAX_MESSAGES, _MIN_MESSAGE = 4, 256
# Types of rotary embeddings that make the keys of a token depend on later tokens.
_BY_LENGTH = ("dynamic", "longrope")


@dataclass
class PrefixCounts:
    hits: int = 0  # prompts whose beginning was read from disk
    tokens: int = 0  # tokens of these beginnings
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True)
class Block:
    """Tokens from ``start`` up to ``stop`` of a sequence."""

    key: bytes
    start: int
    stop: int

    def file(self, kind: str) -> str:
        return f"{self.key.hex()}.{kind}"


@dataclass(frozen=True)
class Found:
    """The blocks of a prompt's beginning. ``known``: tokens whose rows are on disk, perhaps without a state."""

    blocks: tuple[Block, ...] = ()
    known: int = 0

    @property
    def length(self) -> int:
        return self.blocks[-1].stop if self.blocks else 0


class PrefixCache:
    """The prefix cache of one model. ``find`` may be called from any thread, the rest from the one that generates.

    Args:
        limit: bytes of files, of all models together. The least recently used go first.
        marks: ids of tokens that begin or end messages.

    Raises UnsupportedModelError for a model whose caches cannot be kept, MeshError without a home folder.
    """

    def __init__(self, model: Any, limit: int, marks: Iterable[int] = ()) -> None:
        self.counts = PrefixCounts()
        self._limit = limit
        self._model = model
        if reason := unsupported_reason(model):
            raise UnsupportedModelError(
                f"The keys of {type(model).__name__}'s prompts cannot be kept on disk, since {reason}: leave the "
                "prefix cache out."
            )
        cache = self._outline = DynamicCache(config=model.config.get_text_config(decoder=True))
        self._linear = any(map(cache_state.has_state, cache.layers))
        full, windows = (any(map(kind, cache.layers)) for kind in (cache_state.is_full, cache_state.is_window))
        self._row_kinds = (_ROWS,) * full + (_WINDOW,) * windows
        self._marks = torch.tensor(sorted(marks), dtype=torch.long)
        self._identity = ModelIdentity(model)
        self._folder = prefix_folder()
        name = os.path.basename(os.path.normpath(model.config.name_or_path or type(model).__name__))
        self._name = re.sub(r"[^\w.-]", "-", name)[:100].lstrip(".")
        self.refresh()
        self._writer = _Writer(self.counts)
        self._finalizer = weakref.finalize(self, self._writer.end, _ENDING)

    def close(self) -> None:
        """Write pending files, for at most ten seconds, and end the writing thread."""
        self._finalizer()

    def flush(self) -> None:
        """Return when everything given to ``save`` is written. After ``close`` nothing is."""
        self._writer.flush()

    def refresh(self) -> None:
        """Compute the model's identity again, so that only blocks of the model's current state are found."""
        root = self._identity.digest()
        if root != getattr(self, "_root", None):
            self._files = PrefixBlocks(self._folder / f"{self._name}-{root.hex()[:16]}", self._limit)
            self._root = root

    def find(self, tokens: Tensor) -> Found:
        """The longest beginning of a prompt [n] that is on disk, at most n - 1 tokens."""
        files, kind, tokens = self._files, self._row_kinds[0], tokens.cpu()
        chain: list[Block] = []
        for block in _chain(self._root, tokens[:-1]):
            if block.stop - block.start < BLOCK or not files.has(block.file(kind)):
                break
            chain.append(block)
        parent, start = (chain[-1].key, chain[-1].stop) if chain else (self._root, 0)
        # Look for the last block of an earlier sequence, which may be of any length.
        for stop in range(min(start + BLOCK, len(tokens)) - 1, start, -1):
            last = Block(_key(parent, tokens[start:stop]), start, stop)
            if files.has(last.file(kind)):
                chain.append(last)
                break
        known = chain[-1].stop if chain else 0
        while chain and not all(files.has(block.file(kind)) for block, kind in self._wanted(chain)):
            chain.pop()
        return Found(tuple(chain), known)

    def restore(self, tokens: Tensor, cache: DynamicCache, more_than: int = 0) -> int:
        """Put the longest beginning of a prompt [n] into an empty ``cache``, if it has more than ``more_than`` tokens.
        Returns its number of tokens: fewer than ``find`` found if files are damaged, 0 for none."""
        begun = time.monotonic()
        read = self.counts.read_bytes
        while (found := self.find(tokens)).length > more_than:
            held = self._read(found)
            if held is not None:
                cache_state.restore(cache, found.length, held)
                self.counts.hits += 1
                self.counts.tokens += found.length
                megabytes, seconds = (self.counts.read_bytes - read) / 1e6, time.monotonic() - begun
                _LOG.info(
                    "Read the keys of %d of %d tokens from disk: %.1f MB in %.2f s.",
                    found.length,
                    len(tokens),
                    megabytes,
                    seconds,
                )
                return found.length
        return 0

    def checkpoints(self, tokens: Tensor, start: int, cache: DynamicCache) -> Checkpoints | None:
        """Keep states of linear attention while a prompt [n] is computed into ``cache``, which has ``start`` of its
        tokens. Returns None for a model without such layers."""
        if not self._linear:
            return None
        known = self.find(tokens).known  # where earlier prompts diverge from this one
        ends = {known, len(tokens) - 1, *self._long_messages(tokens)}
        positions = {end // BLOCK * BLOCK for end in ends}
        return Checkpoints(self._model, cache, start, sorted(each for each in positions if each > start))

    def save(self, tokens: Tensor, cache: DynamicCache, states: dict[int, dict[str, Tensor]]) -> None:
        """Write the contents of ``cache`` for a sequence [n] in the background. ``states``: of linear attention, by
        position."""
        files, chain = self._files, list(_chain(self._root, tokens.cpu()))
        if self._linear and not files.has(chain[-1].file(_STATE)):
            states = states | {len(tokens): cache_state.states(cache)}
        rows = {kind: cache_state.rows(cache, windows=kind == _WINDOW) for kind in self._row_kinds}
        names = [(block, kind) for block in chain for kind in self._row_kinds]
        names += [(block, _STATE) for block in chain if block.stop in states]
        self._writer.add(_Job(files, len(tokens), names, rows, states))

    def _wanted(self, chain: Sequence[Block]) -> Iterator[tuple[Block, str]]:
        """The files with the contents of a cache after the last block of ``chain``, without those of whole rows."""
        stop = chain[-1].stop
        if _WINDOW in self._row_kinds:
            rows = max(cache_state.window_rows(self._outline, stop).values())
            yield from ((block, _WINDOW) for block in chain if block.stop > stop - rows)
        if self._linear:
            yield chain[-1], _STATE

    def _read(self, found: Found) -> dict[str, Tensor] | None:
        """The tensors of the files; None if a file is missing or damaged."""
        files = self._files
        wanted: dict[str, list[Block]] = {_ROWS: list(found.blocks)} if _ROWS in self._row_kinds else {}
        for block, kind in self._wanted(found.blocks):
            wanted.setdefault(kind, []).append(block)
        held: dict[str, Tensor] = {}
        # Threads write into these tensors outside of any inference mode.
        with torch.inference_mode(False), torch.no_grad():
            for kind, blocks in wanted.items():
                if kind == _STATE:
                    read = files.read(blocks[0].file(kind))
                    part, nbytes = ({}, 0) if read is None else read
                else:
                    part, nbytes = self._gathered(files, blocks, kind)
                if not part:
                    return None
                held |= {name: tensor.to(self._model.device) for name, tensor in part.items()}
                self.counts.read_bytes += nbytes
        return held

    def _gathered(self, files: PrefixBlocks, blocks: Sequence[Block], kind: str) -> tuple[dict[str, Tensor], int]:
        """Rows of ``blocks`` side by side, and bytes read; no rows if a file is missing or damaged."""
        read = files.read(blocks[0].file(kind))
        if read is None:
            return {}, 0
        first, nbytes = read
        stop = blocks[-1].stop
        windows = cache_state.window_rows(self._outline, stop) if kind == _WINDOW else {}
        rows = {
            name: cache_state.room_of(part, windows.get(name.partition(".")[0], stop)) for name, part in first.items()
        }

        def put(block: Block) -> int:
            read = (first, nbytes) if block is blocks[0] else files.read(block.file(kind))
            if read is None:
                return 0
            for name, part in read[0].items():
                begin = stop - rows[name].shape[-2]  # the token of the first row
                skipped = max(0, begin - block.start)
                rows[name][..., block.start + skipped - begin : block.stop - begin, :] = part[..., skipped:, :]
            return read[1]

        with TaskThreads(_READERS) as threads:
            sizes = threads.map(put, blocks)
        return (rows, sum(sizes)) if all(sizes) else ({}, sum(sizes))

    def _long_messages(self, tokens: Tensor) -> list[int]:
        """The ends of the longest messages."""
        marks = torch.isin(tokens.cpu(), self._marks).nonzero()[:, 0].tolist()
        messages = sorted(((end - start, end) for start, end in itertools.pairwise([0, *marks])), reverse=True)
        return [end for tokens, end in messages[:_MAX_MESSAGES] if tokens >= _MIN_MESSAGE]


@dataclass(frozen=True)
class _Job:
    """The files of a sequence of ``length`` tokens. ``rows`` by kind, up to the last token; ``states`` by position."""

    files: PrefixBlocks
    length: int
    names: Sequence[tuple[Block, str]]
    rows: Mapping[str, Mapping[str, Tensor]]
    states: Mapping[int, Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        parts = (*self.rows.values(), *self.states.values())
        return sum(tensor.nbytes for part in parts for tensor in part.values())

    def tensors(self, block: Block, kind: str) -> dict[str, Tensor]:
        """The tensors of a file; empty if a window no longer has all of the block."""
        if kind == _STATE:
            return dict(self.states[block.stop])
        found = {}
        for name, tensor in self.rows[kind].items():
            first = self.length - tensor.shape[-2]
            if block.start < first:
                return {}
            found[name] = tensor[..., block.start - first : block.stop - first, :]
        return found


class _Writer:
    """A thread that writes files in the background."""

    def __init__(self, counts: PrefixCounts) -> None:
        self._counts = counts
        self._jobs: queue.SimpleQueue[_Job | Flag | None] = queue.SimpleQueue()
        self._thread: BackgroundThread | None = None
        self._lock = threading.Lock()
        self._pending = 0  # bytes
        self._ended = False

    def add(self, job: _Job) -> None:
        with self._lock:
            if self._ended:
                return
            if self._pending and self._pending + job.nbytes > _MAX_PENDING:
                _LOG.info("The disk is behind: the keys of %d tokens are not written.", job.length)
                return
            self._pending += job.nbytes
        if self._thread is None:
            self._thread = BackgroundThread(self._run, "torch-mesh-prefixes")
        self._jobs.put(job)
        if self._ended:  # meanwhile, maybe before there was a thread to end
            self._jobs.put(None)

    def flush(self) -> None:
        """Wait until what was added is written, or the thread has ended."""
        if self._thread is not None:
            done = Flag()
            self._jobs.put(done)
            while self._thread.is_alive() and not done.wait(0.1):
                pass

    def end(self, timeout: float) -> None:
        self._ended = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Flag):
                job.set()
                continue
            try:
                self._write(job)
            except Exception as error:  # noqa: BLE001  the answer is not affected
                _LOG.warning("The keys of %d tokens are not kept on disk: %s", job.length, error)
            with self._lock:
                self._pending -= job.nbytes
            job = None  # otherwise it would hold its tensors until the next job

    def _write(self, job: _Job) -> None:
        for block, kind in job.names:
            name = block.file(kind)
            if not job.files.has(name) and (tensors := job.tensors(block, kind)):
                self._counts.written_bytes += job.files.write(name, tensors)
        job.files.touch([block.file(kind) for block, kind in job.names])


def unsupported_reason(model: Any) -> str:
    """Why the contents of a model's caches cannot be kept; empty if they can."""
    config = model.config.get_text_config(decoder=True)
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "its layers are on several devices"
    if kinds := _rotary_types(getattr(config, "rope_parameters", None)) & set(_BY_LENGTH):
        return f"rotary embeddings of type {', '.join(sorted(kinds))} give a token other keys in a longer prompt"
    return cache_state.unsupported_reason(model)


def _rotary_types(parameters: Any) -> set[str]:
    """The rotary types of all layers: some models have parameters for each type of layer."""
    if not isinstance(parameters, dict):
        return set()
    within = [_rotary_types(value) for value in parameters.values()]
    return {str(parameters.get("rope_type"))}.union(*within)


def _chain(root: bytes, tokens: Tensor) -> Iterator[Block]:
    """All blocks of a sequence [n]; the last one may be shorter."""
    key = root
    for start in range(0, len(tokens), BLOCK):
        part = tokens[start : start + BLOCK]
        key = _key(key, part)
        yield Block(key, start, start + len(part))


def _key(parent: bytes, tokens: Tensor) -> bytes:
    """The key of a block of ``tokens`` [n], on the CPU, after the block ``parent``."""
    return hashlib.blake2b(parent + tokens.to(torch.int64).numpy().tobytes(), digest_size=16).digest()
