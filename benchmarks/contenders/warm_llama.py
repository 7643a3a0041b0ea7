"""llama.cpp in memory. Runs in the peers' environment."""

from __future__ import annotations

from typing import Any

from llama import Llama
from serve import serve
from warm import Warm


def open_llama(setup: dict[str, Any]) -> Warm:
    return Warm({"": Llama({**setup, "random_access": False, "repack": True})}, setup)


if __name__ == "__main__":
    serve(open_llama)
