"""Embedding tables of the families of the installed transformers: all are known, and so is all code that reads a whole
one. The sources are parsed, not imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import transformers
from tiny_models import TINY_MODELS, UNMARKED_MODELS, all_families

from torch_mesh.models.tables import READS_VOCABULARY

# Embeddings by the name of their attribute. Tables that a large model leaves in files:
TABLES = {"embed_tokens_per_layer", "ngram_embedding"}
# Input embeddings, of text and of audio codes:
INPUTS = {"embed_tokens", "embeddings", "codec_embedding"}
# Small ones: positions in images and texts, codes of audio.
SMALL = {
    "code_embedding",
    "embed_audio_tokens",
    "pos_embed",
    "position_embedding",
    "position_embedding_table",
    "query_1024_resolution",
    "query_768_resolution",
}
# Classes that compute with the weight of an input embedding, and when. ALONE: to find ids if only inputs_embeds are
# given, which raises for a table in files. TIED: the weight is always tied to another, and so in memory.
ALONE, TIED = "inputs_embeds without ids", "tied"
READERS = {
    "Gemma4TextModel": ALONE,
    "Qwen4ExpTextModel": ALONE,
    "DiffusionGemmaDecoderModel": TIED,
    **dict.fromkeys(READS_VOCABULARY, "a slice in each forward"),
}
# The weight of an input embedding, except where only its device, dtype or requires_grad is read.
_WEIGHT = re.compile(r"\b(?:embed_tokens|get_input_embeddings\(\))\.weight(?!\.(?:device|dtype|requires_grad)|\")")


def _sources() -> Iterator[tuple[str, ast.Module, str]]:
    """(family, parsed source, source) of each family with experts."""
    folder = Path(transformers.__file__).parent / "models"
    for family in sorted({tiny.family for tiny in (TINY_MODELS | UNMARKED_MODELS).values()}):
        for path in sorted((folder / family).glob("modeling_*.py")):
            text = path.read_text(encoding="utf-8")
            yield family, ast.parse(text), text


def _called(node: ast.expr) -> str:
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
    return ""


def _embedding_classes(tree: ast.Module) -> set[str]:
    names = {"Embedding"}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).split(".")[-1] in names for base in node.bases):
            names.add(node.name)
    return names


@all_families
def test_each_embedding_of_a_family_is_known() -> None:
    found: dict[str, str] = {}
    for family, tree, _ in _sources():
        classes = _embedding_classes(tree)
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Attribute(attr=name)], value=value) if _called(value) in classes:
                    found.setdefault(name, family)
    assert found.keys() >= TABLES
    unknown = {name: family for name, family in found.items() if name not in TABLES | INPUTS | SMALL}
    assert not unknown, "is each a table of which a token uses a few rows? See torch_mesh/models/tables.py"


@all_families
def test_each_reader_of_an_input_embedding_is_known() -> None:
    found: set[str] = set()
    for _, tree, text in _sources():
        lines = text.splitlines()
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                own = lines[node.lineno - 1 : node.end_lineno]
                if any(_WEIGHT.search(line) for line in own):
                    found.add(node.name)
    assert found == READERS.keys()
