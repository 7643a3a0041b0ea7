"""MeshConfig: accepted and refused values, the precedence of their sources, and the memory that resident= may take."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import pickle
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import logging as transformers_logging

from torch_mesh import MeshConfig
from torch_mesh.config_fields import FIELDS, GROUPS, Field
from torch_mesh.system import memory
from torch_mesh.system.memory import auto_budget, auto_margin, available_bytes, resident_slots
from torch_mesh.validators import parse_size

GROUPED = [field for field in FIELDS.values() if field.group]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in FIELDS.values():
        monkeypatch.delenv(field.variable, raising=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"residnet": 0.5}, "no field 'residnet'. Did you mean 'resident'.*workspace"),
        ({"layers": 2}, "no field 'layers'"),
        ({"resident": 0.0}, r"resident=0.0 .*\(0, 1\]"),
        ({"resident": 1.5}, r"resident=1.5 .*\(0, 1\]"),
        ({"resident": -4}, "resident=-4 is not a size"),
        ({"resident": "8 gigs"}, "resident='8 gigs'.*GiB.*'auto'"),
        ({"resident": True}, "resident=True is not"),
        ({"resident": None}, "resident=None is not"),
        ({"weights": "fp6"}, "weights='fp6'.*'auto', 'bf16', 'bf12', 'int8', 'int4'"),
        ({"group_size": 48}, "group_size=48.*32, 64, 128"),
        ({"store": ""}, "store='' is not a folder"),
        ({"store": 7}, "store=7 is not a folder"),
        ({"io": "aio"}, "io='aio'.*'uring', 'threads', 'buffered'"),
        ({"io": "mmap"}, "io='mmap'.*io='buffered'"),
        ({"policy": "belady"}, "policy='belady'.*'lru', 'lfu', 'heat'"),
        ({"verify": "sometimes"}, "verify='sometimes'.*'first', 'always', 'never'"),
        ({"threads": 0}, "threads=0.*positive number or 'auto'"),
        ({"threads": 1.5}, "threads=1.5 is not"),
        ({"threads": 1025}, "threads=1025 is more than an engine supports: give 1 to 1024, or 'auto'"),
        ({"threads": "9" * 5000}, "more than an engine supports"),
        ({"workspace": "lots"}, "workspace='lots' is not a size"),
        ({"workspace": 0}, "workspace=0 is not a size"),
        ({"residency": {"timeout": 0}}, "residency.timeout=0 .*positive number of seconds"),
        ({"residency": {"timeout": "soon"}}, "residency.timeout='soon'"),
        ({"residency": {"timeout": float("inf")}}, "residency.timeout=inf"),
        (
            {"residency": {"timeout": 9.3e9}},
            "residency.timeout=9300000000.0 is not a time-out: give 0.001 to 1000000000 seconds",
        ),
        ({"residency": {"timeout": 1e-4}}, "residency.timeout=0.0001 is not a time-out: give 0.001"),
        ({"gpu": {"streaming": "x"}}, "gpu.streaming='x' is unknown: give 'auto', 'off'"),
        ({"gpu": {"expert": 3}}, "gpu has no field 'expert'. Did you mean 'experts'.*weights, streaming, placement"),
        ({"gpu": {"resident": 3}}, "gpu has no field 'resident'"),
        ({"gpu_expert": 3}, r'no field \'gpu_expert\'. Did you mean gpu=\{"experts": ...\}'),
        ({"stats": "a.jsonl"}, "stats='a.jsonl' does not map names to values: its fields are file, every"),
        ({"lossy": {1: 2}}, "does not map names to values"),
        ({"quotas": "on"}, "no field 'quotas'"),
    ],
)
def test_wrong_field_or_value_says_what_is_allowed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeshConfig(**fields)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1KiB", 1024),
        ("2 mib", 2 << 20),
        ("8GiB", 8 << 30),
        ("1TiB", 1 << 40),
        ("1.5 GB", 1500000000),
        ("1kb", 1000),
        ("3MB", 3000000),
        ("7", 7),
        ("7B", 7),
        (1 << 33, 1 << 33),
    ],
)
def test_sizes_are_parsed(text: str | int, size: int) -> None:
    assert parse_size(text, "workspace") == size


def test_argument_beats_environment_beats_checkpoint_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = {"quant_method": "mesh", "weights": "int4", "group_size": 32, "prefetch": "off", "policy": "lfu"}
    monkeypatch.setenv("TORCH_MESH_PREFETCH", "auto")
    monkeypatch.setenv("TORCH_MESH_POLICY", "lru")
    monkeypatch.setenv("TORCH_MESH_TIMEOUT", "5")

    stored = MeshConfig.of_checkpoint(checkpoint)
    assert (stored.weights, stored.group_size, stored.prefetch, stored.policy) == ("int4", 32, "auto", "lru")
    assert stored.residency.timeout == 5.0
    assert stored.resident == "auto"

    given = MeshConfig(policy="lfu")
    assert (given.policy, given.prefetch) == ("lfu", "auto")
    assert given.get_loading_attributes() == {"policy": "lfu", "prefetch": "auto", "residency": {"timeout": 5.0}}
    assert given.replace(io="uring").io == "uring"


# The fields that a checkpoint may set in its config.json. A new field belongs to the machine unless it is added here.
OF_CHECKPOINT = {
    "weights": "int4",
    "group_size": 32,
    "policy": "lru",
    "prefetch": "off",
    "early_experts": (1, 2),
    "prefill": "off",
}
# A value that differs from the default, for each field that belongs to this machine.
OF_THIS_MACHINE = {
    "resident": 0.5,
    "shared": "/tmp/a.socket",
    "dense": "int8",
    "attention": "mesh",
    "max_error": 0.5,
    "speculation": "lookup",
    "tables": ("ngram_embedding",),
    "store": "/somewhere",
    "io": "threads",
    "mirrors": ("/nvme1/model",),
    "profile": "/etc/passwd",
    "fill": "off",
    "guard": "off",
    "deferred_experts": 1,
    "routing_bias": 0.5,
    "fallback": "int4",
    "verify": "never",
    "threads": 1000,
    "workspace": "1TiB",
    "gpu_experts": 4,
    "gpu_weights": "int4",
    "gpu_streaming": "off",
    "gpu_placement": "dynamic",
    "timeout": 1e6,
    "stats_file": "/etc/passwd",
    "stats_every": 1,
}


def test_a_checkpoint_sets_its_own_fields_and_none_of_this_machine() -> None:
    assert set(FIELDS) == {*OF_CHECKPOINT, *OF_THIS_MACHINE}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = MeshConfig.of_checkpoint({"quant_method": "mesh", **OF_CHECKPOINT})
    assert config == MeshConfig.from_dict(OF_CHECKPOINT) != MeshConfig()
    assert config.to_dict() == {"quant_method": "mesh", **OF_CHECKPOINT}
    for name, value in OF_THIS_MACHINE.items():
        field = FIELDS[name]
        grouped = {field.group or name: {field.key: value} if field.group else value}
        for stored in ({name: value}, grouped):
            with pytest.warns(UserWarning, match=f"config.json sets {name}, which is ignored.* or {field.variable}"):
                assert MeshConfig.of_checkpoint({"quant_method": "mesh", **stored}) == MeshConfig()
    assert set(MeshConfig.from_dict(OF_THIS_MACHINE).to_dict()) == {"quant_method", *OF_CHECKPOINT}
    with pytest.warns(UserWarning, match=r"config.json sets 'polcy', which this release does not know .* upgrade"):
        config = MeshConfig.of_checkpoint({"quant_method": "mesh", "polcy": "lru", "weights": "int4"})
    assert config == MeshConfig.of_checkpoint({"weights": "int4"})
    later = {"policy": "lru", "residency": {"new\n": 1, "early_experts": [1, 4]}}
    with pytest.warns(UserWarning, match=r"config.json sets residency\['new\\n'\], which this release does not know"):
        assert MeshConfig.of_checkpoint(later) == MeshConfig(policy="lru", residency={"early_experts": (1, 4)})


def test_a_checkpoint_with_the_fields_of_earlier_builds_opens() -> None:
    stored = {"quant_method": "mesh", "policy": "lru", "early_layers": 0, "early_experts": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MeshConfig.of_checkpoint(stored | {"quotas": "off"}) == MeshConfig(policy="lru")
        kept = MeshConfig.of_checkpoint(stored | {"early_layers": 1, "early_experts": 4})
    assert kept == MeshConfig(policy="lru", residency={"early_experts": (1, 4)})
    for name, value in {"quotas": "on", "pins": 0.5, "predictor": "/etc/passwd"}.items():
        with pytest.warns(UserWarning, match=f"config.json sets {name}, which was removed and is ignored"):
            assert MeshConfig.of_checkpoint(stored | {name: value}) == MeshConfig(policy="lru")
    with pytest.warns(UserWarning, match="config.json sets policy='slru', which was removed and is ignored"):
        assert MeshConfig.of_checkpoint(stored | {"policy": "slru"}) == MeshConfig()


@pytest.mark.parametrize(
    ("fields", "replacement"),
    [
        ({"predictor": "p.safetensors"}, 'prefetch="FILE"'),
        ({"residency": {"pins": 0.5}}, "profile="),
        ({"residency": {"early_layers": 1}}, "early_experts"),
        ({"quotas": "on"}, "policy="),
    ],
)
def test_a_removed_field_names_its_replacement(
    fields: dict[str, Any], replacement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for take in (MeshConfig, MeshConfig().replace):
        with pytest.raises(ValueError, match=f"any more: .*{replacement}"):
            take(**fields)
    [(name, value)] = fields.items()
    if isinstance(value, dict):
        [(name, value)] = value.items()
    monkeypatch.setenv(f"TORCH_MESH_{name.upper()}", str(value))
    with pytest.raises(ValueError, match=f"TORCH_MESH_{name.upper()}.*removed: .*{replacement}"):
        MeshConfig()


@pytest.mark.parametrize("field", GROUPED, ids=lambda field: field.flat)
def test_a_field_of_a_group_is_taken_only_in_its_group(field: Field) -> None:
    value = OF_CHECKPOINT | OF_THIS_MACHINE
    for take in (MeshConfig, MeshConfig().replace):
        with pytest.raises(TypeError) as caught:
            take(**{field.flat: value[field.flat]})
        assert str(caught.value) == f"MeshConfig takes {field.flat} as {field.argument}."
    config = MeshConfig(**{field.group: {field.key: value[field.flat]}})
    assert getattr(getattr(config, field.group), field.key) == value[field.flat]
    assert config == MeshConfig.from_dict({field.flat: value[field.flat]}) != MeshConfig()


def test_a_group_changes_only_the_fields_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    first = MeshConfig(residency={"timeout": 5, "early_experts": (1, 4)}, gpu={"experts": 3})
    second = first.replace(residency={"timeout": 7}, resident=0.5)
    assert (second.residency.timeout, second.residency.early_experts, second.gpu.experts) == (7.0, (1, 4), 3)
    assert (first.residency.timeout, first.resident) == (5.0, "auto")
    assert MeshConfig(gpu=first.gpu, residency=first.residency) == first
    stored = MeshConfig.of_checkpoint({"quant_method": "mesh", "early_experts": [2, 8]})
    for name, value in first.get_loading_attributes().items():  # as from_pretrained does
        setattr(stored, name, value)
    assert stored == first
    with pytest.raises(AttributeError):
        first.gpu.experts = 4
    monkeypatch.setenv("TORCH_MESH_EARLY_EXPERTS", "1,6")
    assert MeshConfig.of_checkpoint({"quant_method": "mesh", "early_experts": "off"}).residency.early_experts == (1, 6)
    assert first.replace().residency.early_experts == (1, 4)


def test_a_dict_that_a_user_passes_sets_fields_of_this_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MESH_IO", "uring")
    config = AutoQuantizationConfig.from_dict({"quant_method": "mesh", "io": "threads", "resident": 0.5, "threads": 2})
    assert config == MeshConfig(io="threads", resident=0.5, threads=2)
    assert config.get_loading_attributes() == {"io": "threads", "resident": 0.5, "threads": 2}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("residnet", "MeshConfig has no field 'residnet'. Did you mean 'resident'?"),
        ("gpu_expert", 'Did you mean gpu={"experts": ...}?'),
        ("pins", "MeshConfig has no field 'pins' any more: profile="),
    ],
)
def test_a_misspelt_attribute_cannot_be_assigned(name: str, message: str) -> None:
    config = MeshConfig()
    with pytest.raises(AttributeError, match=re.escape(message)):
        setattr(config, name, 1)
    assert not hasattr(config, name)
    config.quant_method = "mesh"  # as transformers may


def test_assigned_fields_are_checked_and_given() -> None:
    first = MeshConfig(residency={"timeout": 5.0})
    config = copy.copy(first)
    config.resident = "0.25"
    config.residency = {"early_experts": "1,4"}
    given = {"resident": 0.25, "residency": {"timeout": 5.0, "early_experts": (1, 4)}}
    assert config.get_loading_attributes() == given and config == MeshConfig(**given)
    assert first.get_loading_attributes() == {"residency": {"timeout": 5.0}}
    with pytest.raises(ValueError, match="resident=1.5 is not a fraction"):
        config.resident = 1.5
    with pytest.raises(TypeError, match=r'takes gpu_experts as gpu=\{"experts": \.\.\.\}'):
        config.gpu_experts = 3
    assert config == MeshConfig(**given)


def test_environment_values_are_typed_and_errors_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"RESIDENT": "0.25", "GROUP_SIZE": "128", "THREADS": "3", "STORE": "~/mesh"}.items():
        monkeypatch.setenv(f"TORCH_MESH_{name}", text)
    config = MeshConfig()
    assert (config.resident, config.group_size, config.thread_count) == (0.25, 128, 3)
    assert config.store == str(Path.home() / "mesh")
    monkeypatch.setenv("TORCH_MESH_GPU_STREAMING", "1, 2, 3")
    assert MeshConfig().gpu.streaming == (1.0, 2.0, 3.0)
    for name in ("WEIGHTS", "GPU_STREAMING", "TIMEOUT"):
        with monkeypatch.context() as patched, pytest.raises(ValueError, match=f"^TORCH_MESH_{name}='int2'"):
            patched.setenv(f"TORCH_MESH_{name}", "int2")
            MeshConfig()


def test_a_config_survives_copies_json_and_pickle() -> None:
    config = MeshConfig(resident=0.25, store=Path("folder"), threads=2)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    config = config.replace(weights="int8", policy="lfu")
    stored = MeshConfig.of_checkpoint(json.loads(config.to_json_string(use_diff=False)))
    assert stored == MeshConfig(weights="int8", policy="lfu")
    config = MeshConfig(resident=0.25, threads="auto", gpu={"experts": 3, "streaming": "off"})
    assert repr(config) == "MeshConfig(resident=0.25, gpu={'experts': 3, 'streaming': 'off'})"
    assert MeshConfig.from_dict(config.to_dict()) == MeshConfig()  # to_dict leaves out the fields of this machine


def test_its_signature_and_help_name_every_field() -> None:
    parameters = inspect.signature(MeshConfig).parameters
    assert list(parameters) == list(dict.fromkeys(field.group or field.flat for field in FIELDS.values()))
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert all(field.default == parameters[field.key].default for field in FIELDS.values() if not field.group)
    text = " ".join(str(MeshConfig.__doc__).split())
    assert all(f" {field.name}: {field.values.words}".replace("`", "``") in text for field in FIELDS.values())
    assert {*GROUPS} == {"gpu", "lossy", "residency", "stats"}


def test_the_reference_page_is_up_to_date() -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "config_page.py"))
    assert tool["PAGE"].read_text() == tool["page"](), "run tools/config_page.py"
    assert all("|" not in field.sentence + field.values.words for field in FIELDS.values())


def test_a_fraction_of_experts_is_rounded_down_as_a_decimal() -> None:
    def slots(resident: Any, **changes: int) -> int:
        sizes = {"layers": 10, "experts": 10, "top_k": 4, "record_bytes": 4096} | changes
        return resident_slots(resident, **sizes)

    assert slots(0.29) == 29  # 0.29 * 100 is 28.999999999999996
    assert slots(0.299) == 29
    assert slots(1.0) == 100
    assert slots(0.001) == 4
    assert slots("40KiB") == 10
    assert slots("1GiB") == 100
    with pytest.raises(
        ValueError, match="holds 3 experts of 4,096 bytes, but every token needs 4: give at least 16,384"
    ):
        slots(3 * 4096)


@pytest.mark.parametrize(
    ("resident", "message"),
    [
        (1e12, "Bytes are given as a whole number: 1000000000000"),
        (1.5, r"must be in \(0, 1\]\.$"),
        (float("inf"), r"must be in \(0, 1\]\.$"),
        (float("nan"), r"must be in \(0, 1\]\.$"),
        ("50%", "in percent: give a fraction of all experts in .0, 1., 0.5"),
        (" 12.5 %", "0.125"),
        ("250%", r"in \(0, 1\], 1\.$"),
    ],
)
def test_a_wrong_resident_fraction_suggests_the_right_one(resident: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeshConfig(resident=resident)


@pytest.mark.parametrize("resident", [2, "8", 1])
def test_a_number_without_a_unit_is_bytes(resident: Any) -> None:
    sizes = {"layers": 10, "experts": 10, "top_k": 4, "record_bytes": 4096}
    if resident == 1:  # 1 without a unit means all experts
        assert resident_slots(MeshConfig(resident=resident).resident, **sizes) == 100
        return
    with pytest.raises(ValueError, match="at least 16,384 bytes. A number without a unit is of bytes"):
        resident_slots(MeshConfig(resident=resident).resident, **sizes)


@pytest.mark.parametrize("resident", ["2GiB", 0.5])
def test_a_resident_size_beyond_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch, resident: str | float) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 30)
    with pytest.raises(MemoryError, match=r"1,073,741,824 left.*'auto'"):
        resident_slots(resident, layers=10, experts=100, top_k=8, record_bytes=4 << 20)


def test_auto_leaves_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 << 30)
    slots = resident_slots("auto", layers=100, experts=100, top_k=8, record_bytes=1 << 20, reserved=1 << 28)
    assert slots == (4096 - 256) - 512
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 30)
    slots = resident_slots("auto", layers=100, experts=100, top_k=8, record_bytes=1 << 20, reserved=1 << 28)
    assert slots == (1024 - 256) * 3 // 4  # of little memory the margin is a quarter
    assert resident_slots("auto", layers=100, experts=100, top_k=8, record_bytes=1 << 30) == 8


@pytest.mark.parametrize("reserved", [0, 256 << 20])
def test_the_margin_scales_with_free_memory(reserved: int) -> None:
    free = [size << 20 for size in (0, 1, 100, 1000, 2047, 2048, 2049, 4095, 4096, 4097, 1 << 20)]
    margins = [auto_margin(size) for size in free]
    assert margins == sorted(margins) and margins[0] == 0
    assert all(size // 8 <= margin <= size // 4 for size, margin in zip(free, margins, strict=True))
    assert {auto_margin(size << 20) for size in (2048, 3000, 4096)} == {512 << 20}
    budgets = [auto_budget(size + reserved, reserved) for size in free]
    assert budgets == sorted(budgets) and budgets == [size - auto_margin(size) for size in free]
    assert auto_budget(0, 1) < 0


def test_auto_leaves_room_for_weights_that_are_freed_later() -> None:
    def slots(freed: int) -> int:
        sizes = {"layers": 100, "experts": 100, "top_k": 8, "record_bytes": 1 << 20, "reserved": 1 << 28}
        return resident_slots("auto", **sizes, available=8 << 30, freed=freed)

    fits = (8 << 10) - 256 - 512  # the margin is smallest before the rest is freed
    assert slots(0) < slots(1 << 28) <= fits
    assert slots(1 << 32) == slots(1 << 40) == fits


def _machine(
    root: Path, version: int, limits: dict[str, int], mounted_root: str = "/", mount_name: str = "cgroup"
) -> Path:
    """A simulated /proc and cgroup hierarchy with this process in /a/b."""
    proc, mount = root / "proc", root / mount_name
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    (proc / "self/cgroup").write_text("5:cpu:/a/b\n" + ("0::/a/b\n" if version == 2 else "4:memory:/a/b\n"))
    kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
    escaped = str(mount).replace("\\", "\\134").replace(" ", "\\040").replace("\n", "\\012")
    (proc / "self/mountinfo").write_text(
        f"20 1 0:20 / / rw - ext4 /dev/root rw\n"
        f"30 20 0:30 {mounted_root} {escaped} rw,nosuid - {kind} {kind} {options}\n",
        errors="surrogateescape",
    )
    limit, usage, stat = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    for folder, value in limits.items():
        path = mount / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / limit).write_text(f"{value}\n" if value else "max\n")
        (path / usage).write_text(f"{2 << 30}\n")
        (path / "memory.stat").write_text(f"anon 5\n{stat} {1 << 30}\n")
    return proc


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limits", "gib"),
    [
        ({".": 0, "a": 0, "a/b": 0}, 8),
        ({"a/b": 5 << 30}, 4),
        ({"a": 3 << 30, "a/b": 5 << 30}, 2),
        ({"a/b": 1 << 30}, 0),
    ],
)
def test_free_memory_counts_the_limits_of_all_cgroups_above(
    tmp_path: Path, version: int, limits: dict[str, int], gib: int
) -> None:
    assert available_bytes(_machine(tmp_path, version, limits)) == gib << 30


@pytest.mark.parametrize("name", ["a b", "a\\040b", "a\nb", "a\u2028b", "caf\udce9"])
def test_a_mount_point_may_have_any_name(tmp_path: Path, name: str) -> None:
    assert available_bytes(_machine(tmp_path, 2, {"a/b": 3 << 30}, mount_name=name)) == 2 << 30


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_in_a_container_that_sees_its_cgroup_as_the_root(tmp_path: Path, version: int) -> None:
    assert available_bytes(_machine(tmp_path, version, {".": 3 << 30}, mounted_root="/a/b")) == 2 << 30


def test_free_memory_of_this_machine() -> None:
    assert 0 < available_bytes() < 1 << 50


def _limit(root: Path, file: str, value: str) -> None:
    (root / "cgroup/a/b" / file).write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("version", "file"),
    [(2, "memory.high"), (1, "memory.soft_limit_in_bytes")],
)
def test_free_memory_respects_the_soft_limit_of_a_cgroup(tmp_path: Path, version: int, file: str) -> None:
    proc = _machine(tmp_path, version, {"a/b": 7 << 30})
    assert available_bytes(proc) == 6 << 30
    _limit(tmp_path, file, str(4 << 30))
    assert available_bytes(proc) == 3 << 30  # 2 GiB are used, and 1 GiB of these is page cache
    _limit(tmp_path, file, "max" if version == 2 else "9223372036854771712")
    assert available_bytes(proc) == 6 << 30
    _limit(tmp_path, file, str(1 << 30))
    assert available_bytes(proc) == 0


def test_auto_follows_the_given_available_bytes() -> None:
    sizes = {"layers": 10, "experts": 10, "top_k": 4, "record_bytes": 1 << 20}
    assert resident_slots("auto", **sizes, available=(64 + 28) << 20, reserved=64 << 20) == 21
    with pytest.raises(MemoryError, match="4,194,304 left"):
        resident_slots(0.5, **sizes, available=4 << 20)


def test_pools_of_several_ranks_on_a_machine_fit_together() -> None:
    sizes = {"layers": 10, "experts": 10, "top_k": 4, "record_bytes": 1 << 20, "sharing": 2}
    available = (2 * 64 + 2 * 28) << 20
    assert resident_slots("auto", **sizes, available=available, reserved=64 << 20) == 21
    assert resident_slots(0.5, **sizes, available=100 << 20) == 50
    for resident in (0.5, "50MiB"):
        with pytest.raises(MemoryError, match="50 experts for each of the 2 ranks on this machine.*103,809,024 left"):
            resident_slots(resident, **sizes, available=99 << 20)


def test_an_unknown_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MESH_TEST_SEED", "1")
    monkeypatch.setenv("TORCH_MESH_ISA", "avx2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MeshConfig()
    monkeypatch.setenv("TORCH_MESH_RESIDENTS", "8GiB")
    with pytest.warns(UserWarning, match="TORCH_MESH_RESIDENTS .* has no effect. Did you mean TORCH_MESH_RESIDENT?"):
        assert MeshConfig().resident == "auto"


def test_the_log_level_follows_the_verbosity_of_transformers() -> None:
    logger = logging.getLogger("torch_mesh.pool.expert_pool")
    before = transformers_logging.get_verbosity()
    try:
        for level in (logging.INFO, logging.ERROR):
            transformers_logging.set_verbosity(level)
            assert logger.getEffectiveLevel() == level
    finally:
        transformers_logging.set_verbosity(before)


@pytest.mark.parametrize("given", ["1,8", "(1, 8)", " (1, 8) "])
def test_early_experts_may_be_text(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MESH_EARLY_EXPERTS", given)
    assert MeshConfig().residency.early_experts == (1, 8)


@pytest.mark.parametrize("given", ["((1, 8)", "(1, 8", "1, 8)", "(1)", ""])
def test_early_experts_of_another_form_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match="early_experts"):
        MeshConfig(residency={"early_experts": given})
