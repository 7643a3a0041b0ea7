"""Keep the KV caches of recent conversations, so that a turn only computes its new tokens.

``generate`` accepts a cache that covers the beginning of its prompt. Recent ones are in memory; others may be on disk.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from torch_mesh.hf import cache_state
from torch_mesh.hf.generation_compat import CACHE_NAME, PLAIN_MODES
from torch_mesh.hf.kv_cache import record_past
from torch_mesh.serving.admission import Admission, shorten
from torch_mesh.serving.errors import RequestTooLongError
from torch_mesh.serving.prefix_cache import PrefixCache, PrefixCounts
from torch_mesh.system.memory import trim_heap

_LOG = logging.getLogger(__name__)
# Arguments of generate that do not affect the values computed for a token.
_NEUTRAL_ARGUMENTS = {"input_ids", "attention_mask", "streamer", "generation_config", "tokenizer", "logits_processor"}
# Tokens at the end of a prompt that the next turn may lack: the beginning of the answer, as the template writes it.
_MAX_PROMPT_END = 16
# Overhead of a tensor: Python and torch objects, and shared pages. Measured: 1.0 to 2.4 KB.
_TENSOR_BYTES = 4096


@dataclass(eq=False)
class Conversation:
    tokens: Tensor  # [n]
    cache: DynamicCache
    prompt: int = 0  # length of its last prompt, with which its next one begins
    first: int = 0  # length of its first prompt
    source: Conversation | None = None  # the one that its memory belongs to until tokens are added
    kept_bytes: int = 0  # nbytes when it was last kept; nothing changes it until it is taken

    @property
    def nbytes(self) -> int:
        """Bytes that dropping it frees, including spare room of its keys and Python objects."""
        held = (tensor for layer in self.cache.layers for tensor in cache_state.tensors_of(layer))
        return self.tokens.nbytes + sum(tensor.untyped_storage().nbytes() + _TENSOR_BYTES for tensor in held)

    def common(self, tokens: Tensor) -> int:
        """The length of the longest common prefix with ``tokens`` [n] to which the cache can be rewound, leaving at
        least one token to compute; otherwise 0."""
        own = self.tokens  # another thread may crop them meanwhile
        limit = min(len(own), len(tokens) - 1)
        differ = (own[:limit] != tokens[:limit]).nonzero()
        length = int(differ[0]) if len(differ) else limit
        return length if all(_can_crop(layer, len(own) - length) for layer in self.cache.layers) else 0

    def crop(self, length: int) -> None:
        if surplus := len(self.tokens) - length:
            self.cache.crop(-surplus)
        self.tokens = self.tokens[:length]


@dataclass
class Counts:
    prompt_tokens: int = 0
    reused_tokens: int = 0  # tokens of prompts that were cached
    generated_tokens: int = 0
    kept_bytes: int = 0
    kept_tokens: int = 0
    prefixes: PrefixCounts = field(default_factory=PrefixCounts)


@dataclass
class KeptKeys:
    """Replaces ``generate`` of a served model, one call at a time.

    Args:
        limit: bytes of memory for conversations between calls.
        admission: refuses a call that does not fit into memory, once all conversations have been dropped for it.
        prefixes: further conversations, on disk.
    """

    model: Any
    limit: int
    admission: Admission | None = None
    prefixes: PrefixCache | None = None
    conversations: list[Conversation] = field(default_factory=list)  # evicted from the front; the last was used last
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._generate: Callable[..., Any] = self.model.generate
        self._lock = threading.Lock()
        self._computing: _TokenRecorder | None = None
        self._config = self.model.config.get_text_config(decoder=True)
        self._warned = False
        self._is_supported = not cache_state.unsupported_reason(self.model)
        if self.prefixes is not None:
            self.counts.prefixes = self.prefixes.counts

    def generate(self, may_shorten: bool = False, **arguments: Any) -> Tensor:
        """``generate`` of the model: token ids [1, n]. Unsupported calls only count tokens."""
        tokens: Tensor = self.run(arguments, arguments["generation_config"], may_shorten=may_shorten)
        return tokens

    def run(
        self,
        arguments: dict[str, Any],
        config: GenerationConfig,
        options: Collection[str] = (),
        may_shorten: bool = False,
    ) -> Any:
        """Return what the model's generate returns.

        ``options``: names of ``arguments`` that ``config`` has too. ``may_shorten``: lower the limit of ``config`` to
        what fits.
        """
        seen = _TokenRecorder(arguments["input_ids"])
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), seen])
        prompt = arguments["input_ids"]
        with self._lock:
            if self.prefixes is not None:
                self.prefixes.refresh()
            conversation = self._take(prompt[0]) if self.can_keep(arguments, config, options) else None
            checkpoints = None
            self.counts.prompt_tokens += prompt.numel()
            self._computing = seen
            complete = False
            try:
                self._make_room(prompt[0], config, conversation, may_shorten)
                if conversation is not None:
                    conversation = self._with_prefix(conversation, prompt[0])
                    self.counts.reused_tokens += len(conversation.tokens)
                    if self.prefixes is not None:
                        checkpoints = self.prefixes.checkpoints(prompt[0], len(conversation.tokens), conversation.cache)
                    arguments[CACHE_NAME] = conversation.cache
                result = self._generate(**arguments)
                complete = True
                return result
            finally:  # also if a client disconnects: it may ask again
                self._computing = None
                self.counts.generated_tokens += seen.tokens.numel() - prompt.numel()
                states = {} if checkpoints is None else checkpoints.finish()
                if conversation is not None and _record_tokens(conversation, seen.tokens[0], complete):
                    # A request that was refused or cancelled has computed a part of its prompt at most.
                    conversation.prompt = min(prompt.numel(), len(conversation.tokens))
                    conversation.first = min(conversation.first or conversation.prompt, conversation.prompt)
                    self._keep(conversation)
                    if self.prefixes is not None:
                        self.prefixes.save(conversation.tokens, conversation.cache, states)
                self._count()
                # Conversations are freed in any order, and malloc keeps the gaps between them.
                trim_heap()

    @contextlib.contextmanager
    def room(self, prompt: Tensor, other: int = 0) -> Iterator[None]:
        """Evict conversations until a prompt [n], and ``other`` bytes, fit: the block computes it without ``generate``.

        Raises RequestTooLongError.
        """
        with self._lock:
            self.check(prompt, 0, other)
            try:
                self._evict_for(prompt, 0, None, other)
                yield
            finally:
                self._count()
                trim_heap()

    def check(self, prompt: Tensor, new: int, other: int = 0) -> None:
        """Raises RequestTooLongError for a prompt [n] that will not fit with ``new`` tokens, and ``other`` bytes, when
        its turn comes.

        Callable from any thread, also while another request runs.
        """
        if self.admission is None:
            return
        kept, computing = list(self.conversations), self._computing
        known = max((each.common(prompt) for each in kept), default=0)
        held = sum(each.kept_bytes for each in kept)
        if computing is not None:
            tokens = computing.tokens[0]
            known = max(known, Conversation(tokens, DynamicCache()).common(prompt) if self.limit else 0)
            held += self.admission.needs.cache(len(tokens))
        if self.prefixes is not None:
            known = max(known, self.prefixes.find(prompt).length)
        self.admission.check(len(prompt), new, known=known, held=held, other=other)

    def _make_room(
        self, prompt: Tensor, config: GenerationConfig, conversation: Conversation | None, may_shorten: bool
    ) -> None:
        while True:
            try:
                return self._evict_for(prompt, config.max_new_tokens, conversation)
            except RequestTooLongError as error:
                if not may_shorten or not shorten(config, error):
                    raise

    def _evict_for(self, prompt: Tensor, new: int | None, conversation: Conversation | None, other: int = 0) -> None:
        if self.admission is None or new is None:
            return
        known = 0 if conversation is None else len(conversation.tokens)
        if conversation is not None and self.prefixes is not None:
            known = max(known, self.prefixes.find(prompt).length)
        while True:
            held = 0 if conversation is None or conversation.source is not None else conversation.nbytes
            try:
                return self.admission.check(len(prompt), new, known=known, held=held, other=other)
            except RequestTooLongError:
                if not self.conversations:
                    raise
            if conversation is not None and conversation.source is self.conversations[0]:
                conversation.source = None  # the memory is its own now
            del self.conversations[0]
            trim_heap()  # otherwise the memory would not count as free

    def can_keep(self, arguments: Mapping[str, Any], config: GenerationConfig, options: Collection[str]) -> bool:
        """Whether a call can begin with kept keys, and keep its own. The arguments are those of ``run``."""
        prompt, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        others = set(arguments) - _NEUTRAL_ARGUMENTS - {"stopping_criteria"} - set(options)
        return (
            self._is_supported
            and (self.limit > 0 or self.prefixes is not None)
            and not any(arguments[name] is not None for name in others)  # pictures are part of the prompt too
            and isinstance(prompt, Tensor)
            and prompt.dim() == 2
            and prompt.shape[0] == 1
            and (mask is None or bool(mask.all()))
            and config.cache_implementation is None
            and config.use_cache is not False
            and config.get_generation_mode() in PLAIN_MODES  # assisted generation computes all of the prompt again
            and config.num_return_sequences in (None, 1)
        )

    def _new_cache(self) -> DynamicCache:
        cache = DynamicCache(config=self._config)
        for layer in filter(cache_state.is_window, cache.layers):
            record_past(layer)
        return cache

    def _with_prefix(self, conversation: Conversation, tokens: Tensor) -> Conversation:
        """``conversation``, or another one if the disk has more of a prompt's ``tokens`` [n]."""
        if self.prefixes is None:
            return conversation
        cache, known = self._new_cache(), len(conversation.tokens)
        length = self.prefixes.restore(tokens, cache, more_than=known)
        if not length:
            return conversation
        if known and conversation.source is None:
            self._append(conversation)
        return Conversation(tokens[:length], cache)

    def _take(self, tokens: Tensor) -> Conversation:
        """The kept conversation with the longest common prefix, rewound; or a new one."""
        best = max(self.conversations, key=lambda each: each.common(tokens), default=None)
        length = 0 if best is None else best.common(tokens)
        if best is None or length == 0:
            return Conversation(tokens[:0], self._new_cache())
        both = best.kept_bytes * (1 + length / len(best.tokens))
        if best.prompt - length > _MAX_PROMPT_END and both <= self.limit:
            # Another conversation with the same beginning, which shares the memory until tokens are added.
            cache = copy.copy(best.cache)
            cache.layers = [copy.copy(layer) for layer in cache.layers]
            if best.first - length <= _MAX_PROMPT_END:
                # Templates that drop the reasoning of earlier turns replace all that follows a turn's first prompt.
                # No turn continues that, so it is evicted before any other.
                self.conversations.remove(best)
                self.conversations.insert(0, best)
            best = Conversation(best.tokens, cache, source=best)
        else:
            self.conversations.remove(best)
        best.crop(length)
        return best

    def _keep(self, conversation: Conversation) -> None:
        if conversation.nbytes > self.limit:
            self._warn(conversation)
            return  # the loop below would drop all others, and then this one too
        self._append(conversation)
        total = sum(each.kept_bytes for each in self.conversations)
        while total > self.limit:
            total -= self.conversations.pop(0).kept_bytes

    def _append(self, conversation: Conversation) -> None:
        conversation.kept_bytes = conversation.nbytes
        self.conversations.append(conversation)

    def _warn(self, conversation: Conversation) -> None:
        if self._warned or not self.limit:
            return
        self._warned = True
        _LOG.warning(
            "A conversation of %s tokens has %s bytes of keys and values, and --keep-keys is %s: it is not kept, and "
            "its next turn computes all of it again. Give --keep-keys %dMiB or more.",
            f"{len(conversation.tokens):,}",
            f"{conversation.nbytes:,}",
            f"{self.limit:,}",
            -(-conversation.nbytes // 2**20),
        )

    def _count(self) -> None:
        self.counts.kept_bytes = sum(each.kept_bytes for each in self.conversations)
        self.counts.kept_tokens = sum(len(each.tokens) for each in self.conversations)


class _TokenRecorder(StoppingCriteria):
    """Records the tokens up to the last completed step."""

    def __init__(self, prompt: Tensor) -> None:
        self.tokens = prompt

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.tokens = input_ids
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _record_tokens(conversation: Conversation, tokens: Tensor, complete: bool) -> bool:
    """Set the tokens of a conversation to those of ``tokens`` [n] that its cache holds. False if there is none to keep.

    ``complete``: no forward failed. One that failed may have updated the states of some layers.
    """
    length = cache_state.length(conversation.cache)
    if not length or length > len(tokens):
        return False  # it ended within a forward, or before the first
    if not complete and any(map(cache_state.has_state, conversation.cache.layers)):
        return False
    if conversation.source is not None and length == len(conversation.tokens):
        return False  # nothing was added to what its source has
    conversation.source = None
    conversation.tokens = tokens[:length].clone()
    return True


def _can_crop(layer: Any, surplus: int) -> bool:
    """Whether a layer can drop its last ``surplus`` tokens: a sliding window must still be complete, and a state of all
    tokens cannot be rewound."""
    if cache_state.has_state(layer):
        return surplus == 0
    if not cache_state.is_window(layer) or not layer.is_initialized:
        return True
    length: int = layer.get_seq_length()
    if length < layer.sliding_window:
        return True
    keys: Any = layer.keys
    return bool(keys.shape[-2] - surplus >= min(layer.sliding_window - 1, length - surplus))
