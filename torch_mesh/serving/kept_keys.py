"""Keep the KV caches of recent conversations, so that a turn only computes its new tokens.

``transformers serve`` starts each request from scratch, although a chat sends its whole history with each turn.
``generate`` accepts a cache that covers the beginning of its prompt.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from torch_mesh.hf.generation_compat import CACHE_NAME
from torch_mesh.hf.kv_cache import record_past
from torch_mesh.serving.admission import Admission
from torch_mesh.serving.errors import RequestTooLongError
from torch_mesh.system.memory import trim_heap

# Arguments of generate that do not affect what is computed for a token.
_HARMLESS = {"input_ids", "attention_mask", "streamer", "generation_config", "tokenizer", "logits_processor"}
# Overhead of a tensor: Python and torch objects, and shared pages. Measured: 1.0 to 2.4 KB.
_TENSOR_BYTES = 4096


@dataclass(eq=False)
class Conversation:
    """Tokens and their cache."""

    tokens: Tensor  # [n]
    cache: DynamicCache
    shared: bool = False  # its memory belongs to another conversation until something is added

    @property
    def nbytes(self) -> int:
        """Bytes that dropping it frees, including spare room of its keys and Python objects."""
        cached: list[Any] = self.cache.layers
        layers = [layer for layer in cached if layer.is_initialized]
        held = (tensor for layer in layers for tensor in (layer.keys, layer.values))
        return self.tokens.nbytes + sum(tensor.untyped_storage().nbytes() + _TENSOR_BYTES for tensor in held)

    def common(self, tokens: Tensor) -> int:
        """The length of the common prefix with ``tokens`` [n] that it can rewind to; at least one token is left to
        compute."""
        most = min(len(self.tokens), len(tokens) - 1)
        differ = (self.tokens[:most] != tokens[:most]).nonzero()
        length = int(differ[0]) if len(differ) else most
        return length if all(_can_crop(layer, len(self.tokens) - length) for layer in self.cache.layers) else 0

    def crop(self, length: int) -> None:
        if surplus := len(self.tokens) - length:
            self.cache.crop(-surplus)
        self.tokens = self.tokens[:length]


@dataclass
class Counts:
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompts': they were cached
    generated_tokens: int = 0
    kept_bytes: int = 0
    kept_tokens: int = 0


@dataclass
class KeptKeys:
    """Replaces ``generate`` of a served model, one call at a time. ``limit``: bytes of memory to keep between calls.

    With an ``admission``, a call without enough memory raises RequestTooLongError after all conversations were dropped
    for it.
    """

    model: Any
    limit: int
    admission: Admission | None = None
    conversations: list[Conversation] = field(default_factory=list)  # in order of use, the most recent last
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._generate: Callable[..., Tensor] = self.model.generate
        self._lock = threading.Lock()
        self._computing: _Seen | None = None
        self._config = self.model.config.get_text_config(decoder=True)

    def generate(self, **arguments: Any) -> Tensor:
        """As the model's own: token ids [1, n]. For unsupported calls it only counts tokens."""
        seen = _Seen(arguments["input_ids"])
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), seen])
        prompt = arguments["input_ids"]
        with self._lock:
            conversation = self._taken(prompt[0]) if self._can_keep(arguments) else None
            reused = 0 if conversation is None else len(conversation.tokens)
            self.counts.prompt_tokens += prompt.numel()
            self.counts.reused_tokens += reused
            self._computing = seen
            try:
                self._make_room(arguments, conversation)
                if conversation is not None:
                    arguments[CACHE_NAME] = conversation.cache
                return self._generate(**arguments)
            finally:  # a client that disconnects ends it with an exception, and may come back
                self._computing = None
                self.counts.generated_tokens += seen.tokens.numel() - prompt.numel()
                if conversation is not None:
                    self._keep(conversation, seen.tokens[0])
                self._count()
                # Conversations are freed in any order, and malloc keeps the holes between the others.
                trim_heap()

    def check(self, prompt: Tensor, new: int) -> None:
        """Raises RequestTooLongError for a prompt [n] that will not fit with ``new`` tokens when its turn comes.

        Callable from any thread, also while another request runs: that one's memory is free by then, or kept and can be
        dropped.
        """
        if self.admission is None:
            return
        kept, computing = list(self.conversations), self._computing
        known = max((each.common(prompt) for each in kept), default=0)
        held = sum(each.nbytes for each in kept)
        if computing is not None:
            tokens = computing.tokens[0]
            known = max(known, Conversation(tokens, DynamicCache()).common(prompt) if self.limit else 0)
            held += self.admission.needs.cache(len(tokens))
        self.admission.check(len(prompt), new, known=known, held=held)

    def _make_room(self, arguments: dict[str, Any], conversation: Conversation | None) -> None:
        new = arguments["generation_config"].max_new_tokens
        if self.admission is None or new is None:
            return
        known = 0 if conversation is None else len(conversation.tokens)
        held = 0 if conversation is None or conversation.shared else conversation.nbytes
        while True:
            try:
                return self.admission.check(arguments["input_ids"].numel(), new, known=known, held=held)
            except RequestTooLongError:
                if not self.conversations:
                    raise
            del self.conversations[0]
            trim_heap()  # or the memory would not count as free

    def _can_keep(self, arguments: dict[str, Any]) -> bool:
        prompt, mask = arguments["input_ids"], arguments.get("attention_mask")
        config: GenerationConfig = arguments["generation_config"]
        others = set(arguments) - _HARMLESS - {"stopping_criteria"}
        return (
            self.limit > 0
            and not any(arguments[name] is not None for name in others)  # pictures are part of the prompt too
            and prompt.shape[0] == 1
            and (mask is None or bool(mask.all()))
            and config.cache_implementation is None
            and config.use_cache is not False
            and config.num_beams in (None, 1)
            and config.num_return_sequences in (None, 1)
            and self._new_cache() is not None
        )

    def _new_cache(self) -> DynamicCache | None:
        """None for a model with other state than keys and values, which cannot be rewound."""
        cache = DynamicCache(config=self._config)
        if not cache.layers or not all(
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers
        ):
            return None
        for layer in cache.layers:
            if type(layer) is DynamicSlidingWindowLayer:
                record_past(layer)
        return cache

    def _taken(self, tokens: Tensor) -> Conversation:
        """The kept conversation with the longest common prefix, rewound; or a new one."""
        best = max(self.conversations, key=lambda each: each.common(tokens), default=None)
        length = 0 if best is None else best.common(tokens)
        if best is None or length == 0:
            cache = self._new_cache()
            assert cache is not None
            return Conversation(tokens[:0], cache)
        if 2 * length < len(best.tokens):
            # Another conversation that shares the prefix, and until something is added its memory.
            cache = copy.copy(best.cache)
            cache.layers = [copy.copy(layer) for layer in cache.layers]
            best = Conversation(best.tokens, cache, shared=True)
        else:
            self.conversations.remove(best)
        best.crop(length)
        return best

    def _keep(self, conversation: Conversation, tokens: Tensor) -> None:
        layers: list[Any] = conversation.cache.layers
        lengths = {layer.get_seq_length() for layer in layers}
        if len(lengths) != 1 or 0 in lengths or min(lengths) > len(tokens):
            return  # it ended within a forward, or before the first
        conversation.shared &= min(lengths) == len(conversation.tokens)
        conversation.tokens = tokens[: min(lengths)].clone()
        if conversation.nbytes > self.limit:
            return  # others would be dropped for it, and then it as well
        self.conversations.append(conversation)
        while self.conversations and sum(each.nbytes for each in self.conversations) > self.limit:
            del self.conversations[0]

    def _count(self) -> None:
        self.counts.kept_bytes = sum(each.nbytes for each in self.conversations)
        self.counts.kept_tokens = sum(len(each.tokens) for each in self.conversations)


class _Seen(StoppingCriteria):
    """Stops nothing; records the tokens up to the last completed step."""

    def __init__(self, prompt: Tensor) -> None:
        self.tokens = prompt

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.tokens = input_ids
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _can_crop(layer: Any, surplus: int) -> bool:
    """A sliding window layer must still have the window before the token that it rewinds to."""
    if not isinstance(layer, DynamicSlidingWindowLayer) or not layer.is_initialized:
        return True
    length: int = layer.get_seq_length()
    if length < layer.sliding_window:
        return True
    keys: Any = layer.keys
    return bool(keys.shape[-2] - surplus >= min(layer.sliding_window - 1, length - surplus))
