"""llama.cpp on a GGUF file. ``request["random_access"]`` tells the kernel that the mapping is read in random order.

``request["repack"]`` lets llama.cpp rearrange the weights for this processor, its default. This copies all of them into
anonymous memory; without it they are in the file mapping.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import session


def mappings(path: str) -> list[tuple[int, int]]:
    """Return (address, length) of this process's mappings of a file."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == path:
            first, last = (int(address, 16) for address in fields[0].split("-"))
            found.append((first, last - first))
    return found


def advise_random(path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    regions = mappings(path)
    if not regions:
        raise RuntimeError(f"llama.cpp did not map {path}")
    for address, length in regions:
        if libc.madvise(address, length, mmap.MADV_RANDOM) != 0:
            raise OSError(ctypes.get_errno(), f"madvise on the mapping of {path}")


class Llama:
    def __init__(self, request: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        path = str(Path(request["model"]).resolve())
        self.model = self._load(path, request["repack"])
        self.context = self._make_context(request)
        self.vocab = request["vocab"]
        if request["random_access"]:
            advise_random(path)

    def _load(self, path: str, repack: bool) -> Any:
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_mmap = True
        parameters.use_extra_bufts = repack
        model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        return model

    def _parameters(self, request: dict[str, Any]) -> Any:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = 512
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_threads = parameters.n_threads_batch = request["threads"]
        return parameters

    def _make_context(self, request: dict[str, Any]) -> Any:
        context = llama_cpp.llama_init_from_model(self.model, self._parameters(request))
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        return context

    def forward(self, tokens: Sequence[int]) -> np.ndarray:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        self._decode(llama_cpp.llama_batch_get_one(array, len(tokens)))
        return self._logits(-1)

    def _decode(self, batch: Any) -> None:
        status = llama_cpp.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _logits(self, index: int) -> np.ndarray:
        """Return the logits of a token of the batch."""
        logits = llama_cpp.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(logits, shape=(self.vocab,)).copy()

    def reset(self) -> None:
        """Forgets the sequence."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def begin(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        system = llama_cpp.llama_print_system_info().decode()
        return {"anonymous_weights": 0, "version": llama_cpp.__version__, "system": system}


if __name__ == "__main__":
    session.run(Llama)
