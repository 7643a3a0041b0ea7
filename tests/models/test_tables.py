"""Embedding tables that stay in files: results have the same bits, and the tables take no memory."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from table_models import FAMILIES, QWEN, VOCABULARY, embeddings, reopen, save
from tiny_models import inputs_for, output_of

import torch_mesh
from torch_mesh import MeshConfig, MeshError, StoreError, UnsupportedModelError
from torch_mesh.models import tables as finding
from torch_mesh.modules.tables import MeshEmbedding, table_modules, tables_of
from torch_mesh.patching import modes
from torch_mesh.speculation.suitability import standalone_unsupported_reason
from torch_mesh.store.convert import convert
from torch_mesh.system import memory


@pytest.mark.parametrize("route", ["raw", "converted", "converted to int4"])
def test_logits_are_those_of_a_table_in_memory(family: str, route: str, tmp_path: Path) -> None:
    name, count = FAMILIES[family]
    model = save(family, tmp_path / "raw")
    folder = tmp_path / "raw"
    if route != "raw":
        folder = tmp_path / "converted"
        convert(tmp_path / "raw", folder, "int4" if route.endswith("int4") else "bf16")
    inputs = inputs_for(model)
    expected = output_of(reopen(model, folder, tables="off"), inputs)
    for fields in ({}, {"resident": 0.3}):
        opened = reopen(model, folder, tables=name, **fields)
        assert len(embeddings(opened)) == count
        assert not any(isinstance(module, MeshEmbedding) for module in [opened.get_input_embeddings()])
        assert torch.equal(output_of(opened, inputs), expected)
        assert torch.equal(output_of(opened, inputs), expected)  # this time from the cache
    assert "rows from files" in repr(opened)


def test_look_ups_equal_those_of_the_original_embedding(family: str, tmp_path: Path) -> None:
    name, _ = FAMILIES[family]
    model = save(family, tmp_path)
    opened = reopen(model, tmp_path, tables=name)
    for path, embedding in table_modules(opened):
        original = model.get_submodule(path)
        ids = torch.randint(original.num_embeddings, (2, 7))
        assert torch.equal(embedding(ids), original(ids))
        with pytest.raises(IndexError):
            embedding(ids + original.num_embeddings)
    with torch.device("meta"):  # a default device
        assert all(tables.read(0, 0, 3).is_cpu for tables in tables_of(opened))


def test_look_ups_compile_without_graph_breaks(family: str, tmp_path: Path) -> None:
    name, _ = FAMILIES[family]
    model = save(family, tmp_path)
    embedding = embeddings(reopen(model, tmp_path, tables=name))[0]
    # With another backend torch 2.14 keeps tensors of the last compilation after a reset.
    compiled: Any = torch.compile(embedding, fullgraph=True, backend="eager")
    ids = torch.randint(embedding.num_embeddings, (2, 7))
    with torch.no_grad():
        assert torch.equal(compiled(ids), embedding(ids))
    torch._dynamo.reset()  # otherwise Dynamo keeps the model


def test_tables_open_in_another_dtype_than_the_files(tmp_path: Path) -> None:
    model = save(QWEN, tmp_path, torch.float32)
    inputs = inputs_for(model)
    opened = {
        tables: type(model).from_pretrained(
            tmp_path, dtype=torch.bfloat16, quantization_config=MeshConfig(tables=tables)
        )
        for tables in ("off", "ngram_embedding")
    }
    assert torch.equal(output_of(opened["ngram_embedding"], inputs), output_of(opened["off"], inputs))
    opened["ngram_embedding"].float()
    assert {embedding(torch.tensor([1])).dtype for embedding in embeddings(opened["ngram_embedding"])} == {
        torch.float32
    }


def test_generated_tokens_are_those_of_a_table_in_memory(family: str, tmp_path: Path) -> None:
    name, _ = FAMILIES[family]
    model = save(family, tmp_path)
    ids = torch.randint(3, 100, (2, 9))
    expected = reopen(model, tmp_path, tables="off").generate(ids, max_new_tokens=8, do_sample=False)
    opened = reopen(model, tmp_path, tables=name)
    assert torch.equal(opened.generate(ids, max_new_tokens=8, do_sample=False), expected)


def test_a_decode_step_requests_its_rows_when_it_begins(tmp_path: Path) -> None:
    model = save(QWEN, tmp_path)
    opened = reopen(model, tmp_path, tables="ngram_embedding")
    opened.generate(torch.randint(3, 100, (1, 20)), max_new_tokens=1)
    torch_mesh.reset_stats(opened)
    opened.generate(torch.randint(3, 100, (1, 20)), max_new_tokens=8, do_sample=False, eos_token_id=-1)
    for table in torch_mesh.stats(opened).tables:
        assert table.gathers == 8 and table.prefetches > 0
        # The prompt's rows are read at the look-up. All other rows were requested before it.
        assert table.prefetches + table.reads <= table.distinct
        assert table.reads <= 20 * 4
    clone = copy.deepcopy(opened)
    torch_mesh.unpatch(clone)
    assert not any(vars(module).get("_mesh_early_rows") for module in clone.modules())
    assert not any(module._forward_pre_hooks for module in clone.modules())


def test_a_compiled_decode_step_requests_its_rows_too(tmp_path: Path) -> None:
    """Requesting rows causes no graph break. transformers' own indexer does."""
    model = save(QWEN, tmp_path)
    opened = reopen(model, tmp_path, tables="ngram_embedding")
    cache = opened(input_ids=torch.randint(3, 100, (1, 20)), use_cache=True).cache
    decoder, token = opened.get_decoder(), torch.tensor([[7]])

    def step(ids: torch.Tensor) -> torch.Tensor:
        [hook] = decoder._forward_pre_hooks.values()
        hook(decoder, (), {"input_ids": ids, "cache": cache})
        return ids + 1

    torch_mesh.reset_stats(opened)
    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(token), token + 1)
        requested = [table.prefetches for table in torch_mesh.stats(opened).tables]
        opened(input_ids=token, cache=cache)
    assert len(requested) == 2 and min(requested) > 0
    for table, rows in zip(torch_mesh.stats(opened).tables, requested, strict=True):
        assert (table.prefetches, table.reads, table.gathers) == (
            rows,
            0,
            1,
        )  # all rows of the step were requested early
    torch._dynamo.reset()  # otherwise Dynamo keeps the model


def test_speculation_of_ngram_layers_is_refused(tmp_path: Path) -> None:
    model = save(QWEN, tmp_path)
    opened = reopen(model, tmp_path, tables="ngram_embedding")
    assert "rewound" in standalone_unsupported_reason(opened)
    with pytest.raises(UnsupportedModelError, match="cannot be rewound"):
        reopen(model, tmp_path, tables="ngram_embedding", speculation="lookup")


@pytest.mark.parametrize(
    ("family", "table"), [("Gemma4TextExperts", "embed_tokens_per_layer"), (VOCABULARY, "embed_tokens")]
)
def test_drafts_are_verified_with_rows_from_files(family: str, table: str, tmp_path: Path) -> None:
    """This holds for tables whose rows depend only on the tokens of a draft, and not on a state."""
    model = save(family, tmp_path)
    ids = torch.randint(3, 100, (1, 9)).repeat(1, 3)  # a repeated text, so that there are drafts
    made = []
    for tables in ("off", table):
        opened = reopen(model, tmp_path, tables=tables, speculation="lookup")
        made.append(opened.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=-1))
    assert torch.equal(*made)
    [counted] = torch_mesh.stats(opened).tables
    assert counted.lookups >= 27 + 19


def test_auto_takes_large_tables_that_are_only_looked_up(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, count = FAMILIES[family]
    model = save(family, tmp_path)
    assert not embeddings(reopen(model, tmp_path))  # all tables are small
    monkeypatch.setattr(finding, "MIN_VALUES", 1)
    for tables in ("auto", "1MiB"):
        found = dict(table_modules(reopen(model, tmp_path, tables=tables)))
        assert len([path for path in found if path.endswith(name)]) == count == len(found)
    assert not embeddings(reopen(model, tmp_path, tables="off"))


def test_unknown_and_tied_embeddings_are_refused_as_tables(tmp_path: Path) -> None:
    model = save(QWEN, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"no embedding of that name.*ngram_embedding"):
        reopen(model, tmp_path, tables="engram")
    model.config.tie_word_embeddings = True
    tied = type(model)._from_config(model.config, dtype=torch.bfloat16)
    tied.save_pretrained(tmp_path / "tied")
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens, which has to stay in memory: its weight is tied"):
        reopen(model, tmp_path / "tied", tables="embed_tokens")


def test_requiring_gradients_of_a_table_names_the_option(tmp_path: Path) -> None:
    model = save("Gemma4TextExperts", tmp_path)
    opened = reopen(model, tmp_path, tables="embed_tokens_per_layer")
    with pytest.raises(MeshError, match="tables='off'"):
        embeddings(opened)[0].weight.requires_grad_(True)


def test_statistics_count_look_ups_and_reads(tmp_path: Path) -> None:
    model = save(QWEN, tmp_path)
    opened = reopen(model, tmp_path, tables="ngram_embedding")
    embeddings(opened)[1](torch.tensor([[5, 6], [5, 7]]))
    embeddings(opened)[1](torch.tensor([5]))
    first, second = torch_mesh.stats(opened).tables
    assert first.lookups == 0 and first.hit_rate is None
    assert (second.gathers, second.lookups, second.distinct, second.reads, second.hits) == (2, 5, 4, 3, 1)
    assert second.hit_rate == 0.25 and second.name in str(torch_mesh.stats(opened))
    assert torch_mesh.stats(opened).to_dict()["tables"][1]["lookups"] == 5
    torch_mesh.reset_stats(opened)
    assert torch_mesh.stats(opened).tables[1].lookups == 0


def test_missing_rows(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = save(QWEN, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    shards = [name for name in tensors if "ngram_embedding.shard_" in name]
    assert len(shards) == 8
    del tensors[shards[0]]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(StoreError, match=r"rows, beginning with .*incomplete"):
        reopen(model, tmp_path, tables="ngram_embedding")


def test_a_file_truncated_while_the_model_runs_is_an_error(tmp_path: Path) -> None:
    model = save(QWEN, tmp_path)
    opened = reopen(model, tmp_path, tables="ngram_embedding")
    os.truncate(tmp_path / "model.safetensors", 4096)
    with pytest.raises(torch_mesh.ReadError, match=r"ngram_embedding\.weight"):
        embeddings(opened)[0](torch.arange(1000))


def test_unpatch_loads_the_table(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, count = FAMILIES[family]
    model = save(family, tmp_path)
    opened = reopen(model, tmp_path, tables=name)
    with monkeypatch.context() as short:
        short.setattr(memory, "available_bytes", lambda: 1000)
        with pytest.raises(MemoryError, match="as an ordinary tensor"):
            torch_mesh.unpatch(opened)
    assert len(embeddings(opened)) == count
    torch_mesh.unpatch(opened)
    state, original = opened.state_dict(), model.state_dict()
    assert list(state) == list(original)
    assert all(torch.equal(state[key], value) for key, value in original.items())
    assert {type(module) for module in opened.modules()} == {type(module) for module in model.modules()}


def test_save_pretrained_writes_the_tables(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = FAMILIES[family]
    model = save(family, tmp_path / "raw")
    opened = reopen(model, tmp_path / "raw", tables=name)
    with monkeypatch.context() as short:
        short.setattr(memory, "available_bytes", lambda: 1000)
        with pytest.raises(MemoryError, match="copy the folder that it was opened from"):
            opened.save_pretrained(tmp_path / "short")
    opened.save_pretrained(tmp_path / "saved")
    saved, original = (type(model).from_pretrained(tmp_path / folder).state_dict() for folder in ("saved", "raw"))
    assert all(torch.equal(saved[key], value) for key, value in original.items())
    inputs = inputs_for(model)
    reopened = reopen(model, tmp_path / "saved", tables=name)
    assert len(embeddings(reopened)) == len(embeddings(opened))
    assert torch.equal(output_of(reopened, inputs), output_of(opened, inputs))


def test_copies_share_the_tables(tmp_path: Path) -> None:
    model = save(QWEN, tmp_path)
    opened = reopen(model, tmp_path, tables="ngram_embedding")
    inputs = inputs_for(model)
    expected = output_of(opened, inputs)
    clone = copy.deepcopy(opened)
    assert embeddings(clone)[0]._mesh_tables is embeddings(opened)[0]._mesh_tables
    del opened
    assert torch.equal(output_of(clone, inputs), expected)
    clone.load_state_dict(clone.state_dict())
    with pytest.raises(MeshError, match="cannot be pickled"):
        pickle.dumps(embeddings(clone)[0]._mesh_tables)


def test_a_models_tables_take_the_state_of_another_with_the_same_rows(tmp_path: Path) -> None:
    model = save(QWEN, tmp_path / "one")
    one, other = (reopen(model, tmp_path / "one", tables="ngram_embedding") for _ in range(2))
    assert other.load_state_dict(one.state_dict()).missing_keys == []
    with torch.no_grad():
        next(value for name, value in model.named_parameters() if "ngram" in name)[-1, -1] += 1
    model.save_pretrained(tmp_path / "changed")
    changed = reopen(model, tmp_path / "changed", tables="ngram_embedding")
    with pytest.raises(RuntimeError, match=r"Cannot assign other values to .*ngram_embedding"):
        other.load_state_dict(changed.state_dict())


def test_a_failed_load_closes_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture _no_leaked_files fails a test that leaves files open."""
    model = save(QWEN, tmp_path)
    opened: list[Any] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        opened.extend(embeddings(args[0]))
        raise OSError("injected")

    monkeypatch.setattr(modes, "install_attention", fail)
    with pytest.raises(OSError, match="injected"):
        reopen(model, tmp_path, tables="ngram_embedding")
    assert len(opened) == 2
    with pytest.raises(torch_mesh.PoolClosedError):
        opened[0](torch.tensor([1]))


def test_the_tables_are_closed_with_the_model(tmp_path: Path) -> None:
    model = save(QWEN, tmp_path)
    descriptors = len(os.listdir("/proc/self/fd"))
    opened = reopen(model, tmp_path, tables="ngram_embedding")
    assert len(os.listdir("/proc/self/fd")) > descriptors
    handle = embeddings(opened)[0]._mesh_handle
    del opened
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(torch_mesh.PoolClosedError):
        torch.ops.torch_mesh.gather_rows(torch.tensor([1]), handle, 24, torch.bfloat16)
