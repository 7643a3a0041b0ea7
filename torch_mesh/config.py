"""MeshConfig: the options of a patched model, from arguments, the environment and a checkpoint's config."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import os
import textwrap
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_mesh.config_fields import FIELDS, GROUPS, REMOVED, REMOVED_POLICIES, ConfigFields, Field, without_links
from torch_mesh.validators import shown

# Variables that are not fields: of the extension when it is loaded, of setup.py, and of torch-mesh serve.
_OTHER_VARIABLES = ("TORCH_MESH_ISA", "TORCH_MESH_BUILD_URING", "TORCH_MESH_API_KEY")
_OF_TESTS = "TORCH_MESH_TEST_"

# Fields that suit a machine, whatever the model.
_OF_MACHINE = ("resident", "io", "threads", "workspace", "guard", "fill", "timeout")


@dataclass(kw_only=True, repr=False)
class MeshConfig(ConfigFields, QuantizationConfigMixin):
    """How a model's experts are stored, kept resident and read. Also a ``quantization_config=`` of ``from_pretrained``.

    Fields of a group are given as a mapping, ``gpu={"experts": 8}``, and read as ``config.gpu.experts``. A field that
    is not given comes from the environment (``TORCH_MESH_RESIDENT``, ``TORCH_MESH_GPU_EXPERTS`` ...), then from what a
    checkpoint's own config says, then from its default. docs/config.md says which ones a checkpoint may set, and which
    are for measuring.
    """

    quant_method: Any = dataclasses.field(default="mesh", init=False)

    @property
    def given_group_size(self) -> int | None:
        """``group_size``; None if it is the default."""
        return self.group_size if "group_size" in self._given else None

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
        """The config from a checkpoint's config.json, which the environment overrides. Warns about fields that this
        release does not know, which a later one may have written, and about those that a checkpoint may not set."""
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
        if own.get("policy") in REMOVED_POLICIES:
            warnings.warn(
                f"The checkpoint's config.json sets policy={own.pop('policy')!r}, which was removed and is ignored.",
                stacklevel=2,
            )
        own, unknown = _without_unknown(own)
        if unknown:
            warnings.warn(
                f"The checkpoint's config.json sets {', '.join(unknown)}, which this release does not know and "
                "ignores: upgrade torch_mesh, or remove the entry.",
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


def _without_unknown(stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``stored`` without the fields that this release does not know, also of groups, and these fields' names as texts
    that are safe to print."""
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in stored.items():
        if name not in {*FIELDS, *GROUPS}:
            unknown.append(f"{name!r:.80}")
        elif name in GROUPS and isinstance(value, Mapping):
            keys = {field.key for field in FIELDS.values() if field.group == name}
            unknown += [f"{name}[{key!r:.80}]" for key in value if key not in keys]
            known[name] = {key: part for key, part in value.items() if key in keys}
        else:
            known[name] = value
    return known, unknown


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
