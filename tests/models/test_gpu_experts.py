"""MeshConfig(gpu={"experts": ...}): experts on the device of their layer, experts in the pool, and refusals.

Without a card the CPU takes its place: placing is made to believe that it may hold experts, and Triton is interpreted.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decode_steps import DecodeSteps
from quantized import KINDS, write_quantized
from routes import Computed
from tiny_models import TINY_MODELS, logits_of
from torch import nn
from torch_mesh.ops import device as devices
from torch_mesh.ops.device import find
from transformers import AutoModelForCausalLM, PreTrainedModel

import torch_mesh
from torch_mesh import ChecksumError, MeshConfig, MeshError, StoreError, UnsupportedModelError, _testing
from torch_mesh.formats import FORMATS
from torch_mesh.gpu import choosing, placing, planning
from torch_mesh.gpu.planning import plan_gpu
from torch_mesh.models.families import find_experts
from torch_mesh.modules.experts import patched_modules
from torch_mesh.planning.plan import plan
from torch_mesh.routing.profiles import Profile, write_profile
from torch_mesh.routing.traces import Trace
from torch_mesh.statistics.counters import DeviceCounters
from torch_mesh.statistics.stats import shared_devices_of
from torch_mesh.store.convert import convert, pack_expert

pytestmark = pytest.mark.device

LAYERS, EXPERTS, TOP_K = 3, 8, 3
TRELLIS_FORMATS = tuple(name for name, each in FORMATS.items() if each.trellis)
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that can hold experts: a card, or the CPU in its place."""
    pytest.importorskip("triton")
    importlib.import_module("quick_interpreter")
    if DEVICE.type == "cpu":
        monkeypatch.setattr(choosing, "_holds_experts", lambda device: True)
        monkeypatch.setattr(choosing, "_device_memory", lambda device: (3 * GIB, 4 * GIB))
        monkeypatch.setattr(devices, "open_driver", lambda device: _testing.simulated_device())


def _build(name: str = "Qwen3MoeExperts") -> PreTrainedModel:
    return TINY_MODELS[name].build().to(DEVICE)


def _ids() -> torch.Tensor:
    return torch.randint(3, 100, (1, 6), device=DEVICE)


def _agrees_with(original: PreTrainedModel, ids: torch.Tensor, weights: str = "bf16") -> Callable[[nn.Module], None]:
    """A check that a model has the logits of its records' values. Experts in memory round their inputs to bytes."""
    plain = copy.deepcopy(original)
    in_memory = torch_mesh.patch(copy.deepcopy(original), resident=0.5, weights=weights)
    if weights != "bf16":
        torch_mesh.unpatch(torch_mesh.patch(plain, weights=weights), lossy=True)
    computed = Computed.by(plain, functools.partial(logits_of, ids=ids))
    return functools.partial(computed.assert_same, moved=computed.error(in_memory))


def _residency(model: PreTrainedModel) -> torch.Tensor:
    """bool [layers, experts]: whether an expert is in the pool or being read into it."""
    states = [torch.ops.torch_mesh.residency(module._mesh_handle) for module in patched_modules(model)]
    return torch.stack(states) > 0


def _random_mask() -> torch.Tensor:
    return torch.rand(LAYERS, EXPERTS) < 0.5


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("family", "weights"),
    [
        ("Qwen3MoeExperts", "bf16"),
        ("Qwen3MoeExperts", "bf12"),
        ("Qwen3MoeExperts", "int8"),
        ("Qwen3MoeExperts", "tcq2+tcq3"),
        ("GptOssExperts", "bf16"),
        ("GptOssExperts", "tcq3"),
    ],
)
def test_a_model_with_experts_on_the_device_has_the_logits_of_the_cpu(family: str, weights: str) -> None:
    original, ids = _build(family), _ids()
    agrees = _agrees_with(original, ids, weights)
    for wanted in (3, _random_mask(), "auto"):
        model = torch_mesh.patch(copy.deepcopy(original), resident=0.5, weights=weights, gpu={"experts": wanted})
        agrees(model)
        if weights == "bf16":
            torch_mesh.unpatch(model)
            for name, value in original.state_dict().items():
                assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.usefixtures("card")
def test_experts_on_the_device_never_return_to_the_pool() -> None:
    mask = _random_mask()
    mask[0] = True
    model = torch_mesh.patch(_build(), resident=0.9, weights="int8", gpu={"experts": mask, "streaming": "off"})
    assert not _residency(model)[mask].any(), "none is kept twice"
    for _ in range(2):
        logits_of(model, _ids())
    assert not _residency(model)[mask].any()
    stats = torch_mesh.stats(model)
    assert stats.slots == max(TOP_K, int((~mask).sum()))
    used = torch.tensor([layer.experts.accesses for layer in stats.per_layer])
    assert (used[mask] == 0).all() and (used[~mask] > 0).any()
    assert stats.per_layer[0].forwards == 0, "a layer that is there as a whole never reaches the CPU"


@pytest.mark.usefixtures("card")
def test_placing_experts_is_not_counted() -> None:
    model = torch_mesh.patch(_build(), resident=0.5, weights="int8", gpu={"experts": 4})
    stats = torch_mesh.stats(model)
    assert stats.accesses == stats.bytes_read == 0


@pytest.mark.usefixtures("card")
def test_statistics_of_the_device() -> None:
    mask = torch.zeros(LAYERS, EXPERTS, dtype=torch.bool)
    mask[0], mask[1, :4] = True, True
    model = torch_mesh.patch(_build(), resident=1.0, weights="int8", gpu={"experts": mask, "streaming": (0, 1, 1)})
    device = torch_mesh.stats(model).device
    assert device is not None and not any(device.to_dict().values()), "placing is not counted"
    logits_of(model, _ids())
    stats = torch_mesh.stats(model)
    device = stats.device
    assert device is not None and stats.to_dict()["device"] == device.to_dict()
    assert (device.complete, device.calls, device.failed) == (1, 2, 0)
    assert device.all_on_device == 2, "copies cost nothing: all that were cold came up"
    assert device.streamed > 0 and device.bytes_streamed % device.streamed == 0
    assert device.bytes_down > 0 and device.bytes_up > 0 and device.node_seconds > 0
    assert str(device) in str(stats) and "\n" not in str(device)
    torch_mesh.reset_stats(model)
    assert torch_mesh.stats(model).device == DeviceCounters()
    logits_of(model, _ids()[:, :1])
    assert torch_mesh.stats(model).device.streamed == 0, "of a decode step nothing is"
    assert torch_mesh.stats(torch_mesh.patch(_build(), resident=0.5)).device is None


@pytest.mark.usefixtures("card")
def test_costs_of_streaming_are_measured_unless_it_is_off() -> None:
    mask = _random_mask()
    mask[0, :2] = torch.tensor([True, False])
    model = torch_mesh.patch(_build(), resident=0.5, weights="int8", gpu={"experts": mask})
    [shared] = shared_devices_of(model)
    assert shared.costs is not None and shared.costs.copy > 0 and shared.costs.row >= 0 and shared.costs.expert >= 0
    assert shared.costs.row + shared.costs.expert > 0
    with pytest.raises(MeshError, match="has computed nothing yet"):
        torch_mesh.save_profile(model, "never-written")
    off = torch_mesh.patch(_build(), resident=0.5, weights="int8", gpu={"experts": mask, "streaming": "off"})
    [shared] = shared_devices_of(off)
    assert shared.costs is None and shared.buffers is None
    ids = _ids()
    for each in (model, off):
        assert torch.equal(logits_of(each, ids), logits_of(each, ids))


@pytest.mark.usefixtures("card")
def test_a_damaged_store_gives_nan_and_a_later_error(tmp_path: Path) -> None:
    options = {
        "resident": 0.2,
        "weights": "int8",
        "store": tmp_path / "store",
        "gpu": {"experts": 3, "streaming": "off"},
    }
    model = torch_mesh.patch(_build(), verify="always", prefetch="off", **options)
    torch_mesh.synchronize(model)
    for file in (tmp_path / "store").glob("mesh-*.safetensors"):
        with file.open("r+b") as records:
            records.seek(file.stat().st_size // 2)
            records.write(bytes(file.stat().st_size - records.tell()))
    ids = torch.arange(3, 67, device=DEVICE).view(8, 8)
    for look in (torch_mesh.stats, torch_mesh.synchronize, lambda model: logits_of(model, ids)):
        with pytest.raises(
            (ChecksumError, ValueError)
        ) as error:  # with NaN a later layer's router may choose an expert that does not exist
            logits_of(model, ids)
            look(model)
        assert isinstance(error.value, ChecksumError) or "expert id" in str(error.value)


@pytest.mark.usefixtures("card")
def test_capture_sizes_are_set_read_and_cleared() -> None:
    model = torch_mesh.patch(_build(), resident=0.5, gpu={"experts": 3})
    assert torch_mesh.capture_batch_sizes(model) == []
    torch_mesh.set_capture_batch_sizes(model, [4, 1])
    assert torch_mesh.capture_batch_sizes(model) == [4, 1]
    for wrong in ([0], [1, 1], [True], [1.0], [-3]):
        with pytest.raises(ValueError, match="distinct positive numbers of tokens"):
            torch_mesh.set_capture_batch_sizes(model, wrong)
    assert torch_mesh.capture_batch_sizes(model) == [4, 1]
    torch_mesh.set_capture_batch_sizes(model, [])
    assert torch_mesh.capture_batch_sizes(model) == []


@pytest.mark.smoke
@pytest.mark.usefixtures("card")
def test_place_experts_moves_experts_to_the_given_mask() -> None:
    original, ids = _build(), _ids()
    masks = [_random_mask() for _ in range(3)]
    for mask in masks:
        mask[:, 0], mask[:, 1] = True, False  # each layer has some experts on the card and some in the pool
        mask[:, 4:] = False
    model = torch_mesh.patch(
        copy.deepcopy(original), resident=0.5, gpu={"experts": 4, "placement": "dynamic", "streaming": "off"}
    )
    agrees = _agrees_with(original, ids)
    before = torch_mesh.stats(model).device
    assert before is not None and before.moved == 0
    moved = 0
    for mask in masks:
        moved += torch_mesh.place_experts(model, mask)
        placed = [find(module._mesh_handle) for module in patched_modules(model)]
        assert [layer.count for layer in placed] == mask.sum(1).tolist()
        assert all(
            f"{layer.count} of its 8 on" in repr(module)
            for layer, module in zip(placed, patched_modules(model), strict=True)
        )
        assert torch.equal(torch.stack([layer.table for layer in placed]).cpu() >= 0, mask)
        assert not _residency(model)[mask].any(), "none is kept twice"
        agrees(model)
    after = torch_mesh.stats(model).device
    assert after is not None and after.moved == moved
    with pytest.raises(ValueError, match="which has room for"):
        torch_mesh.place_experts(model, torch.ones(LAYERS, EXPERTS, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"here is torch.bool \[3, 7\]; it has to be torch.bool \[3, 8\]"):
        torch_mesh.place_experts(model, torch.ones(LAYERS, 7, dtype=torch.bool))


@pytest.mark.usefixtures("card")
def test_experts_that_another_thread_moves_during_a_forward_are_computed_once() -> None:
    original, ids = _build(), _ids()
    model = torch_mesh.patch(
        copy.deepcopy(original), resident=0.5, gpu={"experts": 4, "placement": "dynamic", "streaming": "off"}
    )
    agrees = _agrees_with(original, ids)
    [shared] = shared_devices_of(model)
    host, movers = shared.host, []
    there = torch.arange(EXPERTS).expand(LAYERS, -1) < 4

    def submit(*call: object) -> int:
        ticket = host.submit(*call)
        if not movers:
            movers.append(threading.Thread(target=torch_mesh.place_experts, args=(model, ~there)))
            movers[0].start()
            movers[0].join(timeout=1)  # it may wait until this layer's kernels are launched
        return ticket

    shared.host = SimpleNamespace(submit=submit, join=host.join)
    agrees(model)
    movers[0].join()
    placed = torch.stack([find(module._mesh_handle).table for module in patched_modules(model)]).cpu() >= 0
    assert torch.equal(placed, ~there)


def _decode(
    steps: DecodeSteps,
    step: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    masks: Mapping[int, torch.Tensor],
) -> torch.Tensor:
    """Logits [tokens, vocabulary]. ``masks`` has, by step, the experts that are on the device from this step on."""
    steps.reset()
    logits = []
    for index, token in enumerate(tokens):
        if index in masks:
            torch_mesh.place_experts(steps.model, masks[index])
        logits.append(step(token).clone())
    result = torch.stack(logits).cpu()  # this waits for the replays, which synchronize() does not
    torch_mesh.synchronize(steps.model)
    return result


NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ


@pytest.mark.usefixtures("card")
@pytest.mark.skipif(NO_CACHE, reason="a capture allocates, which only torch's caching allocator can do within one")
@pytest.mark.parametrize(
    ("count", "moves"),
    [
        pytest.param(6, 3, marks=pytest.mark.smoke),
        # Triton's interpreter runs fewer steps with as many moves.
        pytest.param(200, 20) if DEVICE.type == "cuda" else pytest.param(24, 20, marks=pytest.mark.slow),
    ],
)
def test_replayed_steps_equal_eager_ones_while_experts_move(
    monkeypatch: pytest.MonkeyPatch, count: int, moves: int
) -> None:
    """The logits are equal bit for bit. Without a card nothing is captured. Then the second model has other delays
    between its streams."""
    monkeypatch.setattr(placing, "_PATIENCE", 1 << 30)  # only the schedule moves experts
    original = _build()
    tokens = torch.randint(3, 100, (count,), device=DEVICE)
    masks = {0: torch.zeros(LAYERS, EXPERTS, dtype=torch.bool)}
    masks |= {index: torch.rand(LAYERS, EXPERTS).argsort(1) < 4 for index in random.sample(range(1, count), moves - 1)}
    moved = sum(int((masks[now] & ~masks[before]).sum()) for before, now in itertools.pairwise(sorted(masks)))
    logits = []
    for delay in (50, 400):
        if DEVICE.type == "cpu":
            driver = functools.partial(_testing.simulated_device, random.randrange(1 << 31), max_delay_us=delay)
            monkeypatch.setattr(devices, "open_driver", lambda device, driver=driver: driver())
        model = torch_mesh.patch(
            copy.deepcopy(original), resident=0.5, gpu={"experts": 4, "placement": "dynamic", "streaming": "off"}
        )
        steps = DecodeSteps(model, count)
        steps.capture()
        for step in (steps.eager, steps.replay) if DEVICE.type == "cuda" else (steps.replay,):
            torch_mesh.place_experts(model, masks[0])
            torch_mesh.reset_stats(model)
            logits.append(_decode(steps, step, tokens, masks))
            device = torch_mesh.stats(model).device
            assert device is not None and device.failed == 0
            assert device.calls == LAYERS * count and device.moved == moved
    assert not logits[0].isnan().any() and logits[0].std() > 0
    for other in logits[1:]:
        assert torch.equal(other, logits[0])


@pytest.mark.usefixtures("card")
def test_used_experts_move_to_the_device_while_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "_PATIENCE", 2)
    model = torch_mesh.patch(_build(), resident=0.5, gpu={"experts": 2, "placement": "dynamic"})
    ids = _ids()
    deadline = time.monotonic() + 600  # against a hang: a busy machine takes a minute
    for step in itertools.count():
        token = step // 50 % ids.size(1)  # the same token for a while, so that its experts become the hottest
        logits_of(model, ids[:, token : token + 1])
        device = torch_mesh.stats(model).device
        assert device is not None and device.moves_failed == 0
        if device.moved >= 3:
            break
        assert time.monotonic() < deadline, "nothing moved in ten minutes"
    total = sum(find(module._mesh_handle).count for module in patched_modules(model))
    assert total <= 2 * LAYERS
    torch_mesh.synchronize(model)


@pytest.mark.usefixtures("card")
def test_a_static_placement_does_not_move() -> None:
    model = torch_mesh.patch(_build(), resident=0.5, gpu={"experts": 2})
    with pytest.raises(MeshError, match="Patch it with gpu.placement='dynamic'"):
        torch_mesh.place_experts(model)
    with pytest.raises(ValueError, match="set gpu.experts"):
        torch_mesh.patch(_build(), gpu={"placement": "dynamic"})
    with pytest.raises(ValueError, match="gpu.placement='often' is unknown"):
        MeshConfig(gpu={"placement": "often"})


def test_functions_of_the_device_refuse_a_model_without_experts_there() -> None:
    model = TINY_MODELS["Qwen3MoeExperts"].build()
    calls = (
        torch_mesh.synchronize,
        torch_mesh.capture_batch_sizes,
        torch_mesh.place_experts,
        lambda model: torch_mesh.set_capture_batch_sizes(model, [1]),
    )
    for call in calls:
        with pytest.raises(MeshError):
            call(model)
    torch_mesh.patch(model, resident=0.5)
    for call in calls:
        with pytest.raises(MeshError, match="has no experts on a GPU"):
            call(model)


@pytest.mark.usefixtures("card")
def test_all_in_memory_works_without_a_store() -> None:
    original, ids = _build(), _ids()
    model = torch_mesh.patch(copy.deepcopy(original), resident=1.0, gpu={"experts": 4})
    assert "4 of its 8 on" in repr(model)
    _agrees_with(original, ids)(model)


@pytest.mark.usefixtures("card")
def test_from_pretrained_places_experts_on_the_device(tmp_path: Path) -> None:
    original, ids = _build(), _ids()
    original.save_pretrained(tmp_path / "model")
    config = MeshConfig(resident=0.5, gpu={"experts": _random_mask()})
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16, quantization_config=config, device_map=str(DEVICE)
    )
    _agrees_with(original, ids)(model)
    placed = [find(module._mesh_handle).here for module in patched_modules(model) if module._mesh_device]
    assert sum(int(here.sum()) for here in placed) == sum(map(sum, config.gpu.experts))


def _on_card(model: PreTrainedModel, original: PreTrainedModel, weights: str) -> int:
    """The number of experts on the card. Checks that their records are the original weights packed in ``weights``."""
    count = 0
    for module, layer in zip(patched_modules(model), find_experts(original), strict=True):
        placed = find(module._mesh_handle)
        assert placed.record.format == weights
        for expert in placed.here.nonzero().flatten().tolist():
            record = pack_expert(layer.expert(expert).on_cpu(), weights, 64 if weights != "bf16" else 0)
            assert torch.equal(placed.records[placed.table[expert]].cpu(), record)
            count += 1
    return count


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(("weights", "there", "resident"), [("int4", "bf16", 0.5), ("bf16", "int8", 1.0)])
def test_experts_on_the_card_may_have_another_format(weights: str, there: str, resident: float, cache: Path) -> None:
    original, ids = _build(), _ids()
    options = {"resident": resident, "weights": weights, "gpu": {"experts": 3, "weights": there}}
    model = torch_mesh.patch(copy.deepcopy(original), **options)
    assert _on_card(model, original, there) == 3 * LAYERS
    assert f"3 of its 8 on {DEVICE} in {there}" in repr(model) and f"weights={weights}" in repr(model)
    assert not list(cache.glob("unnamed-*")), "what was only read once is gone"
    same = torch_mesh.patch(copy.deepcopy(original), **options | {"gpu": {"experts": 3}})
    assert " in " not in repr(next(patched_modules(same))).rpartition("on ")[2]
    _agrees_with(original, ids, weights)(same)
    assert not logits_of(model, ids).isnan().any()  # with experts in both formats
    if weights == "bf16":
        torch_mesh.unpatch(model)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in original.state_dict().items())


@pytest.mark.usefixtures("card", "cache")
@pytest.mark.parametrize("there", ["tcq2", "tcq3"])
def test_all_experts_on_the_card_in_a_trellis_give_the_logits_of_such_a_model(there: str) -> None:
    original, ids = _build(), _ids()
    gpu = {"experts": EXPERTS, "weights": there}
    model = torch_mesh.patch(copy.deepcopy(original), resident=0.5, weights="int4", gpu=gpu)
    assert _on_card(model, original, there) == EXPERTS * LAYERS
    _agrees_with(original, ids, there)(model)


@pytest.mark.usefixtures("card")
def test_moved_experts_get_the_format_of_the_card() -> None:
    original = _build()
    gpu = {"experts": 3, "weights": "int8", "placement": "dynamic", "streaming": "off"}
    model = torch_mesh.patch(copy.deepcopy(original), resident=0.5, weights="int4", gpu=gpu)
    mask = torch.zeros(LAYERS, EXPERTS, dtype=torch.bool)
    mask[:, 3:6] = True
    assert torch_mesh.place_experts(model, mask) == 3 * LAYERS
    for module, layer in zip(patched_modules(model), find_experts(original), strict=True):
        placed = find(module._mesh_handle)
        for expert in range(3, 6):
            record = pack_expert(layer.expert(expert).on_cpu(), "int8", 64)
            assert torch.equal(placed.records[placed.table[expert]].cpu(), record)
    assert not logits_of(model, _ids()).isnan().any()


@pytest.mark.usefixtures("card")
def test_from_pretrained_finds_records_of_both_formats(tmp_path: Path, cache: Path) -> None:
    original, ids = _build(), _ids()
    original.save_pretrained(tmp_path / "model")
    stores = cache / "stores"

    def load(folder: str = "model", layers: int = LAYERS, **fields: object) -> PreTrainedModel:
        config = MeshConfig(resident=0.5, gpu={"experts": 3, "streaming": "off"}).replace(**fields)
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / folder,
            dtype=torch.bfloat16,
            quantization_config=config,
            device_map=str(DEVICE),
            num_hidden_layers=layers,
        )

    assert _on_card(load(weights="int4", gpu={"weights": "bf16"}), original, "bf16") == 3 * LAYERS
    assert [folder.name.rpartition("-")[0] for folder in stores.iterdir()] == ["model-int4"], (
        "bf16 is in the checkpoint itself"
    )
    store = tmp_path / "store"
    model = load(weights="int8", gpu={"weights": "int4"}, store=store)
    assert _on_card(model, original, "int4") == 3 * LAYERS
    assert store.is_dir() and (tmp_path / "store-int4").is_dir()
    again = load(weights="int8", gpu={"weights": "int4"}, store=store)
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))

    convert(tmp_path / "model", tmp_path / "converted", "int8")
    converted = load("converted", gpu={"weights": "int4"})
    assert "3 of its 8 on" in repr(converted) and "in int4" in repr(converted)
    with pytest.raises(ValueError, match="gpu.weights='bf16' has no fewer bits than the int8 of this converted"):
        load("converted", gpu={"weights": "bf16"})
    with pytest.raises(StoreError, match="this model has 2 of the 3 MoE layers"):
        load(layers=2, weights="bf16", gpu={"weights": "int8"})
    assert len(list(stores.iterdir())) == 2, "nothing was made for it"
    with pytest.raises(
        ValueError, match="gpu.weights='int4' sets the format of experts on a GPU, but gpu.experts is 0"
    ):
        torch_mesh.patch(_build(), gpu={"weights": "int4"})


@pytest.mark.usefixtures("card", "cache")
@pytest.mark.parametrize(
    ("kind", "weights", "fewer"),
    [("ct_mxfp4", "mxfp4", TRELLIS_FORMATS), ("fp8_blocks", "fp8", ("int4", "lut4", *TRELLIS_FORMATS))],
)
def test_codes_of_a_checkpoint_are_placed_on_the_card_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, weights: str, fewer: tuple[str, ...]
) -> None:
    folder, converted = tmp_path / "raw", tmp_path / "converted"
    write_quantized(folder, KINDS[kind]())
    store = convert(folder, converted, "auto").store
    size, shape = store.manifest.record_bytes, store.manifest.shape
    monkeypatch.setattr(planning, "_ALLOCATION", 1)
    room = 2 * GIB + 3 * shape.layers * size  # the reserve, and three experts of each layer
    monkeypatch.setattr(choosing, "_device_memory", lambda device: (room, 4 * GIB))
    monkeypatch.setattr(choosing, "_bytes_on", lambda layer, device: 0)

    def load(path: Path, **gpu: object) -> PreTrainedModel:
        config = MeshConfig(resident=0.5, gpu={"streaming": "off", **gpu})
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, quantization_config=config, device_map=str(DEVICE)
        )

    ids = _ids()
    in_memory = load(folder)
    plain = torch_mesh.unpatch(load(folder), lossy=True)
    computed = Computed.by(plain, functools.partial(logits_of, ids=ids))
    for path in (folder, converted):
        model = load(path, experts="auto")
        computed.assert_same(model, moved=computed.error(in_memory))
        for layer, module in enumerate(patched_modules(model)):
            placed = find(module._mesh_handle)
            assert placed.record.format == weights and placed.count == 3
            for expert in placed.here.nonzero().flatten().tolist():
                number, offset = store.manifest.locate(layer, expert)
                file = store.folder / store.manifest.record_files[number].name
                record = torch.from_numpy(np.fromfile(file, dtype=np.uint8, count=size, offset=offset))
                assert torch.equal(placed.records[placed.table[expert]].cpu(), record)
    planned = plan(converted, MeshConfig(gpu={"experts": "auto"}), card=(4 * GIB, 4 * GIB)).gpu
    assert planned is not None and planned.placed == shape.layers * shape.experts

    with pytest.raises(
        ValueError, match=f"of this converted checkpoint.*give {re.escape(', '.join(map(repr, (*fewer, 'auto'))))}, or"
    ):
        load(converted, experts=1, weights="int8")
    for other in fewer[:1]:
        assert f"on {DEVICE} in {other}" in repr(load(converted, experts=1, weights=other))
    original = load(folder, experts=1, weights="bf16")
    assert f"on {DEVICE} in bf16" in repr(original) and f"weights={weights}" in repr(original)


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("wanted", [2, "auto"])
def test_a_profile_chooses_the_experts_for_the_card_and_for_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int | str
) -> None:
    uses = np.stack([np.random.permutation(EXPERTS) for _ in range(LAYERS)]) + 1
    write_profile(Profile(np.full(LAYERS, 100), uses, TOP_K), tmp_path / "profile.json")
    record = pack_expert(find_experts(_build())[0].expert(0).on_cpu(), "bf16", 0).numel()
    monkeypatch.setattr(planning, "_ALLOCATION", 1)
    room = 2 * GIB + (2 * LAYERS + 2) * record  # the reserve, two experts of each layer, and two buffers
    monkeypatch.setattr(choosing, "_device_memory", lambda device: (room, 4 * GIB))
    monkeypatch.setattr(choosing, "_bytes_on", lambda layer, device: 0)
    model = torch_mesh.patch(
        _build(),
        resident=0.5,
        gpu={"experts": wanted},
        profile=tmp_path / "profile.json",
        policy="lru",
    )
    here = torch.stack([find(module._mesh_handle).here for module in patched_modules(model)])
    hottest = torch.from_numpy(uses) > EXPERTS - 2
    assert torch.equal(here, hottest)
    deadline = time.monotonic() + 20
    while (warm := _residency(model)).sum() < 12 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert warm.sum() == 12 and not warm[hottest].any(), "half of the experts, none of those on the GPU"
    flat = torch.from_numpy(uses).masked_fill(hottest, 0)
    assert flat[warm].min() >= flat[~warm & ~hottest].max(), "the most used of the others"


@pytest.mark.usefixtures("card")
def test_a_deep_copy_generates_the_same_tokens() -> None:
    model = torch_mesh.patch(_build(), resident=0.5, gpu={"experts": 5})
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    ids = _ids()
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    clone = copy.deepcopy(model)
    del model
    assert torch.equal(clone.generate(ids, attention_mask=torch.ones_like(ids), **settings), tokens)


@pytest.mark.usefixtures("card")
def test_a_single_layer_takes_experts_on_the_device() -> None:
    gate_up, down = torch.randn(4, 80, 72, device=DEVICE) * 0.1, torch.randn(4, 72, 40, device=DEVICE) * 0.1
    x, ids = torch.randn(5, 72, device=DEVICE), torch.randint(0, 4, (5, 2), device=DEVICE)
    weights = torch.rand(5, 2, device=DEVICE)
    expected = torch_mesh.Experts(gate_up, down, top_k=2)(x, ids, weights)
    layer = torch_mesh.Experts(gate_up, down, top_k=2, gpu={"experts": [[True, False, True, True]]})
    out = layer(x, ids, weights)
    assert (out - expected).norm() <= 2**-8 * expected.norm(), "operands in bf16, here as there"

    pending = [layer.submit(x[:n], ids[:n], weights[:n]) for n in (5, 1, 3)]
    for n, call in zip((5, 1, 3), pending, strict=True):
        assert torch.equal(call.result(), layer(x[:n], ids[:n], weights[:n]))
    assert torch.equal(pending[0].result(), out), "as often as one likes"
    layer.submit(x, ids, weights)  # a call whose result is never asked for
    assert torch.equal(layer(x, ids, weights), out)


@pytest.mark.usefixtures("card")
def test_a_submitted_call_that_a_graph_captures_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down = torch.randn(4, 80, 72, device=DEVICE) * 0.1, torch.randn(4, 72, 40, device=DEVICE) * 0.1
    layer = torch_mesh.Experts(gate_up, down, top_k=2, gpu={"experts": 2})
    x, ids = torch.randn(2, 72, device=DEVICE), torch.randint(0, 4, (2, 2), device=DEVICE)
    weights = torch.rand(2, 2, device=DEVICE)
    expected = layer(x, ids, weights)
    waited: list[int] = []
    for captured in (False, True):
        monkeypatch.setattr(devices.SharedDevice, "capturing", lambda shared, captured=captured: captured)
        call = layer.submit(x, ids, weights)
        monkeypatch.setattr(call, "_host", SimpleNamespace(wait=waited.append))
        assert torch.equal(call.result(), expected)
        assert len(waited) == 1, "of a captured call nothing says when its graph is launched"


@pytest.mark.usefixtures("card")
def test_an_error_of_a_submitted_call_comes_out_of_its_result() -> None:
    gate_up, down = torch.randn(4, 80, 72, device=DEVICE) * 0.1, torch.randn(4, 72, 40, device=DEVICE) * 0.1
    layer = torch_mesh.Experts(gate_up, down, top_k=2, gpu={"experts": 2})
    x, weights = torch.randn(2, 72, device=DEVICE), torch.rand(2, 2, device=DEVICE)
    ids = torch.tensor([[0, 3], [2, 1]], device=DEVICE)
    wrong, right = layer.submit(x, ids + 2, weights), None
    with pytest.raises(ValueError, match="expert id [45] of token"):
        wrong.result()
    with pytest.raises(ValueError, match="expert id [45] of token"):
        wrong.result()
    right = layer.submit(x, ids, weights)
    assert torch.equal(right.result(), layer(x, ids, weights))
    with pytest.raises(ValueError, match="x must be"):
        layer.submit(x[:, :3], ids, weights).result()
    with pytest.raises(ValueError, match="torch.no_grad"):
        layer.submit(x.requires_grad_(), ids, weights)


@pytest.mark.usefixtures("card")
def test_a_result_that_ctrl_c_interrupts_is_not_taken_for_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down = torch.randn(4, 80, 72, device=DEVICE) * 0.1, torch.randn(4, 72, 40, device=DEVICE) * 0.1
    layer = torch_mesh.Experts(gate_up, down, top_k=2, gpu={"experts": 2})
    x, ids = torch.randn(2, 72, device=DEVICE), torch.randint(0, 4, (2, 2), device=DEVICE)
    call = layer.submit(x, ids, torch.rand(2, 2, device=DEVICE))
    problems = [KeyboardInterrupt, RuntimeError]

    def wait(ticket: int) -> None:
        raise problems.pop(0)("of this forward")

    monkeypatch.setattr(call, "_host", SimpleNamespace(wait=wait))
    for error in (KeyboardInterrupt, RuntimeError, RuntimeError):
        with pytest.raises(error, match="of this forward"):
            call.result()

    call = layer.submit(x, ids, torch.rand(2, 2, device=DEVICE))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(call._forward, "finish", lambda: wait(0))
        problems.append(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            call.result()
    for _ in range(2):
        with pytest.raises(MeshError, match=r"interrupted: submit the forward again"):
            call.result()


@pytest.mark.usefixtures("card")
def test_masks_and_counts_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build()
    for wrong, message in (
        (9, "gpu.experts=9, but a layer has 8 experts"),
        (torch.ones(LAYERS, 7, dtype=torch.bool), r"a mask of 3 layers by 7 experts; the model's has to be \[3, 8\]"),
        (torch.ones(2, EXPERTS, dtype=torch.bool), "a mask of 2 layers by 8 experts"),
    ):
        with pytest.raises(ValueError, match=message):
            torch_mesh.patch(model, gpu={"experts": wrong})
    with pytest.raises(ValueError, match="prefill='window' reads whole layers"):
        torch_mesh.patch(model, gpu={"experts": 2}, prefill="window")
    with pytest.raises(ValueError, match="lossy deferred_experts=1 and gpu.experts exclude each other"):
        torch_mesh.patch(model, gpu={"experts": 2}, lossy={"deferred_experts": 1})
    monkeypatch.setattr(choosing, "_device_memory", lambda device: (4096, 4 * GIB))
    monkeypatch.setattr(choosing, "_bytes_on", lambda layer, device: 0)
    with pytest.raises(MemoryError, match=r"needs [\d,]+ bytes for 6 experts and spare slots, but .* has 4,096 left"):
        torch_mesh.patch(model, gpu={"experts": 2})
    assert not list(patched_modules(model)), "a model that was refused is as it was"
    torch_mesh.patch(model, gpu={"experts": "auto"})
    assert all(module._mesh_device is None for module in patched_modules(model))


@pytest.mark.usefixtures("card")
def test_a_family_with_unfused_experts_stays_on_the_cpu() -> None:
    model = _build("MuseSparkExperts")
    with pytest.raises(UnsupportedModelError, match="run unfused, on the CPU"):
        torch_mesh.patch(model, gpu={"experts": 1})
    with pytest.warns(UserWarning, match="gpu.experts='auto' places none"):
        torch_mesh.patch(model, gpu={"experts": "auto"})


def test_a_model_on_the_cpu_has_no_experts_on_a_device() -> None:
    model = TINY_MODELS["Qwen3MoeExperts"].build()
    with pytest.raises((MeshError, UnsupportedModelError), match="device_map='cuda'|pip install triton"):
        torch_mesh.patch(model, gpu={"experts": 1})
    torch_mesh.patch(model, gpu={"experts": "auto"})  # "auto" places none without a card
    assert all(module._mesh_device is None for module in patched_modules(model))


@pytest.mark.parametrize("value", [-1, 1.5, True, "many", [[1, 0]], [[True], [True, False]], [], None])
def test_a_wrong_gpu_experts_says_what_is_allowed(value: object) -> None:
    with pytest.raises(ValueError, match="give a number of experts of each layer, 'auto', or a bool mask"):
        MeshConfig(gpu={"experts": value})


@pytest.mark.parametrize("value", ["on", 1, (1, 2), (1, 2, -3), (1, 2, True), (1, 2, float("inf")), None, ["a", 1, 2]])
def test_a_wrong_streaming_says_what_is_allowed(value: object) -> None:
    with pytest.raises(ValueError, match="give 'auto', 'off', or three numbers of seconds"):
        MeshConfig(gpu={"streaming": value})


def test_a_checkpoint_does_not_store_streaming() -> None:
    assert MeshConfig(gpu={"streaming": [1, 2.5, 0]}).gpu.streaming == (1.0, 2.5, 0.0)
    assert "gpu_streaming" not in MeshConfig(gpu={"streaming": "off"}).to_dict()


def test_gpu_experts_may_be_a_mask_in_any_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mask = [[True, False], [False, False]]
    for given in (mask, np.array(mask), torch.tensor(mask)):
        config = MeshConfig(gpu={"experts": given})
        assert config.gpu.experts == ((True, False), (False, False))
        assert "gpu={'experts': <mask [2, 2]>}" in repr(config)
        assert config.replace(resident=0.5).gpu.experts == config.gpu.experts
    assert "gpu_experts" not in MeshConfig(gpu={"experts": 3}).to_dict(), "a placement belongs to a machine"
    monkeypatch.setenv("TORCH_MESH_GPU_EXPERTS", "12")
    assert MeshConfig().gpu.experts == 12


def test_hottest_experts_of_a_trace_and_of_statistics() -> None:
    ids = np.array([[[0, 1], [3, 2]], [[0, 2], [3, 0]], [[0, 2], [3, 0]]], dtype=np.int32)
    trace = Trace("t", ids, np.array([0, 3]), experts=4)
    mask = torch_mesh.hottest_experts(trace, 2)
    assert mask.tolist() == [[True, False, True, False], [True, False, False, True]]
    assert torch_mesh.hottest_experts(trace, 0).sum() == 0 and torch_mesh.hottest_experts(trace, 4).all()
    with pytest.raises(ValueError, match=r"per_layer=5 must be in \[0, 4\]"):
        torch_mesh.hottest_experts(trace, 5)

    model = torch_mesh.patch(TINY_MODELS["Qwen3MoeExperts"].build(), resident=0.5)
    with pytest.raises(ValueError, match="no expert has been used yet"):
        torch_mesh.hottest_experts(torch_mesh.stats(model), 2)
    for _ in range(3):
        logits_of(model, torch.randint(3, 100, (1, 1)))
    stats = torch_mesh.stats(model)
    mask = torch_mesh.hottest_experts(stats, 2)
    used = torch.tensor([layer.experts.accesses for layer in stats.per_layer])
    assert mask.shape == (LAYERS, EXPERTS) and (mask.sum(1) == 2).all()
    assert (used.masked_fill(~mask, 99).amin(1) >= used.masked_fill(mask, -1).amax(1)).all()


@pytest.mark.parametrize(
    ("free", "status", "counts"),
    [
        (2 * GIB, "too small", (0, 0, 0)),  # the reserve takes all
        (2 * GIB + 2 * 4096 * 1024, "too small", (0, 0, 0)),  # the buffers take the rest
        (2 * GIB + 10 * 4096 * 1024, "below recommended", (3, 3, 2)),
        (2 * GIB + 11 * 4096 * 1024, "ok", (3, 3, 3)),
        (20 * GIB, "nothing to do", (8, 8, 8)),
    ],
)
def test_experts_on_a_card_fit_beside_a_reserve(free: int, status: str, counts: tuple[int, ...]) -> None:
    plan = plan_gpu(free, 8 * GIB, LAYERS, EXPERTS, TOP_K, record_bytes=4096 * 1024)
    assert (plan.status, plan.counts, plan.reserve_bytes) == (status, counts, 2 * GIB)
    assert plan.buffers == (2 if 0 < sum(counts) < LAYERS * EXPERTS else 0)
    assert plan.expert_bytes == (sum(counts) + plan.buffers) * 4096 * 1024 and plan.advice
    assert plan_gpu(30 * GIB, 80 * GIB, 1, 8, 2, GIB).reserve_bytes == 10 * GIB
    large = plan_gpu(6 * GIB, 8 * GIB, 48, 128, 8, record_bytes=GIB >> 10)
    assert (sum(large.counts), large.buffers) == (4080, 16), "two buffers of eight, and no more"
    assert sum(plan_gpu(6 * GIB, 8 * GIB, 48, 128, 8, GIB >> 10, streaming=False).counts) == 4096
