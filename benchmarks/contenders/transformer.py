"""A transformers model as a decoder with a key-value cache, for the contenders that run one."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, StaticCache


class CachedTransformer:
    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.cache: Cache = DynamicCache(config=model.config)

    def reset(self) -> None:
        """Forgets the sequence."""
        self.cache = DynamicCache(config=self.model.config)

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.forward_rows([tokens])[0]

    @torch.inference_mode()
    def forward_rows(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        ids = torch.tensor(rows)
        output = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].float()

    def anonymous_dense(self) -> int:
        """Return the bytes of the parameters in anonymous memory, without those in a mapping of the checkpoint."""
        regions = sorted(anonymous_regions())
        starts = [first for first, _ in regions]
        total = 0
        for parameter in self.model.parameters():
            if not holds_values(parameter):
                continue
            index = bisect.bisect_right(starts, parameter.data_ptr()) - 1
            if index >= 0 and parameter.data_ptr() < regions[index][1]:
                total += parameter.nbytes
        return total


class CompiledSteps(CachedTransformer):
    """Eager prompts and compiled decode steps, like ``generate`` with a static cache, here of ``length`` tokens.

    Each number of sequences has its own cache and compiled step.

    ``compiled=False`` is for models whose sliding windows count tokens in Python: each count would be compiled again.
    """

    def __init__(self, model: PreTrainedModel, length: int, compiled: bool = True) -> None:
        super().__init__(model)
        self.caches: dict[int, StaticCache] = {}
        self.length = length
        self.step = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
        self.position = 0

    @torch.inference_mode()
    def reset(self) -> None:
        for cache in self.caches.values():
            cache.reset()
        self.position = 0

    @torch.inference_mode()
    def forward_rows(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        ids = torch.tensor(rows)
        sequences, tokens = ids.shape
        last = self.position + tokens
        positions = torch.arange(self.position, last).unsqueeze(0)
        self.position = last
        if sequences not in self.caches:
            self.caches[sequences] = StaticCache(config=self.model.config, max_cache_len=self.length)
        run, cache = self.step if tokens == 1 else self.model, self.caches[sequences]
        output = run(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].float()


def from_folder_or_file(model: str, config: Any) -> PreTrainedModel:
    """Open a checkpoint's folder or a GGUF file with a MeshConfig."""
    if not model.endswith(".gguf"):
        return AutoModelForCausalLM.from_pretrained(model, quantization_config=config)
    folder, name = Path(model).parent, Path(model).name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, quantization_config=config)


def holds_values(parameter: torch.Tensor) -> bool:
    """False for torch_mesh's packed weights, which have the size of the unpacked ones."""
    return not parameter.is_meta and type(parameter) is torch.nn.Parameter


def anonymous_regions() -> list[tuple[int, int]]:
    """Return the [first, last) addresses of this process's mappings without a file."""
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode == "0":
            first, last = (int(address, 16) for address in addresses.split("-"))
            regions.append((first, last))
    return regions
