"""llama.cpp in memory, with one or two sequences. Runs in the peers' environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama import Llama
from serve import serve
from warm import Warm

MAX_SEQUENCES = 2


class LlamaRows(Llama):
    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__({**setup, "random_access": False, "repack": True})
        self.batch = llama_cpp.llama_batch_init(llama_cpp.llama_n_batch(self.context), 0, 1)
        self.position = 0

    def _parameters(self, request: dict[str, Any]) -> Any:
        parameters = super()._parameters(request)
        parameters.n_seq_max = MAX_SEQUENCES
        parameters.n_ctx *= MAX_SEQUENCES  # the context is divided among the sequences
        return parameters

    def reset(self) -> None:
        super().reset()
        self.position = 0

    def forward_rows(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        self.batch.n_tokens = 0
        lasts = [self._append(sequence, tokens) for sequence, tokens in enumerate(rows)]
        self._decode(self.batch)
        self.position += len(rows[0])
        return [self._logits(index) for index in lasts]

    def _append(self, sequence: int, tokens: Sequence[int]) -> int:
        """Add tokens to the batch, and return the index of the last one, whose logits are requested."""
        for at, token in enumerate(tokens):
            index = self.batch.n_tokens
            self.batch.token[index], self.batch.pos[index] = token, self.position + at
            self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, sequence
            self.batch.logits[index] = at + 1 == len(tokens)
            self.batch.n_tokens += 1
        return self.batch.n_tokens - 1


if __name__ == "__main__":
    serve(lambda setup: Warm({"": LlamaRows(setup)}, setup))
