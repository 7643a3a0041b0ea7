"""The options of a patched model. Each field is written once, in one of the classes below."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import os
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

from transformers.utils.quantization_config import QuantizationConfigMixin

from . import validators
from .formats import (
    DEFAULT_GROUP_SIZE,
    DENSE_FORMATS,
    FORMATS,
    GPU_FORMATS,
    GROUP_SIZES,
    PASSTHROUGH_FORMATS,
    ROUNDED_FORMATS,
    in_words,
)
from .validators import Values, count, one_of, parse_size, path, reader, shown

# The lowest compute capability of a GPU with experts: tl.dot needs it for bf16.
MIN_CAPABILITY = (8, 0)

# Variables that are not fields: the extension reads one when it is loaded, setup.py the other.
_OTHER_VARIABLES = ("TORCH_MESH_ISA", "TORCH_MESH_BUILD_URING")
_OF_TESTS = "TORCH_MESH_TEST_"

# Fields that suit a machine, whatever the model.
_OF_MACHINE = ("resident", "io", "threads", "workspace", "guard", "fill", "timeout")

# Fields of earlier releases, by flat name, and what to give instead.
REMOVED = {
    "predictor": 'name its file with prefetch="FILE"',
    "pins": (
        "profile= reads a profile's most used experts first; residency.early_experts keeps those of the first layers"
    ),
    "early_layers": 'residency={"early_experts": (layers, experts)} has both numbers',
    "quotas": 'policy="heat" compares the experts of all layers, and has more hits than any policy with quotas',
}

FieldsT = TypeVar("FieldsT")


@dataclass(frozen=True)
class Field:
    """A field, in each of its forms."""

    flat: str  # its name in a config.json, on the command line and, in capitals, in the environment: "gpu_experts"
    group: str | None  # "gpu"
    key: str  # "experts": its name in the group, or in MeshConfig
    default: Any
    values: Values
    sentence: str
    # Whether a checkpoint's config.json may set it: False, True, or the allowed values.
    of_checkpoint: bool | tuple[Any, ...]

    def is_of_checkpoint(self, value: Any) -> bool:
        return value in self.of_checkpoint if isinstance(self.of_checkpoint, tuple) else self.of_checkpoint

    @property
    def name(self) -> str:
        """Its name as an attribute and in errors: "gpu.experts"."""
        return self.key if self.group is None else f"{self.group}.{self.key}"

    @property
    def argument(self) -> str:
        """Its form as an argument: 'gpu={"experts": ...}'."""
        return f"{self.key}=..." if self.group is None else f'{self.group}={{"{self.key}": ...}}'

    @property
    def variable(self) -> str:
        return f"TORCH_MESH_{self.flat.upper()}"


def _field(default: Any, values: Values, sentence: str, *, of_checkpoint: bool | tuple[Any, ...] = False) -> Any:
    metadata = {"values": values, "sentence": sentence, "of_checkpoint": of_checkpoint}
    return dataclasses.field(default=default, metadata=metadata)


class Group(Generic[FieldsT]):
    """Fields of MeshConfig that are given together, as a mapping or as the group of another config. Setting it changes
    the named fields only."""

    def __init__(self, kind: type[FieldsT], prefix: str = "") -> None:
        self.kind, self.prefix, self.default = kind, prefix, kind()

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, config: MeshConfig | None, owner: type) -> FieldsT:
        return self.default if config is None else vars(config).get(self.name, self.default)

    def __set__(self, config: MeshConfig, value: FieldsT | Mapping[str, Any]) -> None:
        config._give({self.name: value})


@dataclass(frozen=True, kw_only=True)
class GpuFields:
    """Experts on the GPU of their layer. Experimental: the kernels have run on two cards. docs/gpu.md."""

    experts: str | int | tuple[tuple[bool, ...], ...] = _field(
        0,
        validators.placed_experts,
        "Which experts the GPU of their layer computes, placed when the model is patched. A number takes the "
        "most used of each layer by `profile`, else the first. `torch_mesh.hottest_experts` makes a mask. "
        '`"auto"` takes as many as fit on the card beside a reserve. They are not kept in memory as well.',
    )
    weights: str = _field(
        "auto",
        one_of("auto", *GPU_FORMATS),
        'Format of the experts on the GPU. `"auto"`: as in memory. Their records come from a store in '
        "`store`'s folder with the format behind its name, or from a bf16 checkpoint itself. For a converted "
        "checkpoint only formats of fewer bits are available.",
    )
    streaming: str | tuple[float, float, float] = _field(
        "auto",
        validators.streaming,
        'Which of the other experts a prompt copies to the GPU. `"auto"` decides by times measured when '
        "experts were placed. Three numbers replace these times: a copy of an expert, the CPU's time per row, "
        "and per expert. The output depends on it within rounding.",
    )
    placement: str = _field(
        "static",
        one_of("static", "dynamic"),
        'Whether experts stay where they were placed. With `"dynamic"` the most used move to the GPU while '
        "the model runs, and the last bits of the output depend on when they arrive. "
        "`torch_mesh.place_experts` then moves them by hand.",
    )


@dataclass(frozen=True, kw_only=True)
class LossyFields:
    """Modes of decode steps that trade exactness for fewer waits. Experimental: what they cost large models is not
    measured. docs/lossy.md."""

    deferred_experts: int = _field(
        0,
        count("experts per token", give="0 (exact) or a positive number"),
        "In decode steps up to this many of a token's experts, those not in memory with the smallest weights, are not "
        "waited for: their outputs are added one MoE layer later. 0 is exact. Not for models with "
        "[unfused](models.md#what-is-peculiar-about-some) experts.",
    )
    routing_bias: float = _field(
        0.0,
        validators.bias,
        "In decode steps a resident expert replaces a cold one whose score is higher by less than this "
        "fraction of the spread of the token's scores. The first quarter of a token's choices, and at least one, is "
        "never replaced. 0 is exact; 1 replaces wherever else possible. For the model types in "
        "`torch_mesh.lossy.ROUTING_BIAS_FAMILIES`.",
    )
    fallback: str = _field(
        "none",
        one_of("none", *(name for name in ROUNDED_FORMATS if not FORMATS[name].holds_bf16)),
        "Format, with fewer bits, of the records that decode steps use for cold experts. They take three quarters of "
        '`resident`. `"none"` is exact. Not for models with [unfused](models.md#what-is-peculiar-about-some) experts, '
        "nor with `lossy.deferred_experts` or `gpu.experts`.",
    )

    @property
    def modes(self) -> str:
        """The enabled modes in words; empty: exact."""
        each = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        return ", ".join(f"{name}={value}" for name, value, default in each if value != default)


@dataclass(frozen=True, kw_only=True)
class ResidencyFields:
    """What stays resident, and when the pool shrinks."""

    early_experts: str | tuple[int, int] = _field(
        "off",
        validators.early_experts,
        "How many experts stay resident in the first MoE layers, which no router predicts: `(1, 32)` keeps the 32 most "
        "recently used experts of one layer. They take at most half of the pool.",
        of_checkpoint=True,
    )
    guard: str = _field(
        "auto",
        one_of("auto", "on", "off"),
        "Whether the pool shrinks when the machine or a memory cgroup runs short of memory, and grows back "
        'afterwards, at most to its original size. `"auto"`: on for `resident="auto"`. Several models in a '
        "process, or several single layers, shrink and grow by the same fraction.",
    )
    fill: str = _field(
        "on",
        one_of("on", "off"),
        "Whether experts are read into empty slots while the disk is idle, the profile's first. A model that fits then "
        "decodes at full speed seconds after it was opened. Reads that a forward waits for go first.",
    )
    timeout: float = _field(30.0, validators.seconds, "Seconds that a read or a wait for a slot may take.")

    @property
    def early(self) -> tuple[int, int]:
        """``early_experts`` as the engine takes it: layers, and experts of each; zeros are off."""
        return (0, 0) if isinstance(self.early_experts, str) else self.early_experts


@dataclass(frozen=True, kw_only=True)
class StatsFields:
    """Statistics written while the model runs."""

    file: str | None = _field(
        None,
        path("file"),
        "File to which statistics are appended, one line of JSON at a time. A line is "
        "`Stats.to_dict(experts=False)` with `time`, `forward`, `run` (a name for the lines of one pool), the "
        "resident experts, the memory by owner, and the model, format, policy and machine. `torch-mesh "
        "report` summarises them. Each model needs its own file, and a [rank](scaleout.md) writes "
        "`NAME.rank0.jsonl` for `NAME.jsonl`. A failed write warns once and has no other effect.",
    )
    every: int = _field(
        100,
        count("forwards", 1, "a positive number"),
        "Number of forwards of the model between two lines of statistics.",
    )


@dataclass(kw_only=True, repr=False)
class MeshConfig(QuantizationConfigMixin):
    """How a model's experts are stored, kept resident and read. Also a ``quantization_config=`` of ``from_pretrained``.

    Fields of a group are given as a mapping, ``gpu={"experts": 8}``, and read as ``config.gpu.experts``. A field that
    is not given comes from the environment (``TORCH_MESH_RESIDENT``, ``TORCH_MESH_GPU_EXPERTS`` ...), then from what a
    checkpoint's own config says, then from its default. docs/config.md says which ones a checkpoint may set, and which
    are for measuring.
    """

    quant_method: Any = dataclasses.field(default="mesh", init=False)

    resident: str | float = _field(
        "auto",
        validators.resident,
        'How much of the experts stays in memory. `"auto"`: the free memory, within cgroup limits, minus a margin. '
        "Margin: 1/8 of free memory, but at least 512 MiB; below 2 GiB free, a quarter. A number without a unit is of "
        'bytes (`"7"` is seven), except that 1 means all experts. With [ranks](scaleout.md) it applies to each rank: '
        "a fraction is of its own experts, and ranks on one machine divide its free memory.",
    )
    shared: str | None = _field(
        None,
        path("socket"),
        "Socket of a [`torch-mesh share`](scaleout.md#one-pool-for-several-processes) of the same converted "
        "folder. Several processes then borrow experts from one pool. Set `resident` there.",
    )
    weights: str = _field(
        "auto",
        validators.weights("auto", *ROUNDED_FORMATS, *PASSTHROUGH_FORMATS),
        '[Format](formats.md) of the experts\' weights. `"auto"`: that of the checkpoint or store, or [the '
        "nearest](checkpoints.md), and bf12 for what is converted of bf16 into `store`; with `max_error`, the fastest. "
        f"{PASSTHROUGH_FORMATS[0]} and all after it hold "
        "the codes of a [quantised checkpoint](checkpoints.md) unchanged; nothing is rounded to them.",
        of_checkpoint=True,
    )
    max_error: float | None = _field(
        None,
        validators.max_error,
        'Largest error of weights, relative to their root mean square, with which `weights="auto"` chooses '
        "[the fastest format](formats.md) for experts in `resident` bytes. For `from_pretrained` of a checkpoint; 0.1 "
        "admits four bits.",
    )
    dense: str = _field(
        "auto",
        one_of("auto", "none", "codes", *DENSE_FORMATS),
        "How the CPU computes the linear layers outside the experts (attention, shared experts, the head). "
        '`"auto"`: bf16 weights stay as they are, and torch_mesh\'s kernel multiplies with them, in inference '
        "only: up to 4 rows, or any number on CPUs without native bf16. Sums are in another order than "
        "torch's. `\"none\"`: always torch's own products. A format: the layers are packed to it when the model "
        'is patched or loaded, and frozen. `"codes"`: the layers keep the codes of a [GGUF file](checkpoints.md#gguf), '
        'or of a store made of one, frozen; those in types without a kernel are as with `"auto"`.',
    )
    attention: str = _field(
        "auto",
        one_of("auto", "model", "mesh"),
        'For measuring: what computes the attention of decode steps on the CPU. `"mesh"`: torch_mesh\'s kernel (fp32 '
        'sums; for models that use torch\'s `scaled_dot_product_attention`). `"model"`: the model. `"auto"`: '
        "torch_mesh where it also computes the linear layers outside the experts (`dense`) or `speculation` is on, "
        'unless your own function is registered as `sdpa`. With `dense="none"` every bit outside the experts is the '
        "model's own.",
    )
    group_size: int = _field(
        DEFAULT_GROUP_SIZE,
        one_of(*GROUP_SIZES),
        "How many weights share a scale along the input. Use 128 for "
        f"{in_words([name for name, each in FORMATS.items() if each.trellis])}. Ignored for [formats](formats.md) "
        'with one size, and for codes that a quantised checkpoint keeps: with `weights="auto"`, or with the format of '
        "its codes and no `group_size`.",
        of_checkpoint=True,
    )
    tables: str | int | tuple[str, ...] = _field(
        "auto",
        validators.tables,
        'Which [embedding tables](tables.md) stay in their files. `"auto"`: those of 2^27 values or more that are '
        "not tied to the head; the input embedding only where memory is short. A size: the same tables, and so much "
        "memory for rows. "
        'Names: the embeddings that end in them. `"off"`: none. For `from_pretrained` of safetensors files.',
    )
    store: str | None = _field(
        None,
        path("folder"),
        "Folder of the packed experts. None: raw bf16 is read from the checkpoint's own files, other formats are "
        "converted once into the cache folder. For `patch` a new folder.",
    )
    io: str = _field(
        "auto",
        reader("auto", "uring", "threads", "buffered"),
        'How experts are read into the pool. `"auto"`: directly from the disk, by io_uring if it works here, '
        'else by threads. `"buffered"`: as `"auto"`, but through the page cache instead of direct I/O. '
        "The cache keeps evicted experts in memory that is free ([when](decisions/0068-buffered-reads.md)).",
    )
    policy: str = _field(
        "auto",
        one_of("auto", "lru", "lfu", "slru", "2q", "sieve", "s3fifo", "wtinylfu", "heat"),
        'For measuring: which expert is evicted for another. `"auto"` is heat. Shared pools use lru.',
        of_checkpoint=True,
    )
    prefetch: str = _field(
        "auto",
        validators.prefetch,
        'What predicts, while one layer computes, which experts to read for the next. `"auto"`: the next layer\'s '
        "router. A file of [`torch-mesh routing fit`](predictor.md) for this model: its matrices, also for the first "
        "layer.",
        of_checkpoint=("auto", "off"),
    )
    prefill: str = _field(
        "auto",
        one_of("auto", "window", "off"),
        'For measuring: how prompts of more than 16 tokens read experts. `"auto"`: a layer that needs nearly all of '
        'its experts streams them through a window of the pool, and reads the next layer\'s ahead. `"window"`: each '
        'layer does. `"off"`: experts are read when their layer runs. Models with '
        "[unfused](models.md#what-is-peculiar-about-some) experts have no window.",
        of_checkpoint=True,
    )
    speculation: str = _field(
        "off",
        one_of("off", "lookup"),
        "Whether `generate` verifies several drafted tokens in one forward ([speculation](speculation.md)). "
        '`"lookup"` drafts what followed the same ending earlier in the text, where measurements show that it '
        "pays; for greedy search and sampling of up to four texts at a time.",
    )
    profile: str | None = _field(
        None,
        path("file"),
        "File of `torch_mesh.save_profile` ([profiles](profiles.md)): the model's most used experts are read "
        "in the background as soon as the pool is open. heat and lfu start from its counts.",
    )
    verify: str = _field(
        "first",
        one_of("first", "always", "never"),
        'When checksums are compared: on an expert\'s first read, always or never. Except with `"never"` a '
        "store's config and other tensors are checked when it is opened.",
    )
    threads: str | int = _field(
        "auto",
        validators.threads,
        'For measuring: how many threads compute. `"auto"`: as many as torch\'s intra-op threads.',
    )
    workspace: str | int = _field(
        "256MiB",
        validators.size,
        "Memory for the activations of a forward. Prompts that need more are computed in chunks.",
    )

    gpu: Group[GpuFields] = Group(GpuFields, "gpu_")
    lossy: Group[LossyFields] = Group(LossyFields)
    residency: Group[ResidencyFields] = Group(ResidencyFields)
    stats: Group[StatsFields] = Group(StatsFields, "stats_")

    @property
    def predictor(self) -> str | None:
        """The file of a fitted predictor, if ``prefetch`` names one."""
        return None if self.prefetch in ("auto", "off") else self.prefetch

    @property
    def given_group_size(self) -> int | None:
        """``group_size``; None if it is the default."""
        return self.group_size if "group_size" in self._given else None

    @property
    def workspace_bytes(self) -> int:
        return parse_size(self.workspace, "workspace")

    @property
    def chooses_tables(self) -> bool:
        """Whether the sizes of embedding tables decide which stay in files, and not names or ``"off"``."""
        return self.tables != "off" and not isinstance(self.tables, tuple)

    @property
    def table_cache_bytes(self) -> int | None:
        """Bytes for rows of embedding tables; None: by the tables' sizes."""
        if isinstance(self.tables, tuple) or self.tables in ("auto", "off"):
            return None
        return parse_size(self.tables, "tables")

    @property
    def thread_count(self) -> int:
        """``threads`` as the engine takes it: 0 is torch's intra-op threads."""
        return 0 if isinstance(self.threads, str) else self.threads

    def replace(self, **fields: Any) -> MeshConfig:
        """A copy with other ``fields``; of a group, the named ones."""
        changed = copy.copy(self)
        changed._give(fields)
        return changed

    def to_dict(self) -> dict[str, Any]:
        """The entry of a checkpoint's config.json."""
        values = {field: self._value(field) for field in FIELDS.values()}
        kept = {field.flat: value for field, value in values.items() if field.is_of_checkpoint(value)}
        return {"quant_method": self.quant_method} | kept

    def get(self, name: str, default: Any = None) -> Any:
        """An entry of ``to_dict``: transformers reads a config as a dict, also that of a loaded model."""
        return self.to_dict().get(name, default)

    def __iter__(self) -> Any:
        return iter(self.to_dict().items())

    def __repr__(self) -> str:
        """Fields with other values than the default."""
        changed = self._arguments(name for name, field in FIELDS.items() if self._value(field) != field.default)
        return f"MeshConfig({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The config from a dict that was passed to from_pretrained, all of whose fields count as given; also from a
        dict of ``to_dict``."""
        given = {name: value for name, value in config_dict.items() if name != "quant_method"}
        given |= {name: kwargs.pop(name) for name in list(kwargs) if name in {*FIELDS, *GROUPS}}
        config = cls()
        config._resolve(_flat(given, stored=True))
        return (config, kwargs) if return_unused_kwargs else config

    @classmethod
    def of_checkpoint(cls, stored: Mapping[str, Any]) -> MeshConfig:
        """The config from a checkpoint's config.json, which the environment overrides. Warns about fields that a
        checkpoint may not set."""
        own = {name: value for name, value in stored.items() if name != "quant_method"}
        layers = own.pop("early_layers", None)
        if layers is not None:  # an earlier release wrote two numbers
            experts = own.get("early_experts", 0)
            own["early_experts"] = (layers, experts) if layers and experts else "off"
        for name, replacement in REMOVED.items():
            if own.pop(name, None) not in ("off", None, 0):
                warnings.warn(
                    f"The checkpoint's config.json sets {name}, which was removed and is ignored: {replacement}.",
                    stacklevel=2,
                )
        flat = _flat(own, stored=True)
        refused = [FIELDS[name] for name, value in flat.items() if not FIELDS[name].is_of_checkpoint(value)]
        if refused:
            warnings.warn(
                f"The checkpoint's config.json sets {', '.join(field.flat for field in refused)}, which is ignored: "
                f"only you choose that, with MeshConfig({refused[0].argument}) or {refused[0].variable}.",
                stacklevel=2,
            )
        config = cls()
        config._resolve({}, {name: value for name, value in flat.items() if FIELDS[name].is_of_checkpoint(value)})
        return config

    def get_loading_attributes(self) -> dict[str, Any]:
        """The given fields, with which from_pretrained overrides the checkpoint's."""
        return self._arguments(self._given)

    def _resolve(self, given: Mapping[str, Any], checkpoint: Mapping[str, Any] | None = None) -> None:
        self._given = _environment() | _checked(given)
        self._put(_checked(checkpoint or {}) | self._given)

    def _give(self, fields: Mapping[str, Any]) -> None:
        given = _checked(_flat(fields))
        self._given = self._given | given  # a new mapping, since copies share the old one
        self._put(given)

    def _put(self, flat: Mapping[str, Any]) -> None:
        for name, value in flat.items():
            field = FIELDS[name]
            if field.group is None:
                vars(self)[field.key] = value
            else:
                vars(self)[field.group] = dataclasses.replace(getattr(self, field.group), **{field.key: value})

    def _value(self, field: Field) -> Any:
        return attrgetter(field.name)(self)

    def _arguments(self, names: Iterable[str]) -> dict[str, Any]:
        """The values of some fields, as arguments of MeshConfig."""
        arguments: dict[str, Any] = {}
        for field in map(FIELDS.__getitem__, names):
            group = arguments if field.group is None else arguments.setdefault(field.group, {})
            group[field.key] = self._value(field)
        return arguments


def with_fields(config: MeshConfig | None, fields: Mapping[str, Any]) -> MeshConfig:
    """``config``, or the default one, with ``fields`` replaced. TypeError for another type."""
    if config is not None and not isinstance(config, MeshConfig):
        raise TypeError(
            f"config={config!r:.80} is not a MeshConfig: give torch_mesh.MeshConfig(...), or fields by name, such as "
            "resident=0.5."
        )
    return (config or MeshConfig()).replace(**fields)


def fixed_config(**fields: Any) -> MeshConfig:
    """A config for a model that torch_mesh opens for itself: ``fields``, of the environment what suits this machine,
    and defaults. A checkpoint's own fields do not apply."""
    config = MeshConfig()
    known = {name: config._value(field) if name in _OF_MACHINE else field.default for name, field in FIELDS.items()}
    config._resolve(known | _flat(fields))
    return config


def _fields(cls: type, group: str | None = None, prefix: str = "") -> Iterator[Field]:
    for each in dataclasses.fields(cls):
        kind = vars(cls).get(each.name)
        if isinstance(kind, Group):
            yield from _fields(kind.kind, each.name, kind.prefix)
        elif each.metadata:
            yield Field(prefix + each.name, group, each.name, each.default, **each.metadata)


FIELDS = {field.flat: field for field in _fields(MeshConfig)}
GROUPS = {name: group for name, group in vars(MeshConfig).items() if isinstance(group, Group)}


def _flat(given: Mapping[str, Any], group: str | None = None, *, stored: bool = False) -> dict[str, Any]:
    """The given fields, of all or of a ``group``, by flat names. Only ``stored`` mappings may have flat names."""
    known = {field.key: field.flat for field in FIELDS.values() if field.group == group}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{group}={given!r} does not map names to values: its fields are {', '.join(known)}.")
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if group is None and name in GROUPS:
            flat |= _flat(vars(value) if isinstance(value, GROUPS[name].kind) else value, name)
        elif name in known or (stored and name in FIELDS):
            flat[known.get(name, name)] = value
        else:
            raise _unknown(name, group, [*known, *([] if group else GROUPS)])
    return flat


def _unknown(name: str, group: str | None, known: list[str]) -> Exception:
    if name in REMOVED:
        return ValueError(f"{group or 'MeshConfig'} has no field {name!r} any more: {REMOVED[name]}.")
    in_groups = {} if group else {flat: field.argument for flat, field in FIELDS.items() if field.group}
    if name in in_groups:
        return TypeError(f"MeshConfig takes {name} as {in_groups[name]}.")
    close = difflib.get_close_matches(name, [*known, *in_groups], n=1)
    hint = f" Did you mean {in_groups.get(close[0], repr(close[0]))}?" if close else ""
    return ValueError(f"{group or 'MeshConfig'} has no field {name!r}.{hint} Its fields are {', '.join(known)}.")


def _checked(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {name: FIELDS[name].values.check(FIELDS[name].name, value) for name, value in flat.items()}


def _environment() -> dict[str, Any]:
    _check_variables()
    given = ((field, os.environ.get(field.variable)) for field in FIELDS.values())
    return {field.flat: field.values.check(field.variable, value) for field, value in given if value}


def _check_variables() -> None:
    known = {field.variable for field in FIELDS.values()} | set(_OTHER_VARIABLES)
    for name in sorted(os.environ):
        if not name.startswith("TORCH_MESH_") or name in known or name.startswith(_OF_TESTS):
            continue
        removed = REMOVED.get(name.removeprefix("TORCH_MESH_").lower())
        if removed is not None:
            raise ValueError(f"{name} in the environment sets a field that was removed: {removed}.")
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        warnings.warn(
            f"{name} in the environment is not a variable of torch_mesh and has no effect.{hint}", stacklevel=2
        )


def without_links(sentence: str) -> str:
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", sentence)


def _described() -> str:
    """The fields, for the docstring of MeshConfig."""
    lines = ["", "    Args:"]
    for field in FIELDS.values():
        text = f"{field.name}: {field.values.words}; by default {shown(field.default)}. {without_links(field.sentence)}"
        lines += textwrap.wrap(text.replace("`", "``"), 120, initial_indent=" " * 8, subsequent_indent=" " * 12)
    return "\n".join([*lines, "", "    Raises ValueError for an unknown field or value, saying what is allowed.", ""])


# Tools and readers see these two methods as the dataclass has them; ours record which fields were given.
@functools.wraps(MeshConfig.__init__)
def _init(self: MeshConfig, **given: Any) -> None:
    self._resolve(_flat(given))


def _set(self: MeshConfig, name: str, value: Any) -> None:
    if name in FIELDS:
        self._give({name: value})
    elif name.startswith("_") or hasattr(MeshConfig, name):
        object.__setattr__(self, name, value)
    else:
        known = [field.key for field in FIELDS.values() if field.group is None]
        raise AttributeError(str(_unknown(name, None, [*known, *GROUPS])))


MeshConfig.__init__ = _init  # type: ignore[method-assign]
MeshConfig.__setattr__ = _set  # type: ignore[method-assign, assignment]
MeshConfig.__doc__ = f"{MeshConfig.__doc__}{_described()}"
