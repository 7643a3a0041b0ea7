"""torch_mesh with every expert in memory, in eager mode and with compiled decode steps."""

from __future__ import annotations

from typing import Any

import torch
from serve import serve
from transformer import CachedTransformer, CompiledSteps, from_folder_or_file
from warm import CONTEXT, WARM_UP, Warm

import torch_mesh


def open_mesh(setup: dict[str, Any]) -> Warm:
    torch.set_num_threads(setup["threads"])
    config = torch_mesh.MeshConfig(resident=1.0, **setup["fields"])
    model = from_folder_or_file(setup["model"], config)
    length = CONTEXT + WARM_UP + setup["decode"]
    decoders = {"eager": lambda: CachedTransformer(model), "compiled": lambda: CompiledSteps(model, length)}
    return Warm({mode: decoders[mode]() for mode in setup.get("modes", decoders)}, setup)


if __name__ == "__main__":
    serve(open_mesh)
