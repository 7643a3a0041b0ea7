"""Experts that are divided among ranks, tested with real processes over gloo."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import warm
from peft import PeftModel
from rank import (
    IDS,
    adapted,
    adapted_with_checkpointing,
    compiled,
    generated,
    model_class,
    resumed,
    traced,
    trained,
)
from tiny_models import TINY_MODELS
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils import ModelOutput
from upstream import needs_ep_size

import torch_mesh
from torch_mesh import LostRankError, MeshConfig, ReadError
from torch_mesh.hf import expert_parallel
from torch_mesh.models import tables as finding
from torch_mesh.planning.plan import plan
from torch_mesh.store.convert import convert

pytestmark = needs_ep_size

RANK = Path(__file__).with_name("rank.py")
# One family each for a plan that divides attention too, a plan that does not, and unfused experts.
FAMILIES = {"qwen3_moe": "Qwen3MoeExperts", "gpt_oss": "GptOssExperts"}
if "MuseSparkExperts" in TINY_MODELS:  # older releases of transformers do not have it
    FAMILIES["muse_spark"] = "MuseSparkExperts"
# Cases of a family whose plan divides its embedding tables by columns, and whether the tables then stay in files.
TABLES = {"tables": True, "replicated tables": True, "loaded tables": False}
OF_TABLES = "Qwen4ExpTextExperts"
EXTRAS: dict[str, Any] = {"trained": trained, "traced": traced, "compiled": compiled}
WAYS = ("all_reduce", "all_to_all")
DTYPES = (torch.bfloat16, torch.float32)


def launch(folder: Path, cases: list[dict[str, Any]], ranks: int, timeout: float = 900) -> list[list[dict[str, Any]]]:
    """Run the cases on ``ranks`` processes; return for each case its results by rank."""
    torch.save(cases, folder / "cases.pt")
    done = warm.run(RANK.read_text(), folder, ranks, env=_environment(folder), timeout=timeout)
    assert done.returncode == 0, done.stderr[-20000:]
    by_rank = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]
    return [list(results) for results in zip(*by_rank, strict=True)]


def _environment(folder: Path) -> dict[str, str]:
    """The environment of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"} | address


def build(folder: Path, experts: str, **fields: Any) -> tuple[str, str]:
    """Write a tiny checkpoint and convert it; return both folders."""
    tiny = TINY_MODELS[experts]
    torch.manual_seed(0)
    dataclasses.replace(tiny, fields=tiny.fields | fields).build().save_pretrained(folder / "raw")
    convert(folder / "raw", folder / "store", "int8")
    return str(folder / "raw"), str(folder / "store")


def opened(case: dict[str, Any]) -> Any:
    return model_class(case).from_pretrained(
        case["folder"], dtype=case["dtype"], quantization_config=MeshConfig(**case.get("config", {}))
    )


@torch.no_grad()
def logits_of(model: Any, case: dict[str, Any]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=case["ids"], use_cache=False)[0]
    return logits


def one_process(case: dict[str, Any]) -> dict[str, Any]:
    model = opened(case)
    logits, generated = logits_of(model, case), None
    if model.can_generate():
        generated = model.generate(case["prompt"], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    stats = torch_mesh.stats(model)
    return {"logits": logits, "generated": generated, "stats": stats.to_dict(), "slots": stats.slots}


def assert_same(case: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Check that the ranks' outputs are those of one process, up to another order of sums.

    In fp32 another order may change the rounding of an input of the experts, which take 8 bits of it. In bf16 it moves
    some tokens of random models to other experts, and so changes later tokens. bf16 itself does this too, and the error
    is bounded by that of bf16 against fp32.
    """
    expected = one_process(case)
    if case["dtype"] == torch.float32:
        median, share, others = 1e-5, 1.0, 0.01
    else:
        rounding = apart(expected["logits"], logits_of(opened(case | {"dtype": torch.float32}), case))
        assert rounding.median() < 0.1, "nothing could be told from it"
        share = 0.75
        median, others = max(0.03, 3 * float(rounding.median())), max(0.06, 3 * float(rounding.quantile(share)))
    for result in results:
        assert "error" not in result, result["error"]
        errors = apart(result["logits"], expected["logits"])
        assert errors.median() <= median and errors.quantile(share) <= others, (errors, median, others)
        assert torch.equal(result["logits"], results[0]["logits"])
        if expected["generated"] is not None:
            assert torch.equal(result["generated"], results[0]["generated"])
            if case["dtype"] == torch.float32:
                assert torch.equal(result["generated"], expected["generated"])


def apart(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest error of each token's logits [batch, tokens, vocabulary], relative to the largest logit of all:
    [batch, tokens]."""
    return (logits.float() - expected.float()).abs().amax(-1) / expected.float().abs().max()


def model_of(experts: str) -> tuple[str, str]:
    return TINY_MODELS[experts].family, TINY_MODELS[experts].model


def all_cases(folders: dict[str, tuple[str, str]]) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 100, (3, 11), generator=generator)
    cases = {}
    for family, way, share, dtype in itertools.product(folders, WAYS, (0.25, 1.0), DTYPES):
        folder = folders[family][share == 1.0]  # the store for 1.0, else the checkpoint itself
        cases[f"{family}-{way}-{share:.0%}-{str(dtype).removeprefix('torch.')}"] = {
            "folder": folder,
            "model": model_of(FAMILIES[family]),
            "config": {"resident": share},
            "distributed": {"ep_implementation": way},
            "whole_rest": family == "muse_spark",  # its embedding does not run with transformers' tensor parallelism
            "dtype": dtype,
            "ids": ids,
            "prompt": ids[: 1 if way == "all_to_all" else 3, :5],  # with a single token some ranks have no row
        }
    return cases


NAMES = list(all_cases(dict.fromkeys(FAMILIES, ("", ""))))


def save_profile(case: dict[str, Any], path: Path) -> None:
    model = model_class(case).from_pretrained(case["folder"], quantization_config=MeshConfig())
    model(case["ids"])
    torch_mesh.save_profile(model, path)


def training_case(folder: str, family: str, way: str, extra: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "folder": folder,
        "model": model_of(FAMILIES[family]),
        "dtype": dtype,
        "whole_rest": True,
        "config": {"resident": 0.5},
        "distributed": {"ep_implementation": way},
        "extra": extra,
    }


# The cases of two ranks in the quick tests, which take about ten seconds.
QUICK = {
    *(f"{family}-{rest}" for family in FAMILIES for rest in ("all_reduce-25%-float32", "all_to_all-100%-float32")),
    *(
        "adapted",
        "batches",
        "embeddings",
        "drawn",
        "packed",
        "bf16",
        "bf12",
        "profile",
        "auto",
        "errors",
        "gpu",
        "lossy",
        "drafts",
        "megamoe",
        "traced",
        "tables",
        "loaded tables",
    ),
    "qwen3_moe-all_reduce-25%-bfloat16",
}


def slow_but(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]


def two_ranks(folder: Path, quick: bool) -> dict[str, Any]:
    """Run the quick or the other cases on two ranks; return (case, results by rank) by name."""
    folders = {}
    for family, experts in FAMILIES.items():
        (folder / family).mkdir()
        folders[family] = build(folder / family, experts)
    cases = all_cases(folders)
    raw, store = folders["qwen3_moe"]
    some = cases[NAMES[0]]
    save_profile(some, folder / "profile")
    cases |= {
        "whole rest": some | {"folder": store, "whole_rest": True, "config": {"dense": "int8", "resident": 0.4}},
        "packed": some | {"config": {"dense": "int8"}},
        "profile": some
        | {"config": {"profile": str(folder / "profile"), "residency": {"early_experts": (1, 2)}, "resident": 0.5}},
        "auto": some | {"config": {"resident": "auto"}},
        **{
            extra: some | {"dtype": torch.float32, "whole_rest": True, "extra": extra, "config": {"resident": 0.5}}
            for extra in (*EXTRAS, "unpatched")
        },
        **{
            weights: some
            | {"folder": raw, "dtype": torch.bfloat16, "config": dict.fromkeys(("weights", "dense"), weights)}
            for weights in ("bf16", "bf12")
        },
        "adapted": training_case(store, "qwen3_moe", "all_reduce", "adapted"),
        **{
            extra: training_case(store, "qwen3_moe", "all_reduce", extra)
            for extra in ("batches", "embeddings", "drawn")
        },
        "errors": {"folder": raw, "model": some["model"], "extra": "errors"},
        "gpu": {"folder": raw, "model": some["model"], "config": {"gpu": {"experts": 2}}},
        "lossy": {"folder": raw, "model": some["model"], "config": {"lossy": {"deferred_experts": 1}}},
        "drafts": {"folder": raw, "model": some["model"], "config": {"speculation": "lookup"}},
        "megamoe": {"folder": raw, "model": some["model"], "distributed": {"ep_implementation": "deepgemm_megamoe"}},
    }
    if OF_TABLES in TINY_MODELS:
        cases |= table_cases(folder / "tables", some)
    cases = {name: case for name, case in cases.items() if (name in QUICK) == quick}
    return dict(zip(cases, zip(cases.values(), launch(folder, list(cases.values()), 2), strict=True), strict=True))


def table_cases(folder: Path, some: dict[str, Any]) -> dict[str, dict[str, Any]]:
    folder.mkdir()
    with mock.patch.object(finding, "MIN_VALUES", 1):
        raw, store = build(folder, OF_TABLES)
    some = some | {"model": model_of(OF_TABLES), "dtype": torch.float32}
    in_files = {"resident": 0.5, "tables": "ngram_embedding"}
    return {
        "tables": some | {"folder": raw, "config": in_files},
        "replicated tables": some | {"folder": store, "config": in_files, "whole_rest": True},
        "loaded tables": some | {"folder": store, "config": {"resident": 0.5, "tables": "off"}},
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two_ranks(tmp_path_factory.mktemp("two"), quick=True)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two_ranks(tmp_path_factory.mktemp("more"), quick=False)


@pytest.fixture
def given(request: pytest.FixtureRequest, name: str) -> Any:
    """The case of the parameter ``name``, and its results by rank."""
    return request.getfixturevalue("two" if name in QUICK else "more")[name]


@pytest.mark.parametrize("name", slow_but(NAMES))
def test_two_ranks_compute_what_one_process_does(given: Any) -> None:
    assert_same(*given)


@pytest.mark.parametrize("name", slow_but(NAMES))
def test_each_rank_reads_and_keeps_only_its_own_experts(given: Any) -> None:
    case, results = given
    share = case["config"]["resident"]
    for rank, result in enumerate(results):
        own = result["record_bytes"] * 4 * result["layers"]
        assert result["shapes"]["down_proj"][0] == 4
        assert result["slots"] == (3 if share == 0.25 else 4 * result["layers"])
        planned = plan(Path(case["folder"]), MeshConfig(**case["config"]), ranks=2)
        assert (planned.slots, planned.sizes.expert_bytes) == (result["slots"], result["record_bytes"])
        assert result["pool_bytes"] <= own and (share < 1 or 0 < result["stats"]["bytes_read"] <= own)
        assert result["stats"]["expert_range"] == {"rank": rank, "ranks": 2, "first_expert": 4 * rank, "experts": 4}
        text = f"experts {4 * rank} to {4 * rank + 3} of 8, rank {rank} of 2"
        assert text in result["text"] and text in result["model"]


def test_each_rank_prefetches_experts_of_the_next_layer(two: dict[str, Any]) -> None:
    for family in ("qwen3_moe", "gpt_oss"):
        for result in two[f"{family}-all_reduce-25%-float32"][1]:
            assert result["stats"]["prefetches"] > 0 and result["stats"]["lookahead_unsupported_reasons"] == {}
            assert result["stats"]["prefetches_used"] > result["stats"]["prefetches_unused"]


@pytest.mark.parametrize("name", slow_but(["whole rest", "packed"]))
def test_linear_layers_are_packed_whole_or_in_parts(given: Any) -> None:
    case, results = given
    assert_same(case, results)
    assert all("MeshLinear" in result["linears"] for result in results)


@pytest.mark.skipif(OF_TABLES not in TINY_MODELS, reason="the installed transformers lacks the family")
@pytest.mark.parametrize("name", slow_but(TABLES))
def test_each_rank_has_whole_tables_whatever_the_plan_says(given: Any, name: str) -> None:
    case, results = given
    assert_same(case, results)
    assert [("rows from files" in result["model"]) for result in results] == [TABLES[name]] * 2
    for result in results:  # each rank reads its own rows
        tables = result["stats"]["tables"]
        assert bool(tables) == TABLES[name] and all(each["reads"] + each["prefetches"] > 0 for each in tables)


def test_bf12_has_the_bits_of_bf16_on_each_rank(two: dict[str, Any]) -> None:
    for result, same in zip(two["bf12"][1], two["bf16"][1], strict=True):
        assert "weights=bf12" in result["model"] and result["linears"] == same["linears"]
        assert all(torch.equal(result[name], same[name]) for name in ("logits", "generated"))


def test_a_profile_of_the_whole_model_warms_each_ranks_experts(two: dict[str, Any]) -> None:
    case, results = two["profile"]
    assert_same(case, results)
    assert all(result["stats"]["early"] > 0 and result["slots"] == 6 for result in results)


def test_auto_keeps_all_experts_of_a_rank_if_memory_allows(two: dict[str, Any]) -> None:
    assert_same(*two["auto"])
    assert all(result["slots"] == 12 for result in two["auto"][1])


@pytest.mark.parametrize("name", slow_but((*EXTRAS, "unpatched")))
def test_a_divided_model_trains_traces_compiles_and_unpatches_as_a_whole_one(given: Any, name: str) -> None:
    case, results = given
    model = torch_mesh.patch(model_class(case).from_pretrained(case["folder"], dtype=case["dtype"]))
    expected = EXTRAS.get(name, generated)(model)
    for result in results:
        value = result["extra"]
        if name != "trained":
            assert (value == expected).all()
            continue
        assert (value[0] - expected[0]).abs() < 1e-3 and len(value[1]) == len(expected[1]) > 0
        for gradient, same in zip(value[1], expected[1], strict=True):
            assert (gradient - same).abs().max() <= 0.01 * same.abs().max()


def opened_whole(case: dict[str, Any]) -> Any:
    return model_class(case).from_pretrained(
        case["folder"], dtype=case["dtype"], quantization_config=MeshConfig(**case["config"])
    )


def assert_trained_alike(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Check that ranks train as one process does, up to another order of sums. For comparison, changing the weights of
    one process by 1e-6 changes its losses by up to 0.06, while training lowers them by 3."""
    first, *others = (result["extra"] for result in results)
    assert first["trained"].keys() == expected["trained"].keys()
    for other in others:
        assert (first["losses"], first["norms"]) == (other["losses"], other["norms"])
        for name, same in first["trained"].items():
            assert torch.equal(same, other["trained"][name]), name
            assert same.shape == expected["trained"][name].shape
    losses, norms = (torch.tensor([first[key], expected[key]]) for key in ("losses", "norms"))
    assert (losses[0] - losses[1]).abs().max() < 0.12, losses
    assert (losses[0] - losses[1]).abs()[:5].max() < 0.03, losses
    assert ((norms[0] - norms[1]).abs() / norms[1])[:5].max() < 0.03, norms


def assert_adapter_is_whole(case: dict[str, Any], results: list[dict[str, Any]], folder: Path) -> None:
    """Check that with the adapter that rank 0 saved, each rank computes what it did after training, and so do one
    process and PEFT without torch_mesh."""
    for result in results:
        assert torch.equal(result["extra"]["loaded"], result["extra"]["logits"])
    models = {"whole": opened_whole(case)}
    models["plain"] = torch_mesh.unpatch(opened_whole(case), lossy=True)
    for name, model in models.items():
        with torch.no_grad():
            logits = PeftModel.from_pretrained(model, folder).eval()(input_ids=IDS, use_cache=False).logits
        expected = results[0]["extra"]["logits"]
        errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert errors.median() < (1e-5 if name == "whole" else 0.03), (name, errors)


def test_two_ranks_train_adapters_on_experts_as_one_process_does(two: dict[str, Any]) -> None:
    case, results = two["adapted"]
    expected = adapted(opened_whole(case))
    assert_trained_alike(results, expected)
    assert expected["losses"][-1] < expected["losses"][0] - 2
    assert_adapter_is_whole(case, results, Path(case["folder"]).parents[1] / "adapter")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "ranks, dtype", [(2, torch.float32), (4, torch.float32), (2, torch.bfloat16), (4, torch.bfloat16)]
)
def test_ranks_train_adapters_by_each_dispatch_with_and_without_checkpointing(
    family: str, ranks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    _, store = build(tmp_path, FAMILIES[family])
    extras = {"adapted": adapted, "adapted_with_checkpointing": adapted_with_checkpointing}
    cases = [training_case(store, family, way, extra, dtype) for way in (*WAYS, "auto") for extra in extras]
    found = launch(tmp_path, cases, ranks)
    for case, results in zip(cases, found, strict=True):
        assert_trained_alike(results, extras[case["extra"]](opened_whole(case)))
    for kept, recomputed in zip(found[::2], found[1::2], strict=True):
        assert kept[0]["extra"]["losses"] == recomputed[0]["extra"]["losses"]


@pytest.mark.slow
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    _, store = build(tmp_path, FAMILIES["qwen3_moe"])
    case = training_case(store, "qwen3_moe", "all_to_all", "in_parts")
    [results] = launch(tmp_path, [case], 2)
    at_once = results[0]["extra"]["at once"]
    # A checkpoint does not depend on the ranks, so one process can continue from it, too.
    alone = resumed(opened_whole(case), tmp_path / "checkpoint")
    assert alone.keys() == at_once.keys()
    for name, expected in at_once.items():
        for result in results:
            assert torch.equal(result["extra"]["in parts"][name], expected), name
        assert (alone[name] - expected).norm() < 0.05 * expected.norm(), name


@pytest.mark.slow
def test_compiled_generation_with_adapters_equals_eager_generation(tmp_path: Path) -> None:
    _, store = build(tmp_path, FAMILIES["qwen3_moe"])
    case = training_case(store, "qwen3_moe", "all_reduce", "compiled_adapted")
    [results] = launch(tmp_path, [case], 2)
    for result in results:
        plain, compiled = result["extra"]
        assert torch.equal(plain, compiled)
        assert torch.equal(plain, results[0]["extra"][0])


@pytest.mark.slow
def test_accelerate_refuses_a_trainer_of_a_divided_model_on_cpus(tmp_path: Path) -> None:
    """docs/scaleout.md says so. If accelerate allows it one day, the page and this test have to change."""
    _, store = build(tmp_path, FAMILIES["qwen3_moe"])
    [results] = launch(tmp_path, [training_case(store, "qwen3_moe", "all_reduce", "trainer")], 2)
    assert all("got DistributedType.MULTI_CPU" in result["extra"] for result in results)


REFUSED = {
    "save": "MeshError: .* this process has experts 4 to 7 of 8, rank 1 of 2: open it whole",
    "profile": "MeshError: A profile is of all experts .* experts 4 to 7 of 8, rank 1 of 2",
    "merge": r"MeshError: .*down_proj is packed .* make a new store: .*then, in one process, torch_mesh.merge\(",
    "seeds": "MeshError: .*down_proj: the adapters of ranks 0 and 1",
    "clone": "MeshError: Qwen3MoeForCausalLM is divided among ranks, and can neither be copied",
    "train_copy": "MeshError: lm_head .* nor be among modules_to_save",
    "patch": r"UnsupportedModelError: .*tp_size=2, ep_size=2.*Supported: expert parallelism",
}


def test_options_and_inputs_that_exclude_ranks_are_refused(two: dict[str, Any]) -> None:
    cannot = "UnsupportedModelError: Qwen3MoeForCausalLM cannot be opened with ep_size=2: "
    assert two["gpu"][1][1]["error"].startswith(f"{cannot}gpu.experts")
    assert two["lossy"][1][1]["error"].startswith(f"{cannot}lossy (deferred_experts=1)")
    assert two["drafts"][1][1]["error"].startswith(f"{cannot}speculation drafts by each rank's own clock")
    assert two["megamoe"][1][1]["error"].startswith(f"{cannot}ep_implementation='deepgemm_megamoe'")
    for message in two["batches"][1][1]["extra"]:
        assert re.match(r"Ranks 0 and 1 got different input_ids \(\[2, 9\] and \[2, 9\]\)", message), message
    message = two["embeddings"][1][1]["extra"]
    assert re.match(".*_proj: ranks 0 and 1", message), message
    drawn, same = two["drawn"][1][1]["extra"]
    assert re.match(r"Ranks 0 and 1 got different input_ids \(\[2, 1\] and \[2, 1\]\)", drawn), drawn
    assert torch.equal(same, two["drawn"][1][0]["extra"][1])
    errors = two["errors"][1][1]["extra"]
    assert errors.keys() == REFUSED.keys()
    for name, pattern in REFUSED.items():
        assert re.match(pattern, errors[name]), errors[name]


@pytest.mark.parametrize("error", [ReadError, MemoryError, ValueError])
def test_an_error_of_this_rank_is_not_reported_as_a_lost_rank(error: type[Exception]) -> None:
    """The error names a file whose path contains "gloo", as errors of collectives do. Later forwards must fail, for the
    rank's next collective would meet a different one of the other ranks."""
    forwards = expert_parallel._Forwards("Rank 0 of 2")

    def fails() -> None:
        raise error("/mnt/igloo/mesh-0001.safetensors ends early")

    with pytest.raises(error, match="igloo"):
        expert_parallel._Watched(fails, "model.layers.3", forwards)()
    with pytest.raises(LostRankError, match="Rank 0 of 2: an earlier forward or backward of this rank failed"):
        expert_parallel._Watched(lambda: None, "model.layers.0", forwards)()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, TypeError])
def test_an_error_after_a_collective_ends_the_rank_and_an_earlier_one_does_not(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_parallel, "gathered", lambda value, where: [value])
    forwards = expert_parallel._Forwards("Rank 0 of 2")
    experts = expert_parallel._Watched(lambda ids: ids, "model.layers.0", forwards)
    fail_before, fail_after = True, False

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        if fail_before:
            raise error
        output = experts(input_ids)
        if fail_after:
            raise error
        return output

    model = expert_parallel._WatchedModel(forward, forwards)
    assert list(inspect.signature(model).parameters) == ["input_ids"]
    with pytest.raises(error):
        model(IDS)
    fail_before = False
    assert model(IDS) is IDS
    fail_after = True
    with pytest.raises(error):
        model(input_ids=IDS)
    for again in (model, experts):
        with pytest.raises(LostRankError):
            again(IDS)


class _Experts(torch.autograd.Function):
    error: type[BaseException] | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if _Experts.error is not None:
            raise _Experts.error
        return gradient * 2


def test_an_output_that_is_the_callers_tensor_gets_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """``hidden_states[0]`` may be trained ``inputs_embeds``, which outlive the forward."""
    monkeypatch.setattr(expert_parallel, "gathered", lambda value, where: [value])

    def forward(x: torch.Tensor) -> ModelOutput:
        return MoeModelOutputWithPast(hidden_states=(x, x * 2))

    model = expert_parallel._WatchedModel(forward, expert_parallel._Forwards("Rank 0 of 2"))
    x = torch.ones(2, 3, requires_grad=True)
    own = model(x).hidden_states[1]
    assert own._backward_hooks and not x._backward_hooks


@pytest.mark.parametrize("error", [ReadError, KeyboardInterrupt])
def test_a_backward_that_fails_ends_the_rank(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next forward's collectives would meet those of the backward in which other ranks wait."""
    monkeypatch.setattr(expert_parallel, "gathered", lambda value, where: [value])
    forwards = expert_parallel._Forwards("Rank 0 of 2")
    experts = expert_parallel._Watched(_Experts.apply, "model.layers.0", forwards)

    def forward(x: torch.Tensor) -> ModelOutput:
        return MoeModelOutputWithPast(hidden_states=(x, experts(x)))

    model = expert_parallel._WatchedModel(forward, forwards)
    x = torch.ones(2, 3, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).hidden_states[1].sum()

    for reentrant in (True, False):
        loss(x).backward()
        checkpoint(loss, x, use_reentrant=reentrant).backward()  # calls the model in its backward
    monkeypatch.setattr(_Experts, "error", error)
    with pytest.raises(error):
        loss(x).backward()
    for again in (model, experts):
        with pytest.raises(LostRankError):
            again(x)


@pytest.mark.slow
def test_four_ranks_with_fewer_experts_than_a_token_takes_agree_with_one_process(tmp_path: Path) -> None:
    folders = {}
    for family, experts in FAMILIES.items():
        (tmp_path / family).mkdir()
        heads = {"num_key_value_heads": 4} if family == "qwen3_moe" else {}
        folders[family] = build(tmp_path / family, experts, **heads)
    cases = list(all_cases(folders).values())
    for case, results in zip(cases, launch(tmp_path, cases, 4), strict=True):
        assert_same(case, results)
        for rank, result in enumerate(results):
            assert result["stats"]["expert_range"] == {"rank": rank, "ranks": 4, "first_expert": 2 * rank, "experts": 2}
            assert result["pool_bytes"] <= result["record_bytes"] * 2 * result["layers"]


@pytest.mark.slow
def test_every_family_runs_on_two_ranks(tmp_path: Path) -> None:
    ids = torch.randint(3, 100, (2, 9))
    cases = {}
    for name in TINY_MODELS.keys() - {
        "Qwen3OmniMoeTalkerTextExperts"
    }:  # it has no embedding of its own, so it takes no ids
        (tmp_path / name).mkdir()
        raw, _ = build(tmp_path / name, name)
        cases[name] = {
            "folder": raw,
            "model": model_of(name),
            "config": {"resident": 0.5},
            "dtype": torch.float32,
            "whole_rest": True,
            "ids": ids,
            "prompt": ids[:, :4],
        }
    for name, results in zip(cases, launch(tmp_path, list(cases.values()), 2, timeout=600), strict=True):
        try:
            assert_same(cases[name], results)
        except AssertionError as error:
            raise AssertionError(name) from error


def start(
    folder: Path, cases: list[dict[str, Any]], ranks: int, namespaces: Sequence[str] = (), **environment: str
) -> list[subprocess.Popen[str]]:
    """Start the ranks without torchrun, which would end them all with the first one. With ``namespaces``, each rank
    runs in its own network namespace."""
    torch.save(cases, folder / "cases.pt")
    shared = _environment(folder) | environment | {"WORLD_SIZE": str(ranks)}
    if namespaces:
        shared |= {"MASTER_ADDR": "10.78.0.1", "GLOO_SOCKET_IFNAME": "mesh0"}
    how: Any = {"stderr": subprocess.PIPE, "text": True}
    inside = [["ip", "netns", "exec", name] for name in namespaces] or [[]] * ranks
    return [
        subprocess.Popen(
            [*inside[rank], sys.executable, str(RANK), str(folder)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            **how,
        )
        for rank in range(ranks)
    ]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def two_machines() -> Iterator[list[str]]:
    """Two network namespaces with a link between them, whose device is "mesh0" in each."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a link can be cut where root may make network namespaces, with iproute2")
    names = [f"mesh-test-{os.getpid()}-{rank}" for rank in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "mesh0", "netns", names[0], "type", "veth", "peer", "name", "mesh0", "netns", names[1])
        for rank, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.78.0.{rank + 1}/24", "dev", "mesh0")
            for device in ("lo", "mesh0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def lose_packets(namespaces: Sequence[str]) -> None:
    """Simulate a failed switch: the links stay up, and all packets are lost."""
    for rank, name in enumerate(namespaces):
        other = f"10.78.0.{2 - rank}"
        ip("-n", name, "neigh", "replace", other, "lladdr", "02:00:00:00:00:01", "dev", "mesh0", "nud", "permanent")


GROUP_TIMEOUT = 20.0  # timeout of the process group, in seconds
SLACK = 10.0  # seconds for processes on a busy machine
EXIT = 20.0  # seconds that an interpreter may take to end after its error


@pytest.fixture(scope="module")
def small_gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("lost"), "GptOssExperts")[0]


# The trials alternate between the dispatches, and between losing rank 0, which has the process group's store, and 1.
@pytest.mark.parametrize("trial", range(10))
@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP", "cut link", "silent link"])
@pytest.mark.slow
def test_a_rank_that_is_lost_ends_the_others(
    tmp_path: Path, small_gpt_oss: str, end: str, trial: int, request: pytest.FixtureRequest
) -> None:
    case = {
        "folder": small_gpt_oss,
        "model": model_of("GptOssExperts"),
        "distributed": {"ep_implementation": WAYS[trial % 2]},
        "extra": "endless",
    }
    namespaces = request.getfixturevalue("two_machines") if end.endswith("link") else ()
    lost = trial // 2 % 2
    others = [rank for rank in range(2) if rank != lost or namespaces]
    ranks = start(tmp_path, [case], 2, namespaces, RANK_TIMEOUT=str(GROUP_TIMEOUT))
    try:
        deadline = time.monotonic() + 180
        while not all((tmp_path / f"generating{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            assert all(rank.poll() is None for rank in ranks), [rank.communicate()[1][-4000:] for rank in ranks]
            time.sleep(0.05)
        time.sleep(random.random())
        ended = time.monotonic()
        if end == "cut link":
            ip("-n", namespaces[lost], "link", "set", "mesh0", "down")
        elif end == "silent link":
            lose_packets(namespaces)
        else:
            ranks[lost].send_signal(getattr(signal, end))
        for rank in others:
            _, stderr = ranks[rank].communicate(timeout=GROUP_TIMEOUT + EXIT + 2 * SLACK)
            assert ranks[rank].returncode == 1, stderr[-4000:]
            words = rf"LostRankError: Rank {rank} of 2, in .*: another rank has ended, or has not answered"
            assert re.search(words, stderr), stderr[-4000:]
            error = float((tmp_path / f"lost{rank}").read_text())
            assert error - ended < GROUP_TIMEOUT + SLACK
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("trial", range(4))
@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
@pytest.mark.slow
def test_a_rank_that_is_lost_ends_the_training_of_the_others(tmp_path: Path, end: str, trial: int) -> None:
    _, store = build(tmp_path, FAMILIES["qwen3_moe"])
    case = training_case(store, "qwen3_moe", WAYS[trial % 2], "endless_training")
    lost = trial // 2
    ranks = start(tmp_path, [case], 2, RANK_TIMEOUT=str(GROUP_TIMEOUT))
    try:
        deadline = time.monotonic() + 180
        while not all((tmp_path / f"training{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            assert all(rank.poll() is None for rank in ranks), [rank.communicate()[1][-4000:] for rank in ranks]
            time.sleep(0.05)
        time.sleep(random.random())
        ended = time.monotonic()
        ranks[lost].send_signal(getattr(signal, end))
        _, stderr = ranks[1 - lost].communicate(timeout=GROUP_TIMEOUT + EXIT + 2 * SLACK)
        assert ranks[1 - lost].returncode == 1, stderr[-4000:]
        assert "LostRankError: Rank" in stderr or re.search("RuntimeError: .*gloo", stderr), stderr[-4000:]
        error = float((tmp_path / f"lost{1 - lost}").read_text())
        assert error - ended < GROUP_TIMEOUT + SLACK
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
