"""Logits processors of requests: biases, penalties, grammars, and the recorder of log-probabilities."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from torch_mesh.serving.errors import RequestError
from torch_mesh.serving.grammars import error_text


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities, before temperature, penalties and biases."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most probable tokens, in order
    begins_text: bool = False  # no text is before it, also not that of a prompt


class Recorder(LogitsProcessor):
    """Keeps the distribution of each step until its token is known. Must be the first processor of a request.

    Args:
        top: number of most probable tokens to return.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._rows: dict[int, Tensor] = {}  # by position; a rejected draft's is replaced

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._rows[input_ids.shape[-1]] = scores[0].float().log_softmax(-1)
        return scores

    def take(self, position: int, token: int) -> TokenLogprobs:
        """The log-probabilities of the token at ``position`` in prompt and answer together."""
        return token_logprobs(self._rows.pop(position), token, self._top)


def token_logprobs(row: Tensor, token: int, top: int) -> TokenLogprobs:
    """The log-probabilities of one token, from ``row`` [vocabulary]."""
    values, ids = row.topk(min(top, row.numel()))
    return TokenLogprobs(token, float(row[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


class Bias(LogitsProcessor):
    """Adds biases to the logits of tokens.

    Args:
        biases: by token id.
    """

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._ids = torch.tensor(list(biases))
        self._values = torch.tensor(list(biases.values()))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self._ids.to(scores.device)] += self._values.to(scores)
        return scores


class Penalties(LogitsProcessor):
    """OpenAI's penalties: subtracts ``presence`` from the logit of each token in the answer, and ``frequency`` for each
    occurrence.

    Args:
        prompt: number of tokens of the prompt, which does not count.
    """

    def __init__(self, presence: float, frequency: float, prompt: int) -> None:
        self._presence, self._frequency, self._prompt = presence, frequency, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids, counts = input_ids[0, self._prompt :].unique(return_counts=True)
        scores = scores.clone()
        scores[:, ids] -= (self._presence + self._frequency * counts).to(scores)
        return scores


class Grammar(LogitsProcessor):
    """Allows only tokens that a grammar allows, and then the end.

    Args:
        tokenizer: of transformers, a fast one.
        lark: in llguidance's form of Lark.
        ends: token ids that end an answer.
        prompt: number of tokens of the prompt.
        field: of the request, for errors.

    Raises RequestError if llguidance, which is installed, does not accept the grammar.
    """

    def __init__(self, tokenizer: Any, lark: str, ends: Sequence[int], prompt: int, field: str) -> None:
        import llguidance

        self._matcher = llguidance.LLMatcher(_vocabulary(tokenizer, tuple(ends)), lark, log_level=0)
        if self._matcher.is_error():
            problem = error_text(self._matcher.get_error())
            raise RequestError(f"{field} cannot be converted to a grammar: {problem}. Change its schema.", field)
        self._matcher.compute_bitmask()  # which fails if no token can begin an answer
        if self._matcher.is_error():
            problem = error_text(self._matcher.get_error())
            raise RequestError(f"{field} has a schema by which no answer can begin: {problem}. Change it.", field)
        self._prompt = prompt
        self._ends = list(ends)
        self._held: list[int] = []  # tokens of the answer that the matcher has consumed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids[0, self._prompt :].tolist()
        pairs = zip(self._held, ids, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if rejected := len(self._held) - same:  # drafts; the model's own token may have replaced one
            self._matcher.rollback(rejected)
        # It refuses drafts that the grammar does not allow. What follows these is rejected with them.
        self._held = ids[: same + self._matcher.try_consume_tokens(ids[same:])]
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        if self._matcher.is_stopped():
            allowed[self._ends] = True
        else:
            bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
            unpacked = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).bool().flatten()
            count = min(len(allowed), len(unpacked))
            allowed[:count] = unpacked[:count]
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))


_VOCABULARIES: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _vocabulary(tokenizer: Any, ends: tuple[int, ...]) -> Any:
    """The tokenizer in llguidance's form, which takes a second to make."""
    import llguidance.hf

    make = _VOCABULARIES.get(tokenizer)
    if make is None:
        reference: Callable[[], Any] = weakref.ref(tokenizer)
        make = _VOCABULARIES[tokenizer] = functools.lru_cache(
            lambda ends: llguidance.hf.from_tokenizer(reference(), eos_token=list(ends))
        )
    return make(ends)
