"""llama.cpp with the experts of a recorded trace instead of those of the random model's routers.

Its scheduler exposes each layer's chosen experts before they are read, and they are overwritten there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import session
from llama import Llama
from llama_cpp._ggml import libggml

CHOSEN = b"ffn_moe_topk-"  # int32 [tokens, top_k], a part of each token's experts in their order


class Tensor(ctypes.Structure):
    """The first fields of a ``ggml_tensor``."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_size_t * 4),
    ]


class LlamaReplay(Llama):
    def __init__(self, request: dict[str, Any]) -> None:
        with np.load(request["trace"]) as trace:
            self.routing = trace["ids"].astype(np.int32)  # [tokens, layers, top_k]
        self.position, self.chosen = 0, self.routing[:0]
        self.forced: list[int] = []  # layers of this forward
        self.data, self.name = libggml.ggml_get_data, libggml.ggml_get_name
        self.data.restype, self.data.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self.name.restype, self.name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._seen)
        super().__init__(request)

    def _parameters(self, request: dict[str, Any]) -> Any:
        parameters = super()._parameters(request)
        parameters.cb_eval = self.callback
        return parameters

    def _seen(self, address: int, ask: bool, _user: Any) -> bool:
        name = self.name(address)
        if not name.startswith(CHOSEN):
            return False
        if ask:
            return True
        tensor, layer = Tensor.from_address(address), int(name.removeprefix(CHOSEN))
        top_k, tokens = tensor.sizes[:2]
        # The last layer has only the tokens with logits.
        routing_rows = np.ascontiguousarray(self.chosen[-tokens:, layer])
        if routing_rows.shape == (tokens, top_k) and tensor.strides[0] == routing_rows.itemsize:
            for token, experts in enumerate(routing_rows):
                ctypes.memmove(self.data(address) + token * tensor.strides[1], experts.ctypes.data, experts.nbytes)
            self.forced.append(layer)
        return True

    def forward(self, tokens: Sequence[int]) -> np.ndarray:
        self.chosen = self.routing[self.position : self.position + len(tokens)]
        self.position += len(tokens)
        self.forced.clear()
        logits = super().forward(tokens)
        if self.forced != list(range(self.routing.shape[1])):
            raise RuntimeError(f"llama.cpp let the experts of the layers {self.forced} be chosen, and of no others")
        return logits


if __name__ == "__main__":
    session.run(LlamaReplay)
