"""Input embeddings whose rows are read from files: by name, and where memory is short."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from table_models import QWEN, embeddings, reopen, save_adapter, untied
from tiny_models import TINY_MODELS, inputs_for, output_of

from torch_mesh import MeshConfig, MeshError
from torch_mesh.cli import main
from torch_mesh.models import tables as finding
from torch_mesh.modules.tables import table_modules
from torch_mesh.patching import quantizer
from torch_mesh.planning.plan import plan
from torch_mesh.planning.sizes import find_sizes
from torch_mesh.pool.row_tables import vocabulary_in_files
from torch_mesh.store.convert import convert
from torch_mesh.store.table_files import is_table_file


def test_the_input_embedding_may_be_a_table_by_name(tmp_path: Path) -> None:
    model = TINY_MODELS[QWEN].build()
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    inputs = inputs_for(model)
    expected = output_of(reopen(model, tmp_path, tables="off"), inputs)
    opened = reopen(model, tmp_path, tables=["embed_tokens", "ngram_embedding"])
    assert len(embeddings(opened)) == 3
    assert torch.equal(output_of(opened, inputs), expected)


def free_for_experts(folder: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> int:
    """Simulate a machine with ``free`` bytes for experts and the page cache. Returns its memory in all."""
    sizes = find_sizes(folder, MeshConfig())
    beside = (sizes.dense_bytes or 0) - sizes.vocabulary_bytes + sizes.staging_bytes + MeshConfig().workspace_bytes
    monkeypatch.setattr(quantizer, "available_bytes", lambda: beside + free)
    monkeypatch.setattr("torch_mesh.planning.plan.anonymous_bytes", lambda: 0)
    return beside + free


@pytest.mark.parametrize("route", ["raw", "converted"])
def test_a_vocabulary_stays_in_files_where_memory_is_short(
    route: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory is short if not all experts fit, and the page cache, a quarter of free memory, is smaller than the
    embedding."""
    model, folder = untied(tmp_path / "raw"), tmp_path / route
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    if route == "converted":
        convert(tmp_path / "raw", folder, "int8")
        assert not any(is_table_file(path.name) for path in folder.iterdir())
    nbytes = model.get_input_embeddings().weight.nbytes
    inputs = inputs_for(model)
    expected = output_of(reopen(model, folder, tables="off"), inputs)
    for free, short in ((4 * nbytes - 4, True), (4 * nbytes, False), (1 << 30, False)):
        memory_bytes = free_for_experts(folder, monkeypatch, free)
        planned = plan(folder, MeshConfig(), memory=memory_bytes)
        assert planned.sizes.vocabulary_bytes == nbytes
        assert planned.sizes.vocabularies == planned.sizes.tables == ("model.embed_tokens" if short else "")
        assert (planned.sizes.table_bytes, planned.sizes.table_memory_bytes > 0) == (nbytes * short, short)
        assert not plan(folder, MeshConfig(tables="off"), memory=memory_bytes).sizes.tables
        with pytest.warns(UserWarning, match=r"model\.embed_tokens \(.*stays in the") if short else nullcontext():
            opened = reopen(model, folder, resident=0.5)
        assert [path for path, _ in table_modules(opened)] == ["model.embed_tokens"] * short
        assert torch.equal(output_of(opened, inputs), expected)
        assert not embeddings(reopen(model, folder, resident=0.5, tables="off"))
        speeds = ["--disk-speed", "1GB/s", "--memory-speed", "10GB/s"]
        main(["plan", str(folder), "--memory", str(memory_bytes), *speeds])
        assert ("since memory is short" in " ".join(capsys.readouterr().out.split())) == short


def test_code_that_reads_a_whole_vocabulary_is_refused(tmp_path: Path) -> None:
    opened = reopen(untied(tmp_path / "untied"), tmp_path / "untied", tables="embed_tokens")
    with pytest.raises(MeshError, match="or with names of other tables"):
        opened.resize_token_embeddings(130)
    model = TINY_MODELS[QWEN].build()
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "ngrams")
    opened = reopen(model, tmp_path / "ngrams", tables=["embed_tokens", "ngram_embedding"])
    ids = inputs_for(model)["input_ids"][:1]
    with pytest.raises(MeshError, match=r"embed_tokens\.weight is read from files.*or with names of other tables"):
        opened(inputs_embeds=model.get_input_embeddings()(ids))  # transformers searches the weight for ids
    assert torch.isfinite(opened(input_ids=ids).logits).all()


def test_memory_is_not_short_where_all_experts_fit() -> None:
    assert vocabulary_in_files(1 << 30, experts=6 << 30, free=6 << 30)
    assert not vocabulary_in_files(1 << 30, experts=5 << 30, free=6 << 30)  # an eighth or more stays free
    assert not vocabulary_in_files(1 << 29, experts=6 << 30, free=6 << 30)  # fits into the page cache
    assert vocabulary_in_files(1, experts=1, free=0) and vocabulary_in_files(1, experts=1, free=-1)


def test_an_adapter_on_a_vocabulary_in_files_is_saved_without_it(tmp_path: Path) -> None:
    model = untied(tmp_path / "raw")
    opened = reopen(model, tmp_path / "raw", tables=["embed_tokens"])
    adapted = save_adapter(opened, tmp_path / "adapter", target_modules=["embed_tokens"])
    assert all(".lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    inputs = inputs_for(model)
    again = PeftModel.from_pretrained(reopen(model, tmp_path / "raw", tables=["embed_tokens"]), tmp_path / "adapter")
    assert torch.equal(output_of(again, inputs), output_of(adapted.eval(), inputs))
