"""Statistics of a patched model."""

from __future__ import annotations

import dataclasses
import os

from torch import nn

from torch_mesh.errors import MeshError
from torch_mesh.modules.experts import patched_modules, pools_of
from torch_mesh.modules.tables import tables_of
from torch_mesh.ops.device import SharedDevice
from torch_mesh.pool.expert_pool import ExpertPool
from torch_mesh.routing.profiles import Profile, write_profile
from torch_mesh.statistics.counters import DeviceCounters, Stats, TableCounters, engine_stats
from torch_mesh.statistics.speculated import tallies_in


def stats(model: nn.Module) -> Stats:
    """The counters of a patched model. Copies of a model share its pool and counters.

    Raises MeshError for a model that is not patched, and a pending error of the host's part of a layer on a GPU, as the
    layer's next forward would.
    """
    shared = shared_devices_of(model)
    for device in shared:
        device.host.check()
    speculated = [tally.counters() for tally in tallies_in(model)]
    return dataclasses.replace(
        pool_stats(model),
        device=_device_counters(shared),
        expert_range=_pools(model)[0].expert_range,
        lookahead_unsupported_reasons=_lookahead_unsupported_reasons(model),
        speculation=speculated[0] if speculated else None,
        tables=_table_counters(model),
    )


def reset_stats(model: nn.Module) -> None:
    """Set the counters of a patched model to zero. Raises MeshError for a model that is not patched."""
    for pool in _pools(model):
        for each in pool.with_fallback:
            each.engine.reset_stats()
    for device in shared_devices_of(model):
        device.reset_stats()
    for tally in tallies_in(model):
        tally.reset()
    for tables in tables_of(model):
        tables.engine.reset_stats()


def save_profile(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the expert uses of a patched model since it was patched, added to the profile that it was opened with.

    Written atomically. Raises MeshError for a model that is not patched, has several pools or a part of the experts, or
    has computed nothing yet; OSError if the file cannot be written.
    """
    pools = _pools(model)
    if len(pools) != 1:
        raise MeshError(
            f"A profile is of one patched model, but {type(model).__name__} has {len(pools)} pools: save "
            "one for each inner model."
        )
    [pool] = pools
    if pool.expert_range is not None:
        raise MeshError(
            f"A profile is of all experts of a model, but this process has {pool.expert_range}: save one of the model "
            "opened whole, on the same prompts."
        )
    tokens, uses = pool.engine.model_use()
    if not tokens.any():
        raise MeshError(f"{type(model).__name__} has computed nothing yet: run it before saving a profile.")
    write_profile(Profile(tokens, uses, pool.top_k), path)


def pool_stats(model: nn.Module, experts: bool = True) -> Stats:
    """The counters of a model's pools alone; without ``experts``, all but those of each expert."""
    pools = _pools(model)
    lossy = ", ".join(dict.fromkeys(pool.lossy for pool in pools if pool.lossy))
    engines = [[each.engine for each in pool.with_fallback] for pool in pools]
    return engine_stats(engines, experts=experts, lossy=lossy)


def shared_devices_of(model: nn.Module) -> list[SharedDevice]:
    """The shared state of each GPU with experts. Raises MeshError for a model that is not patched."""
    return [device for pool in _pools(model) for device in pool.shared_devices]


def _lookahead_unsupported_reasons(model: nn.Module) -> dict[str, tuple[int, ...]]:
    layers: dict[str, tuple[int, ...]] = {}
    for module in patched_modules(model):
        if reason := module.mesh_lookahead_unsupported_reason:
            layers[reason] = (*layers.get(reason, ()), module._mesh_layer)
    return layers


def _table_counters(model: nn.Module) -> tuple[TableCounters, ...]:
    counted = []
    for tables in tables_of(model):
        for table, counts in zip(tables.tables, tables.engine.stats(), strict=True):
            counts = dict(counts)
            seconds = counts.pop("wait_nanoseconds") / 1e9
            counted.append(TableCounters(table.name, table.weights, **counts, wait_seconds=seconds))
    return tuple(counted)


def _device_counters(shared: list[SharedDevice]) -> DeviceCounters | None:
    counts = [device.stats() for device in shared]
    return DeviceCounters(**{name: sum(count[name] for count in counts) for name in counts[0]}) if counts else None


def _pools(model: nn.Module) -> list[ExpertPool]:
    pools = pools_of(model)
    if not pools:
        raise MeshError(f"{type(model).__name__} is not patched: it has no statistics. See torch_mesh.patch.")
    return pools
