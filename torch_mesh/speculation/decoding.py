"""Greedy search and sampling in which a forward verifies drafted tokens.

Each row of logits becomes a token as in transformers' loop, in order: processors, argmax or a sample, streamer and
stopping criteria. A drafted token is accepted if it equals that token; the rest of the forward after the first
rejection is discarded. Tokens therefore equal those of plain decoding: this is the rejection rule of speculative
sampling (arXiv 2211.17192) for deterministic drafts.
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress, takewhile
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from torch_mesh.hf.compile import SLACK
from torch_mesh.hf.generation_compat import (
    CACHE_NAME,
    PLAIN_MODES,
    compiles_steps,
    decoding,
    next_kwargs,
    pad_token,
    prefill,
)
from torch_mesh.hf.torch_compat import raise_recompile_limit
from torch_mesh.modules.experts import pools_of
from torch_mesh.routing.recording import is_recorded
from torch_mesh.speculation.assistant import Assistant, check_assistant
from torch_mesh.speculation.controller import Controller
from torch_mesh.speculation.drafter import Drafter
from torch_mesh.speculation.lookup import Lookup
from torch_mesh.speculation.rewinding import Rewinding, rewind_unsupported_reason
from torch_mesh.speculation.suitability import model_unsupported_reason
from torch_mesh.statistics.speculated import tally_of

# A forward of up to 16 rows is a decode step to the pool; one of them is the token before the draft.
LENGTHS = (3, 7, 15)
MAX_DRAFTED = SLACK
_MAX_ROWS = 1 + MAX_DRAFTED
MAX_TEXTS = _MAX_ROWS // (1 + LENGTHS[0])
# Steps with and without drafts, and 16 cache lengths by doubling.
_GRAPHS = 16 * (1 + len(LENGTHS))


def speculate(*, lengths: Sequence[int] = LENGTHS, assistant: Any = None) -> Speculation:
    """An object for ``generate(custom_generate=...)`` that verifies several tokens in one forward, where that pays.

    >>> speculation = torch_mesh.speculate()
    >>> model.generate(**inputs, custom_generate=speculation)

    Drafts are what followed an earlier occurrence of the text's ending (prompt lookup) or, with an ``assistant`` (a
    smaller model with the same tokenizer), its greedy continuation. ``lengths`` are the draft lengths to choose from, 1
    to 15 tokens; the best one, or none, is found by measuring while decoding and kept for later texts, so reuse the
    object. With ``torch_mesh.compile`` each length is a graph. Tokens are those of plain decoding, greedy and sampled,
    as far as a row's bits do not depend on other rows: docs/speculation.md.

    Supports up to 4 texts at a time, which advance by the drafts that are right in all of them (at most 16 rows
    together), with greedy search or sampling and a cache that can be rewound; other calls raise ValueError. See
    ``MeshConfig.speculation`` for a model that speculates in every ``generate``.

    Raises ValueError for invalid ``lengths`` and for an ``assistant`` that cannot draft.
    """
    given = list(lengths)
    if not given or not all(type(each) is int and 1 <= each <= MAX_DRAFTED for each in given):
        raise ValueError(f"lengths={lengths!r} are not numbers of drafted tokens: give some of 1 to {MAX_DRAFTED}.")
    controller = Controller(sorted(set(given)))
    if assistant is None:
        return Speculation(controller)
    check_assistant(assistant)
    return Speculation(controller, functools.partial(Assistant, assistant))


class Speculation:
    """The object of ``speculate``. ``drafter``: makes a text's drafter from its tokens; ``clock``: seconds, such as
    ``time.perf_counter``."""

    def __init__(
        self,
        controller: Controller,
        drafter: Callable[[list[int]], Drafter] = Lookup,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._controller = controller
        self._controllers = {1: controller}  # by the number of texts at a time
        self._new_controller = copy.deepcopy(controller)
        self._drafter = drafter
        self._clock = clock
        self._ran: set[Any] = set()  # kinds of forwards that have run

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by ``generate``, or by a wrapper. Raises ValueError for unsupported calls."""
        call = _call_of_generate(model, generation_config)
        streamer = call.get("streamer") if streamer is None else streamer
        synced_gpus = synced_gpus or _is_synced(model, call.get("synced_gpus"))
        if reason := unsupported_reason(model, input_ids, generation_config, synced_gpus, model_kwargs):
            raise ValueError(f"torch_mesh.speculate does not support this call: {reason}. Leave custom_generate out.")
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        return self.decode(model, *arguments, streamer=streamer, **model_kwargs)

    def decode(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        *,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Replaces transformers' ``_sample`` for calls without an ``unsupported_reason``."""
        outputs = prefill(model, input_ids, generation_config, model_kwargs)
        model_kwargs = next_kwargs(model, outputs, model_kwargs)
        text = _Text(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        text.add(outputs.logits[:, -1])
        del outputs  # may hold the logits of the whole prompt
        with decoding(model), self._steps(model, text, generation_config, model_kwargs) as step:
            while not text.finished:
                model_kwargs = step(model_kwargs)
        return text.result(model_kwargs[CACHE_NAME])

    @contextmanager
    def _steps(
        self, model: Any, text: _Text, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
        compiles = compiles_steps(model, model_kwargs, generation_config)
        forward = model.get_compiled_call(generation_config.compile_config) if compiles else model.__call__
        cache = model_kwargs[CACHE_NAME]
        fixed: list[Any] = [layer for layer in cache.layers if type(layer) is StaticLayer]
        # Sliding windows have one length in all caches.
        capacity = compiles and max(getattr(layer, "max_cache_len", 0) for layer in cache.layers)
        drafters = [self._drafter(tokens) for tokens in text.without_padding(model_kwargs.get("attention_mask"))]
        texts = len(drafters)
        controller = self._controllers.setdefault(texts, copy.deepcopy(self._new_controller))
        tally = tally_of(model)
        pool = _Pool(model)  # counts from the end of the prompt
        controller.begin()

        def step(model_kwargs: dict[str, Any]) -> dict[str, Any]:
            begin = self._clock()
            room = [layer.max_cache_len - int(layer.cumulative_length) - 1 for layer in fixed]
            length = text.ids.shape[1]
            max_drafted = min(_MAX_ROWS // texts - 1, text.max_length - length - 1, *room)
            tier = text.tier(drafters)
            chosen = controller.choose(max_drafted, tier)
            steady = not chosen or not text.waits_for(drafters)
            drafted = text.drafts(drafters, chosen) if chosen else [[] for _ in drafters]
            count = controller.fitting(len(drafted[0]))  # other lengths have neither a measured time nor a graph
            drafted = [own[:count] for own in drafted]
            drafting = self._clock() - begin
            unused_drafting = drafting if chosen and not count else 0.0
            held, running = rewinding.length(), text.running
            try:
                logits = _forward(model, forward, text.ids, drafted, model_kwargs)
            except BaseException:  # some or all layers already have the drafted tokens
                rewinding.go_back(held)
                raise
            try:
                tokens = text.add_while(drafted, logits)
            finally:  # the cache may be used again after a processor, streamer or criterion raises
                rewinding.rewind(count + 1 - text.rows)
            for drafter, own in zip(drafters, zip(*tokens, strict=True), strict=True):
                drafter.extend(own)
            kind = (texts, count, capacity)  # each kind is compiled separately
            seconds = self._clock() - begin if kind in self._ran and steady else None
            self._ran.add(kind)
            controller.observe(count, len(tokens) - 1, seconds and seconds - unused_drafting, tier)
            controller.spend(unused_drafting)
            tally.add(count, len(tokens), seconds, *pool.since(), texts=running)
            return next_kwargs(model, {}, model_kwargs, num_new_tokens=len(tokens))

        # A graph for each draft length and cache length: more than torch allows by default.
        rewinding = Rewinding(model, cache)
        try:
            with raise_recompile_limit(_GRAPHS) if compiles else nullcontext():
                yield step
        finally:
            rewinding.finish()


class _Text:
    """The tokens of one or several texts, and how each next one is made."""

    def __init__(
        self, ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, streamer: Any
    ) -> None:
        self.ids = ids
        self.finished = False
        self.rows = 0  # rows of the last forward that belong to the text
        self._vocabulary = 0  # size of the logits
        self.max_length: int = stopping_criteria.max_length or sys.maxsize
        self._process = logits_processor
        self._stop = stopping_criteria
        self._streamer = streamer
        self._samples: bool = generation_config.do_sample
        self._unfinished = torch.ones(len(ids), dtype=torch.long, device=ids.device)
        # As in transformers' loop: a text that has ended is padded if an ending token is defined.
        ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self._pad: Tensor | None = pad_token(generation_config).to(ids.device) if ends else None
        self._as_dict: bool = generation_config.return_dict_in_generate
        self._scores: Any = () if self._as_dict and generation_config.output_scores else None
        self._logits: Any = () if self._as_dict and generation_config.output_logits else None

    def without_padding(self, mask: Any) -> Iterator[list[int]]:
        """The tokens of each text, by the mask [texts, tokens] of ``generate``, if any."""
        # With a cache the tokens may be fewer than the mask has.
        masks = mask[:, -self.ids.shape[1] :].bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        for row, tokens in enumerate(self.ids):
            yield (tokens if masks is None else tokens[masks[row].to(tokens.device)]).tolist()

    def waits_for(self, drafters: Sequence[Drafter]) -> bool:
        """Whether the next draft would take longer than later ones."""
        return any(drafter.is_behind for drafter in compress(drafters, self._running()))

    def tier(self, drafters: Sequence[Drafter]) -> int:
        """The tier of the least reliable draft."""
        return max((drafter.tier for drafter in compress(drafters, self._running())), default=0)

    def drafts(self, drafters: Sequence[Drafter], length: int) -> list[list[int]]:
        """[texts][drafted]: ``length`` tokens of each; empty if a running text has none."""
        found: list[list[int]] = []
        for drafter, is_running in zip(drafters, self._running(), strict=True):
            drafted = drafter.draft(length) if is_running else [int(self._pad or 0)] * length
            own = list(takewhile(lambda token: token < self._vocabulary, drafted))
            if not own:
                return [[] for _ in drafters]
            found.append(own)
        length = min(map(len, found))
        return [own[:length] for own in found]

    @property
    def running(self) -> int:
        """How many texts have not ended."""
        return sum(self._running())

    def _running(self) -> list[bool]:
        """Which texts have not ended."""
        return [True] * len(self.ids) if self._pad is None else self._unfinished.bool().tolist()

    def add(self, row: Tensor) -> list[int]:
        """The next token of each text, from logits [texts, vocabulary]."""
        logits = row.to(copy=True, dtype=torch.float32, device=self.ids.device)
        self._vocabulary = logits.shape[-1]
        scores = self._process(self.ids, logits)
        if self._scores is not None:
            self._scores += (scores,)
        if self._logits is not None:
            self._logits += (logits,)
        if self._samples:
            token = torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            token = torch.argmax(scores, dim=-1)
        if self._pad is not None:
            token = token * self._unfinished + self._pad * (1 - self._unfinished)
        self.ids = torch.cat([self.ids, token[:, None]], dim=-1)
        self._unfinished = self._unfinished & ~self._stop(self.ids, self._scores)
        self.finished = not self._unfinished.any()
        if self._streamer is not None:
            self._streamer.put(token.cpu())
        return [int(each) for each in token]

    def add_while(self, drafted: Sequence[Sequence[int]], logits: Tensor) -> list[list[int]]:
        """The tokens [added][texts] of logits [texts, drafted + 1, vocabulary], up to the first that differs from its
        draft in any text.

        The padding of a text that has just ended differs, and has to be in the cache.
        """
        tokens: list[list[int]] = []
        count = logits.shape[1] - 1
        for row in range(count + 1):
            self.rows = row + 1
            tokens.append(self.add(logits[:, row]))
            if self.finished or row == count or tokens[row] != [own[row] for own in drafted]:
                break
        return tokens

    def result(self, cache: Any) -> Any:
        if self._streamer is not None:
            self._streamer.end()
        if not self._as_dict:
            return self.ids
        kept: dict[str, Any] = {
            "sequences": self.ids,
            "scores": self._scores,
            "logits": self._logits,
            CACHE_NAME: cache,
        }
        return GenerateDecoderOnlyOutput(**kept)


class _Pool:
    def __init__(self, model: nn.Module) -> None:
        self._engines = [pool.engine for pool in pools_of(model)]
        self._before = [engine.totals() for engine in self._engines]

    def since(self) -> tuple[float, int]:
        """Seconds of stalls and bytes read since the last call."""
        now, stalled, read = [engine.totals() for engine in self._engines], 0, 0
        for after, before in zip(now, self._before, strict=True):
            continues = after["resets"] == before["resets"]
            stalled += after["stall_nanoseconds"] - continues * before["stall_nanoseconds"]
            read += after["bytes_read"] - continues * before["bytes_read"]
        self._before = now
        return stalled / 1e9, read


def _forward(
    model: Any, forward: Any, ids: Tensor, drafted: Sequence[Sequence[int]], model_kwargs: dict[str, Any]
) -> Tensor:
    """Logits [texts, drafted + 1, vocabulary] after the last token of ``ids`` and each drafted one [texts][drafted]."""
    rows = len(drafted[0]) + 1
    if rows > 1:
        ids = torch.cat([ids, ids.new_tensor(drafted)], dim=-1)
        model_kwargs = next_kwargs(model, {}, dict(model_kwargs), num_new_tokens=rows - 1)
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=rows, **model_kwargs)
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = rows
    return forward(**inputs, return_dict=True).logits[:, -rows:]


def unsupported_reason(
    model: Any, input_ids: Tensor, generation_config: Any, synced_gpus: bool, model_kwargs: dict[str, Any]
) -> str:
    """Why a call of ``generate`` cannot speculate; empty if it can."""
    name = type(model).__name__
    mode = generation_config.get_generation_mode()
    if reason := model_unsupported_reason(model):
        return reason
    if mode not in PLAIN_MODES:
        return f"it is for greedy search and sampling, and this is {mode.value.replace('_', ' ')}"
    if input_ids.shape[0] > MAX_TEXTS:
        return f"it is for up to {MAX_TEXTS} texts at a time, and here are {input_ids.shape[0]}"
    if is_recorded(model):
        return "record_trace would record rejected drafts as tokens of the text"
    if model_kwargs.get("inputs_embeds") is not None:
        return "a prompt of embeddings has no tokens to look up"
    if synced_gpus:
        return "its forwards are not as many in each process as synced_gpus wants"
    if generation_config.return_dict_in_generate and (
        generation_config.output_attentions or generation_config.output_hidden_states
    ):
        return "a forward of several tokens has not the attentions and hidden states of each by itself"
    cache = model_kwargs.get(CACHE_NAME)
    if cache is None:
        return (
            "it needs a cache, and use_cache=False leaves none"
            if not generation_config.use_cache
            else f"{name} keeps no cache that it knows"
        )
    return rewind_unsupported_reason(model, cache)


def _call_of_generate(model: Any, generation_config: Any) -> Mapping[str, Any]:
    """The arguments of the calling ``generate``; empty: none.

    transformers (5.24) passes a custom_generate neither the streamer, whose reader would wait for ever, nor
    synced_gpus. Finds the innermost call for ``model`` on this thread or, if a wrapper has changed threads, the call on
    any thread with this generation_config.
    """
    for names in _calls_of_generate(model, sys._getframe()):
        return names
    for frame in sys._current_frames().values():
        for names in _calls_of_generate(model, frame):
            if any(value is generation_config for value in names.values()):
                return names
    return {}


def _calls_of_generate(model: Any, frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    """Names and values, from ``frame`` outwards."""
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
            yield frame.f_locals
        frame = frame.f_back


def _is_synced(model: Any, given: bool | None) -> bool:
    """``synced_gpus`` as ``generate`` resolves it."""
    if given is not None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return bool(given)
    return torch.distributed.get_world_size() > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
