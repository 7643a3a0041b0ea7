"""What a user may choose about a patched model."""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.quantizers import auto
from transformers.utils.quantization_config import QuantizationConfigMixin

_ENVIRONMENT_PREFIX = "TORCH_MESH_"

WEIGHTS = ("auto", "bf16", "int8", "int4", "lut4")
DENSE = ("none", "bf16", "int8", "int4", "lut4")
ATTENTION = ("auto", "model", "mesh")
FALLBACK = ("none", "int8", "int4", "lut4")
GROUP_SIZES = (32, 64, 128)
IO = ("auto", "uring", "threads", "mmap")
POLICIES = ("auto", "lru", "lfu", "slru", "2q", "sieve", "s3fifo", "wtinylfu", "heat")
VERIFY = ("first", "always", "never")
PREFETCH = ("auto", "off")
GUARD = ("auto", "on", "off")
QUOTAS = ("off", "on")
PREFILL = ("auto", "window", "off")
GPU_PLACEMENT = ("static", "dynamic")

# Those of the extension, without which `torch-mesh doctor` has to run.
MOST_THREADS = 1024
LONGEST_TIMEOUT = 1e9  # seconds

# Of a CUDA device that takes gpu_experts: tl.dot needs it for bf16.
LEAST_CAPABILITY = (8, 0)

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


_NOT_GIVEN: Any = _NotGiven()


def parse_size(value: str | int, field: str) -> int:
    """Bytes of a size such as ``"8GiB"``, ``"500 mb"`` or ``1 << 30``; ValueError names ``field`` and what is allowed."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip().lower())
        if match and match[2] in _UNITS and (size := int(float(match[1]) * _UNITS[match[2]])) > 0:
            return size
    raise ValueError(
        f"{field}={value!r} is not a size: give bytes or a number with a unit among KiB, MiB, GiB, TiB, KB, MB, GB, TB."
    )


def _one_of(allowed: tuple[str, ...]) -> Callable[[str, Any], str]:
    def check(field: str, value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{field}={value!r} is unknown; it is one of {', '.join(map(repr, allowed))}.")
        return value

    return check


def _check_resident(field: str, value: Any) -> str | float:
    if value == "auto":
        return value
    if isinstance(value, str) and re.fullmatch(r"[01]?\.\d+|[01]", value.strip()):
        value = float(value)
    if isinstance(value, float) or (value == 1 and not isinstance(value, bool)):
        if 0 < value <= 1:
            return float(value)
        raise ValueError(f"{field}={value!r} is not a fraction of all experts: it must be in (0, 1].")
    try:
        parse_size(value, field)
    except ValueError as error:
        raise ValueError(f"{error} Or a fraction of all experts in (0, 1], or 'auto'.") from None
    return value


def _check_group_size(field: str, value: Any) -> int:
    if str(value).strip() not in map(str, GROUP_SIZES):
        raise ValueError(f"{field}={value!r} is unknown; it is one of {', '.join(map(str, GROUP_SIZES))}.")
    return int(value)


def _check_store(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError(f"{field}={value!r} is not a folder: give a path, or None.")
    return os.path.expanduser(os.fspath(value))


def _check_threads(field: str, value: Any) -> str | int:
    if value == "auto":
        return value
    number = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d*", number):
        raise ValueError(f"{field}={value!r} is not a number of threads: give a positive number or 'auto'.")
    if len(number) > 9 or int(number) > MOST_THREADS:
        raise ValueError(
            f"{field}={value!r} is more than an engine takes: give 1 to {MOST_THREADS}, or 'auto' for as many as torch uses."
        )
    return int(number)


def _check_workspace(field: str, value: Any) -> str | int:
    parse_size(value, field)
    return value


def _check_gpu_experts(field: str, value: Any) -> str | int | tuple[tuple[bool, ...], ...]:
    if isinstance(value, str) and value == "auto":  # a mask would compare element by element
        return value
    if not isinstance(value, bool) and isinstance(value, int | str) and re.fullmatch(r"\d+", str(value).strip()):
        return int(value)
    rows = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, list | tuple) and row for row in rows):
        same = len({len(row) for row in rows}) == 1
        if same and all(isinstance(entry, bool) for row in rows for entry in row):
            return tuple(map(tuple, rows))
    raise ValueError(
        f"{field}={value!r} is unknown: give a number of experts of each layer, 'auto', or a bool mask [layers, experts]."
    )


def _check_gpu_streaming(field: str, value: Any) -> str | tuple[float, float, float]:
    if isinstance(value, str) and value in ("auto", "off"):
        return value
    if isinstance(value, str) and re.fullmatch(r"[\d.eE+-]+(,[\d.eE+-]+){2}", value.replace(" ", "")):
        try:
            value = [float(part) for part in value.split(",")]
        except ValueError:
            pass
    if isinstance(value, list | tuple) and len(value) == 3:
        numbers = [float(entry) for entry in value if isinstance(entry, int | float) and not isinstance(entry, bool)]
        if len(numbers) == 3 and all(0 <= number < float("inf") for number in numbers):
            return (numbers[0], numbers[1], numbers[2])
    raise ValueError(
        f"{field}={value!r} is unknown: give 'auto', 'off', or three numbers of seconds: to copy an expert to the GPU, for the CPU "
        "to compute a row of one, and for what an expert takes it beside its rows."
    )


def _check_stats_every(field: str, value: Any) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d*", str(value).strip()):
        raise ValueError(f"{field}={value!r} is not a number of forwards: give a positive number.")
    return int(value)


def _check_file(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError(f"{field}={value!r} is not a file: give a path, or None.")
    return os.path.expanduser(os.fspath(value))


def _check_pins(field: str, value: Any) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = -1.0
    if isinstance(value, bool) or not 0 <= share <= 0.5:
        raise ValueError(f"{field}={value!r} is not a share of the pool: it must be in [0, 0.5].")
    return share


def _check_count(field: str, value: Any) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value).strip()):
        raise ValueError(
            f"{field}={value!r} is not a number of {field.rpartition('_')[2]}: give 0 or a positive number."
        )
    return int(value)


def _check_deferred_experts(field: str, value: Any) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value).strip()):
        raise ValueError(
            f"{field}={value!r} is not a number of experts per token: give 0 (exact) or a positive number."
        )
    return int(value)


def _check_routing_bias(field: str, value: Any) -> float:
    try:
        bias = float(value)
    except (TypeError, ValueError):
        bias = -1.0
    if isinstance(value, bool) or not 0 <= bias <= 1:
        raise ValueError(
            f"{field}={value!r} is not a share of the spread of scores: give a number in [0, 1]; 0 is exact."
        )
    return bias


def _check_timeout(field: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if isinstance(value, bool) or not 0 < seconds < float("inf"):
        raise ValueError(f"{field}={value!r} is not a time-out: give a positive number of seconds.")
    if not 1e-3 <= seconds <= LONGEST_TIMEOUT:
        raise ValueError(
            f"{field}={value!r} is not a time-out: give 0.001 to {LONGEST_TIMEOUT:.0f} seconds, which are 31 years."
        )
    return seconds


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "resident": _check_resident,
    "weights": _one_of(WEIGHTS),
    "dense": _one_of(DENSE),
    "attention": _one_of(ATTENTION),
    "group_size": _check_group_size,
    "store": _check_store,
    "io": _one_of(IO),
    "policy": _one_of(POLICIES),
    "quotas": _one_of(QUOTAS),
    "prefetch": _one_of(PREFETCH),
    "profile": _check_file,
    "pins": _check_pins,
    "early_layers": _check_count,
    "early_experts": _check_count,
    "guard": _one_of(GUARD),
    "prefill": _one_of(PREFILL),
    "deferred_experts": _check_deferred_experts,
    "routing_bias": _check_routing_bias,
    "fallback": _one_of(FALLBACK),
    "verify": _one_of(VERIFY),
    "threads": _check_threads,
    "workspace": _check_workspace,
    "gpu_experts": _check_gpu_experts,
    "gpu_weights": _one_of(WEIGHTS),
    "gpu_streaming": _check_gpu_streaming,
    "gpu_placement": _one_of(GPU_PLACEMENT),
    "timeout": _check_timeout,
    "predictor": _check_file,
    "stats_file": _check_file,
    "stats_every": _check_stats_every,
}

FIELDS = tuple(_CHECKS)

# Of this process or machine and no property of a model: a checkpoint neither keeps them nor can set them, lest it name a file to
# open or change what a model computes unasked.
_LOCAL = (
    "gpu_experts",
    "gpu_weights",
    "gpu_streaming",
    "gpu_placement",
    "predictor",
    "profile",
    "pins",
    "stats_file",
    "stats_every",
    "deferred_experts",
    "routing_bias",
    "fallback",
)

_DEFAULTS: dict[str, Any] = {
    "resident": "auto",
    "weights": "auto",
    "dense": "none",
    "attention": "auto",
    "group_size": 64,
    "store": None,
    "io": "auto",
    "policy": "auto",
    "quotas": "off",
    "prefetch": "auto",
    "profile": None,
    "pins": 0.0,
    "early_layers": 0,
    "early_experts": 0,
    "guard": "auto",
    "prefill": "auto",
    "deferred_experts": 0,
    "routing_bias": 0.0,
    "fallback": "none",
    "verify": "first",
    "threads": "auto",
    "workspace": "256MiB",
    "gpu_experts": 0,
    "gpu_weights": "auto",
    "gpu_streaming": "auto",
    "gpu_placement": "static",
    "timeout": 30.0,
    "predictor": None,
    "stats_file": None,
    "stats_every": 100,
}


@auto.register_quantization_config("mesh")
@dataclass(init=False, repr=False)
class MeshConfig(QuantizationConfigMixin):
    """How a model's experts are stored, kept resident and read. Also a ``quantization_config=`` of ``from_pretrained``.

    A field that is not given comes from the environment (``TORCH_MESH_RESIDENT`` ...), then from the checkpoint's own
    config, then from its default.

    Args:
        resident: how much of the experts stays in memory: ``"auto"`` (free memory less a margin; cgroup limits count),
            a size such as ``"8GiB"``, bytes, or a fraction of all experts in (0, 1].
        weights: ``"bf16"``, ``"int8"``, ``"int4"``, ``"lut4"``, or ``"auto"``: as the checkpoint or store has them.
        dense: format in which the linear layers outside the experts (attention, shared experts, the head) are packed when
            the model is patched or loaded, to be computed by the experts' kernels: ``"bf16"``, ``"int8"``, ``"int4"``,
            ``"lut4"``, or ``"none"``: they stay torch's. CPU only.
        attention: who computes the attention of decode steps on the CPU: ``"mesh"``, the kernel of torch_mesh (fp32 sums; for
            models that use torch's ``scaled_dot_product_attention``), ``"model"``, the model's own, or ``"auto"``: torch_mesh's
            if ``dense`` packs the rest of the model, so that without it every bit outside the experts is the model's own.
        group_size: weights that share a scale along the input: 32, 64 or 128. Ignored for bf16.
        store: folder of the packed experts. None: raw bf16 is read from the checkpoint's own files, other
            formats are converted once into the cache folder.
        io: how experts are read into the pool: ``"uring"``, ``"threads"``, or ``"auto"``, the first of these that works here.
            ``"mmap"`` has no pool but uses the records of a store where the page cache holds them; ``resident`` is then how
            many the kernel is advised to keep, and takes no memory that it could not have back.
        policy: ``"auto"`` (heat), ``"lru"``, ``"lfu"``, ``"slru"``, ``"2q"``, ``"sieve"``, ``"s3fifo"``, ``"wtinylfu"`` or ``"heat"``.
        quotas: ``"on"``: each layer has a policy of its own and a quota of the pool by its sampled miss-ratio curve, which it may exceed
            while others do not use theirs; for policies other than ``heat``, which does better without. ``"off"``: one policy for all.
        prefetch: ``"auto"``: while one layer computes, the next layer's router foretells which experts to read; or ``"off"``.
        profile: a file that ``torch_mesh.save_profile`` wrote: the experts that the model used most are read in the background as
            soon as the pool is open, and ``heat`` and ``lfu`` start from what it says. Of this process: not kept in a checkpoint.
        pins: share of the pool, in [0, 0.5], for the profile's most used experts, which are then never given up while the pool has
            at least twice as many slots. Needs ``profile``, and is not kept in a checkpoint either.
        early_layers: how many first MoE layers are favoured: ``early_experts`` of each, the ones used most of late, stay resident. At
            most half of the pool.
        early_experts: see ``early_layers``. Either one at 0 is off.
        guard: ``"on"``: the pool shrinks when the machine or a memory cgroup runs short of memory, and grows back afterwards, never
            beyond its size at first; ``"off"``; or ``"auto"``: on for ``resident="auto"``.
            Several models in a process, or several layers alone, give up and take back the same share of what each had.
        prefill: prompts of more than 16 tokens: with ``"auto"`` a layer that needs nearly all of its experts streams them through a
            window of the pool, reading the next layer's ahead; with ``"window"`` each layer does; ``"off"``: none, and experts are
            read when their layer runs. Not for models whose experts run by projection.
        deferred_experts: lossy. In decode steps this many of a token's experts, cold ones of least weight, are read while the
            model goes on, and added one MoE layer later. 0: none, exact. Not for models whose experts run by projection.
        routing_bias: lossy. In decode steps a resident expert takes the place of a cold one whose score is higher by less than
            this share of the spread of the token's scores; the first of its choices stay. 0: never, exact; 1: wherever there is one.
            For the model types that ``torch_mesh.lossy.ROUTING_BIAS_FAMILIES`` lists.
        fallback: lossy. In decode steps a cold expert is computed from a record of fewer bits, ``"int8"``, ``"int4"`` or ``"lut4"``,
            three quarters of ``resident`` being a pool of those. ``"none"``: exact. Not for models whose experts run by projection, nor with
            ``deferred_experts``, ``gpu_experts`` or ``io="mmap"``.
        verify: checksums on an expert's ``"first"`` read, ``"always"`` or ``"never"``.
        threads: ``"auto"`` (torch's intra-op threads) or a number.
        workspace: memory for products and activations, as a size or bytes.
        gpu_experts: which experts are computed on the GPU that their layer is on when it is patched: a number, so many of each layer,
            the most used by ``profile`` or else the first; a bool mask [layers, experts], such as ``torch_mesh.hottest_experts`` makes; or ``"auto"``: as many as
            the card holds beside a reserve, chosen likewise. They are not kept in memory as well. See docs/gpu.md. Not kept in a checkpoint.
        gpu_weights: their format on the GPU, ``"auto"``: as in memory, or one of ``weights``'. Their records come from a store of their own,
            in ``store``'s folder with the format behind its name, or from a bf16 checkpoint itself. Of a converted checkpoint only
            formats of fewer bits can be had. Not kept in a checkpoint.
        gpu_streaming: which of the experts that are not on the GPU a prompt brings up to be computed there, ``"auto"``: by what a copy and
            the CPU took when experts were placed; three numbers of seconds in place of those: a copy of an expert, the CPU for a row
            of one, and for an expert beside its rows; or ``"off"``: none. The output depends on it within rounding. Not kept in a checkpoint.
        gpu_placement: ``"static"``: experts stay where they were put, or ``"dynamic"``: those that are used most move up to the GPU while
            the model runs, which makes the last bits of its output depend on when they arrive. ``torch_mesh.place_experts`` moves
            them by hand then. Not kept in a checkpoint.
        timeout: seconds that a read or a wait for a slot may take.
        predictor: a file that ``torch-mesh fit`` wrote for this model: its matrices foretell experts in the place of the next layer's
            router, the first layer's too. None: the routers do. Needs ``prefetch``; not kept in a checkpoint.
        stats_file: a file to which statistics are appended, a line of JSON at a time: ``Stats.to_dict(experts=False)`` with
            ``time`` and ``forward``. A write that fails is warned of once and disturbs nothing. Not kept in a checkpoint.
        stats_every: forwards of the model between two such lines.

    Raises ValueError for an unknown field or value, saying what is allowed.
    """

    resident: str | float
    weights: str
    dense: str
    attention: str
    group_size: int
    store: str | None
    io: str
    policy: str
    quotas: str
    prefetch: str
    profile: str | None
    pins: float
    early_layers: int
    early_experts: int
    guard: str
    prefill: str
    deferred_experts: int
    routing_bias: float
    fallback: str
    verify: str
    threads: str | int
    workspace: str | int
    gpu_experts: str | int | tuple[tuple[bool, ...], ...]
    gpu_weights: str
    gpu_streaming: str | tuple[float, float, float]
    gpu_placement: str
    timeout: float
    predictor: str | None
    stats_file: str | None
    stats_every: int

    def __init__(
        self,
        *,
        resident: str | float = _NOT_GIVEN,
        weights: str = _NOT_GIVEN,
        dense: str = _NOT_GIVEN,
        attention: str = _NOT_GIVEN,
        group_size: int = _NOT_GIVEN,
        store: str | os.PathLike[str] | None = _NOT_GIVEN,
        io: str = _NOT_GIVEN,
        policy: str = _NOT_GIVEN,
        quotas: str = _NOT_GIVEN,
        prefetch: str = _NOT_GIVEN,
        profile: str | os.PathLike[str] | None = _NOT_GIVEN,
        pins: float = _NOT_GIVEN,
        early_layers: int = _NOT_GIVEN,
        early_experts: int = _NOT_GIVEN,
        guard: str = _NOT_GIVEN,
        prefill: str = _NOT_GIVEN,
        deferred_experts: int = _NOT_GIVEN,
        routing_bias: float = _NOT_GIVEN,
        fallback: str = _NOT_GIVEN,
        verify: str = _NOT_GIVEN,
        threads: str | int = _NOT_GIVEN,
        workspace: str | int = _NOT_GIVEN,
        gpu_experts: Any = _NOT_GIVEN,
        gpu_weights: str = _NOT_GIVEN,
        gpu_streaming: Any = _NOT_GIVEN,
        gpu_placement: Any = _NOT_GIVEN,
        timeout: float = _NOT_GIVEN,
        predictor: str | os.PathLike[str] | None = _NOT_GIVEN,
        stats_file: str | os.PathLike[str] | None = _NOT_GIVEN,
        stats_every: int = _NOT_GIVEN,
        **unknown: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _CHECKS and value is not _NOT_GIVEN}
        self._resolve(given | unknown, {})
        if self.pins > 0 and self.profile is None and "pins" in given:
            raise ValueError(pins_without_profile(self.pins))

    @property
    def workspace_bytes(self) -> int:
        return parse_size(self.workspace, "workspace")

    @property
    def thread_count(self) -> int:
        """As the engine takes it: 0 is torch's intra-op threads."""
        return 0 if isinstance(self.threads, str) else self.threads

    @property
    def lossy(self) -> str:
        """The modes that trade exactness for fewer waits, as one shows them; empty: exact."""
        names = ("deferred_experts", "routing_bias", "fallback")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != _DEFAULTS[name])

    def replace(self, **fields: Any) -> MeshConfig:
        """A copy in which ``fields`` are given."""
        changed = copy.copy(self)
        given = _checked(fields)
        changed._given = self._given | given
        # Only these: what from_pretrained has merged into a checkpoint's config is in its attributes alone.
        for name, value in given.items():
            setattr(changed, name, value)
        return changed

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method} | {
            name: getattr(self, name) for name in _CHECKS if name not in _LOCAL
        }

    def __iter__(self) -> Any:
        return iter(self.to_dict().items())

    def __repr__(self) -> str:
        return f"MeshConfig({', '.join(f'{name}={_shown(getattr(self, name))}' for name in _CHECKS)})"

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> MeshConfig | tuple[MeshConfig, dict[str, Any]]:
        """The config that a checkpoint's config.json holds; the environment beats it."""
        config = cls()
        config._resolve({name: kwargs.pop(name) for name in list(kwargs) if name in _CHECKS}, config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def get_loading_attributes(self) -> dict[str, Any]:
        """The fields that were given, which from_pretrained puts in the place of the checkpoint's own."""
        return {name: getattr(self, name) for name in self._given}

    def _resolve(self, given: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> None:
        self.quant_method: Any = "mesh"
        self._given = _environment() | _checked(given)
        stored = _checked({name: value for name, value in checkpoint.items() if name not in ("quant_method", *_LOCAL)})
        for name, value in (_DEFAULTS | stored | self._given).items():
            setattr(self, name, value)


def pins_without_profile(pins: float) -> str:
    """What is wrong with it. The environment may name pins, and whoever uses the config the profile."""
    return f"pins={pins!r} needs to know which experts are hottest: give profile=, a file of torch_mesh.save_profile."


def _shown(value: Any) -> str:
    return f"<mask [{len(value)}, {len(value[0])}]>" if isinstance(value, tuple) else repr(value)


def _environment() -> dict[str, Any]:
    fields = {}
    for name, check in _CHECKS.items():
        variable = f"{_ENVIRONMENT_PREFIX}{name.upper()}"
        if value := os.environ.get(variable):
            fields[name] = check(variable, value)
    return fields


def _checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    for name in fields:
        if name not in _CHECKS:
            close = difflib.get_close_matches(name, _CHECKS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"MeshConfig has no field {name!r}.{hint} Its fields are {', '.join(_CHECKS)}.")
    return {name: _CHECKS[name](name, value) for name, value in fields.items()}


# Without this, from_pretrained ignores the config that a user passes for a converted checkpoint, with a warning.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, MeshConfig)  # type: ignore[assignment]
