"""The fields of MeshConfig. Each is written once, in one of the classes below.

The command line reads them from here, so that its help imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch_mesh import validators
from torch_mesh.formats import (
    DEFAULT_GROUP_SIZE,
    DENSE_FORMATS,
    FORMATS,
    GPU_FORMATS,
    GROUP_SIZES,
    PASSTHROUGH_FORMATS,
    ROUNDED_FORMATS,
    in_words,
)
from torch_mesh.validators import Values, count, one_of, parse_size, path, reader

if TYPE_CHECKING:
    from torch_mesh.config import MeshConfig

# The lowest compute capability of a GPU with experts: tl.dot needs it for bf16.
MIN_CAPABILITY = (8, 0)

# Fields of earlier releases, by flat name, and what to give instead.
REMOVED = {
    "predictor": 'name its file with prefetch="FILE"',
    "pins": (
        "profile= reads a profile's most used experts first; residency.early_experts keeps those of the first layers"
    ),
    "early_layers": 'residency={"early_experts": (layers, experts)} has both numbers',
    "quotas": 'policy="heat" compares the experts of all layers, and has more hits than any policy with quotas',
}

# Policies of earlier releases, which a checkpoint may still set.
REMOVED_POLICIES = ("slru", "2q", "sieve", "s3fifo", "wtinylfu")

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
    the named fields only, by ``MeshConfig._give``."""

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
        "report` summarizes them. Each model needs its own file, and a [rank](scaleout.md) writes "
        "`NAME.rank0.jsonl` for `NAME.jsonl`. A failed write warns once and has no other effect.",
    )
    every: int = _field(
        100,
        count("forwards", 1, "a positive number"),
        "Number of forwards of the model between two lines of statistics.",
    )


@dataclass(kw_only=True)
class ConfigFields:
    """The fields of MeshConfig and its groups. MeshConfig sets and checks their values."""

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
        "the codes of a [quantized checkpoint](checkpoints.md) unchanged; nothing is rounded to them.",
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
        "only: up to 4 rows, or any number on CPUs without native bf16 or with a slow one. Sums are in another order "
        "than torch's. `\"none\"`: always torch's own products. A format: the layers are packed to it when the model "
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
        'with one size, and for codes that a quantized checkpoint keeps: with `weights="auto"`, or with the format of '
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
        "Folder of the packed experts. None: raw bf16, and [codes that records hold](checkpoints.md) are read from the "
        "checkpoint's own files, other formats are converted once into the cache folder. For `patch` a new folder.",
    )
    io: str = _field(
        "auto",
        reader("auto", "uring", "threads", "buffered"),
        'How experts are read into the pool. `"auto"`: directly from the disk, by io_uring if it works here, '
        'else by threads. `"buffered"`: as `"auto"`, but through the page cache instead of direct I/O. '
        "The cache keeps evicted experts in memory that is free ([when](decisions/0068-buffered-reads.md)).",
    )
    mirrors: tuple[str, ...] = _field(
        (),
        validators.folders,
        "Folders on other drives with copies of the files that hold the experts, or of some of these files. Each read "
        "is divided among [the drives](settings.md#several-drives), so that two read about twice as fast as one. For "
        "direct reads of a checkpoint, GGUF file or store.",
    )
    policy: str = _field(
        "auto",
        one_of("auto", "lru", "lfu", "heat"),
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


def _fields(cls: type, group: str | None = None, prefix: str = "") -> Iterator[Field]:
    for each in dataclasses.fields(cls):
        kind = vars(cls).get(each.name)
        if isinstance(kind, Group):
            yield from _fields(kind.kind, each.name, kind.prefix)
        elif each.metadata:
            yield Field(prefix + each.name, group, each.name, each.default, **each.metadata)


FIELDS = {field.flat: field for field in _fields(ConfigFields)}
GROUPS = {name: group for name, group in vars(ConfigFields).items() if isinstance(group, Group)}


def without_links(sentence: str) -> str:
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", sentence)
