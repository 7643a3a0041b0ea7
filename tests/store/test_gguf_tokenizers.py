"""GGUF files: the tokenizers that are made of their vocabularies."""

from __future__ import annotations

from pathlib import Path

import gguf_files
import pytest
from transformers import AutoTokenizer

from torch_mesh.errors import MeshError
from torch_mesh.hf.open_model import open_tokenizer
from torch_mesh.store import gguf_model
from torch_mesh.store.checkpoint import read_config
from torch_mesh.store.convert import convert
from torch_mesh.store.gguf_tokenizer import byte_level_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:The experts of:UserWarning", "ignore:.*weights='auto':UserWarning")


def test_a_file_without_a_tokenizer_warns(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", vocabulary=False)
    gguf_files.rewrite(made.path, tmp_path / "changed.gguf", metadata={"qwen3moe.vocab_size": 128})
    with pytest.warns(UserWarning, match="No tokenizer is written"):
        convert(tmp_path / "changed.gguf", tmp_path / "store", "int8")
    assert not (tmp_path / "store" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("architecture", "pre", "together"),
    [
        ("deepseek2", "deepseek-v3", True),
        ("deepseek2", "kimi-k2", True),
        ("deepseek2", "deepseek-llm", False),
        ("glm4moe", "glm4", True),
        ("hunyuan-moe", "hunyuan", True),
        ("granitemoe", "refact", False),
        ("olmoe", "olmo", False),
    ],
)
@pytest.mark.skipif(not gguf_files.READS_QWEN35MOE, reason="this transformers makes no tokenizer of these")
def test_tokenizers_split_by_the_files_rule_and_keep_control_tokens(
    architecture: str, pre: str, together: bool, tmp_path: Path
) -> None:
    bos = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"  # as DeepSeek's, with characters beyond the byte alphabet
    made = gguf_files.write(tmp_path / "m.gguf", architecture, pre=pre, bos=bos)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=made.path.name)
    (tmp_path / "store").mkdir()
    for name, data in gguf_model.tokenizer_files(made.path).items():
        (tmp_path / "store" / name).write_bytes(data)
    read_config(made.path).save_pretrained(tmp_path / "store")
    for tokenizer in (theirs, AutoTokenizer.from_pretrained(tmp_path / "store")):
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (1, 2, 128)
        found = tokenizer.convert_ids_to_tokens(tokenizer.encode(f"{bos}a\n\nhello", add_special_tokens=False))
        assert found == [bos, "a", *(["\u010a\u010a"] if together else ["\u010a", "\u010a"]), "hell", "o"]
        assert tokenizer.decode(tokenizer.encode(f"{bos}hello", add_special_tokens=False)) == f"{bos}hello"


def test_rules_split_texts() -> None:
    text = "Don't if(x): 12345 中文x\r\n\n  y"
    pieces = {
        "gpt-2": "Don|'t| if|(|x|):| 12345| 中文x|\r\n\n | y",
        "refact": "Don|'t| if|(|x|):| |1|2|3|4|5| 中文x|\r\n\n | y",
        "deepseek-llm": "Don|'|t| if|(|x|):| |1|2|3|4|5| |中文|x|\r|\n|\n| | y",
        "deepseek-v3": "Don|'t| if|(x|):| |123|45| |中文|x|\r\n\n| | y",
        "kimi-k2": "Don't| if|(x|):| |123|45| |中文|x|\r\n\n| | y",
    }
    for rule, expected in pieces.items():
        made = byte_level_tokenizer({"tokens": ["a"], "merges": [], "pre_tokenizer_type": rule}, {})
        found = [text[begin:end] for _, (begin, end) in made.pre_tokenizer.pre_tokenize_str(text)]
        assert "|".join(found) == expected, rule


_CHOOSES_BY_RULE = pytest.mark.skipif(
    not gguf_files.READS_QWEN35MOE, reason="this transformers chooses the rule by the architecture"
)


@_CHOOSES_BY_RULE
def test_no_tokenizer_is_written_for_an_unknown_rule(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "qwen3moe", pre="of-next-year")
    with pytest.warns(UserWarning, match="No tokenizer is written.*tokenizer.ggml.pre is 'of-next-year'.*glm4"):
        assert gguf_model.tokenizer_files(made.path) == {}
    with pytest.raises(MeshError, match="tokenizer.ggml.pre is 'of-next-year'"):
        open_tokenizer(made.path)


@_CHOOSES_BY_RULE
def test_no_tokenizer_is_written_with_ids_that_the_model_lacks(tmp_path: Path) -> None:
    made = gguf_files.write(tmp_path / "m.gguf", "llama", bos="<\uff5cbegin\uff5c>")
    with pytest.warns(UserWarning, match="No tokenizer is written.*bos_token_id is 1, and 129 in transformers'"):
        assert gguf_model.tokenizer_files(made.path) == {}
