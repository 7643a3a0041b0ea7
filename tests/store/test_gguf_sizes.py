"""Numbers in a GGUF file's metadata that contradict its tensors are refused before anything of that size is
allocated."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import gguf_files
import mutations
import pytest
from gguf_files import Written, with_number
from transformers import AutoModelForCausalLM

from torch_mesh.config import MeshConfig
from torch_mesh.errors import MeshError, StoreError, UnsupportedModelError
from torch_mesh.store.checkpoint import read_config
from torch_mesh.store.gguf import read_gguf
from torch_mesh.store.gguf_sizes import MAX_LAYERS

NUMBERS = (0, 1, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, -1, -(1 << 63))
_EXTRA_BYTES = 512 << 20  # address space; arenas of threads take some of it


def _with(made: Written, key: str, value: int, folder: Path) -> Path:
    path = folder / "changed.gguf"
    path.write_bytes(with_number(made.path.read_bytes(), made.path, key, value))
    return path


def _numbers(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _keys(made: Written) -> list[str]:
    found = read_gguf(made.path).metadata.items()
    return [key for key, value in found if value != [] and all(isinstance(each, int) for each in _numbers(value))]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", gguf_files.ARCHITECTURES)
def test_any_number_is_a_typed_error_or_a_model(
    architecture: str, every: bool, written: Callable[..., Written], tmp_path: Path
) -> None:
    """Tests every key, in little memory. Quick runs take one number per key, a different one for each."""
    made = written(architecture, "Q8_0")
    start = gguf_files.ARCHITECTURES.index(architecture)
    for number, key in enumerate(_keys(made), start):
        for value in NUMBERS if every else [NUMBERS[number % len(NUMBERS)]]:
            path = _with(made, key, value, tmp_path)
            with warnings.catch_warnings(), mutations.limits(60, _EXTRA_BYTES):
                warnings.simplefilter("ignore")
                try:
                    gguf_files.read_whole(path, tokenizer=key.startswith("tokenizer."))
                except MeshError as problem:
                    # An error for lack of memory does not count.
                    assert not re.search("(?i)allocat|memory", str(problem)), (key, value, problem)


@pytest.mark.parametrize(
    ("architecture", "key", "value", "message"),
    [
        ("qwen35moe", "attention.head_count", 1 << 31, r"from 0 to the largest side of its tensors, \d+"),
        ("qwen35moe", "ssm.time_step_rank", 1 << 28, r"from 0 to the largest side of its tensors, \d+"),
        ("qwen3moe", "expert_count", 1 << 31, r"from 0 to the largest side of its tensors, \d+"),
        ("gemma4", "attention.head_count_kv", (1 << 63) - 1, r"from 0 to the largest side of its tensors, \d+"),
        ("deepseek2", "attention.kv_lora_rank", -1, r"from 0 to the largest side of its tensors, \d+"),
        ("olmoe", "expert_used_count", 5, "and that the model has 4 experts"),
        ("glm4moe", "block_count", 5, "0 of them for multi-token prediction, and its tensors are those of 3 layers"),
    ],
)
def test_the_error_names_the_stated_and_the_actual_size(
    architecture: str, key: str, value: int, message: str, written: Callable[..., Written], tmp_path: Path
) -> None:
    if architecture not in gguf_files.ARCHITECTURES:
        pytest.skip("this transformers does not read qwen35moe")
    path = _with(written(architecture, "Q8_0"), f"{architecture}.{key}", value, tmp_path)
    with pytest.raises(StoreError, match=f"says that {architecture}.{key} is {value}.*{message}") as raised:
        read_config(path)
    assert raised.value.file == str(path)


def test_sizes_are_checked_against_the_model_before_names(written: Callable[..., Written], tmp_path: Path) -> None:
    """Each size is at most a tensor's side, but their product exceeds all of them."""
    path = _with(written("qwen35moe", "Q8_0"), "qwen35moe.attention.head_count", 128, tmp_path)
    with pytest.raises(StoreError, match=r"make model.layers.1.self_attn.*all tensors but the experts' have \d+"):
        gguf_files.read_whole(path)


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen3next", "qwen35moe"])
def test_transformers_gets_no_config_of_a_billion_layers(
    architecture: str, written: Callable[..., Written], tmp_path: Path
) -> None:
    """transformers makes the config before torch_mesh sees the file."""
    if architecture not in gguf_files.ARCHITECTURES:
        pytest.skip("this transformers does not read qwen35moe")
    path = _with(written(architecture, "Q8_0"), f"{architecture}.block_count", 1 << 30, tmp_path)
    with mutations.limits(60, _EXTRA_BYTES), pytest.raises(UnsupportedModelError, match=f"1 to {MAX_LAYERS} layers"):
        AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, quantization_config=MeshConfig(resident=0.5)
        )
