"""Compare the sizes in a GGUF file's metadata with its tensors.

Configs, models and names allocate lists and tables of these lengths, so they are checked first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch_mesh.errors import UnsupportedModelError
from torch_mesh.store.gguf import Gguf, keys_within
from torch_mesh.store.header import store_error
from torch_mesh.store.sources.gguf import gguf_weights

MAX_LAYERS = 1 << 10  # a meta model with so many layers takes 150 MB
# Metadata keys, without the architecture, of sizes that are at most the largest side of a tensor in a complete file.
_SIZES = (
    *("vocab_size", "embedding_length", "embedding_length_per_layer_input", "feed_forward_length"),
    *("leading_dense_block_count", "nextn_predict_layers", "interleave_moe_layer_step", "full_attention_interval"),
    *("expert_count", "expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.shared_kv_layers"),
    *(f"attention.{part}_length{of}" for part in ("key", "value") for of in ("", "_mla", "_swa")),
    *("attention.q_lora_rank", "attention.kv_lora_rank"),
    *("rope.dimension_count", "rope.dimension_count_swa", "rope.dimension_sections"),
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
)


def check_sizes(parts: Sequence[Gguf], architecture: str) -> None:
    """Raises ``StoreError`` if the metadata state more layers, heads, experts or other sizes than the tensors have.

    A size may be at most the largest side of a tensor. Whether it equals the right side is checked with the model.
    """
    path, metadata = parts[0].header.path, parts[0].metadata
    own = keys_within(metadata, architecture)

    def refuse(key: str, value: Any, held: str) -> NoReturn:
        raise store_error(path, f"says that {architecture}.{key} is {value!r:.60}, {held}: damaged, or incomplete?")

    weights = gguf_weights([part.header for part in parts])
    side = max((max(weight.shape) for weight in weights.values()), default=0)
    for key in _SIZES:
        if key not in own:
            continue
        for value in own[key] if isinstance(own[key], list) else [own[key]]:
            if type(value) is not int or not 0 <= value <= side:
                refuse(key, value, f"which must be an integer from 0 to the largest side of its tensors, {side}")
    experts, used = own.get("expert_count"), own.get("expert_used_count")
    if isinstance(experts, int) and isinstance(used, int) and used > experts:
        refuse("expert_used_count", used, f"and that the model has {experts} experts")
    limit_layers(metadata, architecture)
    count, further = own.get("block_count", 0), own.get("nextn_predict_layers", 0)
    layers = len({match[1] for name in weights if (match := re.match(r"blk\.([0-9]{1,9})\.", name))})
    if count - further > layers:
        held = f"{further} of them for multi-token prediction, and its tensors are those of {layers} layers"
        refuse("block_count", count, held)


def limit_layers(metadata: Mapping[str, Any], architecture: str) -> None:
    """Raises ``UnsupportedModelError`` for more than ``MAX_LAYERS`` layers. Also applies to one part of a model."""
    count = metadata.get(f"{architecture}.block_count", 1)  # the config's error reports a missing one
    further = metadata.get(f"{architecture}.nextn_predict_layers", 0)
    if type(count) is not int or type(further) is not int or not 0 <= further < count <= MAX_LAYERS:
        raise UnsupportedModelError(
            f"A GGUF file whose {architecture}.block_count is {count!r:.60}, {further!r:.60} of them for multi-token "
            f"prediction, cannot be read: torch_mesh reads models of 1 to {MAX_LAYERS} layers."
        )
