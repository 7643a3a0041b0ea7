"""The features of a patched model beyond its experts. A new mode is a module of its own and an entry of ``MODES``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_mesh.config import MeshConfig
from torch_mesh.gpu.choosing import check_gpu_weights
from torch_mesh.gpu.placement import Placement, check_beside_gpu
from torch_mesh.gpu.placing import move_experts
from torch_mesh.hf.attention import check_attention, install_attention
from torch_mesh.hf.compile import uninstall_compile
from torch_mesh.hf.kv_cache import install_caches, uninstall_caches
from torch_mesh.hf.model_config import clear_config_metadata, set_config_metadata
from torch_mesh.hf.saving import PatchedModelQuantizer, attach_quantizer, detach_quantizer
from torch_mesh.lossy.decoding import check_lossy, install_lossy, uninstall_lossy
from torch_mesh.lossy.fallback import check_fallback
from torch_mesh.models.families import ExpertsLayer
from torch_mesh.modules.dense import check_dense, install_products, pack_dense, restore_dense
from torch_mesh.modules.early_rows import install_early_rows, uninstall_early_rows
from torch_mesh.modules.tables import install_table, restore_tables
from torch_mesh.patching.expert_source import ExpertSource, open_tables
from torch_mesh.patching.unpooled import warn_of_unpooled
from torch_mesh.pool.expert_pool import ExpertPool
from torch_mesh.pool.shared_pool import check_shared
from torch_mesh.prefetch.lookahead import check_predictor, connect
from torch_mesh.routing.profiles import check_profile
from torch_mesh.speculation.models import check_speculation, install_speculation, uninstall_speculation
from torch_mesh.speculation.mtp import PatchHeads, install_mtp, uninstall_mtp
from torch_mesh.statistics.speculated import drop_tally
from torch_mesh.store.mirrors import check_mirrors


@dataclass
class Patching:
    """A model that is being patched. Fields that are None are set before modes are installed, except for ``gpu_pool``
    without experts on a GPU, and ``quantizer`` of a loaded model."""

    model: nn.Module
    layers: list[ExpertsLayer]
    config: MeshConfig
    source: ExpertSource
    quantizer: PatchedModelQuantizer | None = None
    placement: Placement | None = None
    gpu_pool: ExpertPool | None = None
    pool: ExpertPool | None = None
    patch_heads: PatchHeads | None = None


@dataclass(frozen=True)
class Mode:
    """``check`` raises for an unsupported model or setting, before anything changes. ``uninstall`` reverts ``install``,
    and can be repeated after an error."""

    name: str
    check: Callable[[Any], object] = lambda patching: None
    install: Callable[[Any], object] = lambda patching: None
    uninstall: Callable[[nn.Module], object] = lambda model: None
    before_pool: bool = False  # installed before the pool, which gets the remaining memory


def _check_gpu(patching: Patching) -> None:
    config = patching.config
    check_gpu_weights(config.gpu, patching.source.only_format)
    wanted = config.gpu.experts
    if (isinstance(wanted, tuple) and any(map(any, wanted))) or (isinstance(wanted, int) and wanted > 0):
        check_beside_gpu(lossy_modes=config.lossy.modes, prefill=config.prefill)


def _install_tables(patching: Patching) -> None:
    source = patching.source.tables
    if source is None:
        return
    tables = patching.source.undo.closing(open_tables(source.stored, patching.config))
    for index, layer in enumerate(source.layers):
        install_table(layer, tables, index)
    install_early_rows(patching.model)


def _uninstall_tables(model: nn.Module) -> None:
    uninstall_early_rows(model)
    restore_tables(model)


def _install_lookahead(patching: Patching) -> None:
    config, pool = patching.config, patching.pool
    assert pool is not None
    if not pool.in_memory and config.prefetch != "off":
        connect(patching.model, patching.layers, config.predictor)


# In the order of installation. They are uninstalled in reverse. Lambdas look functions up when they are called, so that
# tests can make each fail.
MODES = (
    Mode(
        "tables",
        install=lambda p: _install_tables(p),
        uninstall=lambda model: _uninstall_tables(model),
        before_pool=True,
    ),
    Mode(
        "dense",
        check=lambda p: check_dense(p.config.dense, p.source.blocks),
        install=lambda p: pack_dense(
            p.model, p.layers, dense=p.config.dense, group_size=p.config.group_size, blocks=p.source.blocks
        ),
        uninstall=lambda model: restore_dense(model),
        before_pool=True,
    ),
    Mode("mirrors", check=lambda p: check_mirrors(p.config.mirrors, p.config.io)),
    Mode("shared", check=lambda p: check_shared(p.config, p.layers)),
    Mode("profile", check=lambda p: check_profile(p.config.profile, p.layers, p.source.layers)),
    Mode(
        "lookahead",
        check=lambda p: check_predictor(p.layers, p.config.predictor),
        install=lambda p: _install_lookahead(p),
    ),
    Mode(
        "fallback",
        check=lambda p: check_fallback(
            p.model,
            p.layers,
            p.source.weights,
            fallback=p.config.lossy.fallback,
            deferred_experts=p.config.lossy.deferred_experts,
        ),
    ),
    Mode(
        "lossy",
        check=lambda p: check_lossy(p.model, p.layers, p.config.lossy),
        install=lambda p: install_lossy(p.model, p.layers, p.config.lossy),
        uninstall=lambda model: uninstall_lossy(model),
    ),
    # Uninstalled with "dense".
    Mode(
        "products",
        install=lambda p: install_products(p.model, p.layers, dense=p.config.dense, speculation=p.config.speculation),
    ),
    # An attribute, which unpatch removes with all others.
    Mode(
        "attention",
        check=lambda p: check_attention(p.model, p.config.attention),
        install=lambda p: install_attention(p.model, attention=p.config.attention, speculation=p.config.speculation),
    ),
    Mode(
        "caches",
        install=lambda p: install_caches(p.model),
        uninstall=lambda model: uninstall_caches(model),
    ),
    # torch_mesh.compile installs it.
    Mode("compile", uninstall=lambda model: uninstall_compile(model)),
    Mode(
        "speculation",
        check=lambda p: check_speculation(p.model, p.config.speculation),
        install=lambda p: install_speculation(p.model, p.config.speculation),
        uninstall=lambda model: uninstall_speculation(model),
    ),
    # The counters of speculation, which its first draft makes.
    Mode("tally", uninstall=lambda model: drop_tally(model)),
    Mode(
        "mtp",
        install=lambda p: install_mtp(p.model, p.patch_heads),
        uninstall=lambda model: uninstall_mtp(model),
    ),
    # Uninstalled with the layers.
    Mode(
        "gpu",
        check=_check_gpu,
        install=lambda p: move_experts(p.layers, p.pool, p.placement, p.gpu_pool),
    ),
    Mode("unpooled", install=lambda p: warn_of_unpooled(p.model, p.layers)),
    Mode(
        "saving",
        install=lambda p: attach_quantizer(
            p.model, p.quantizer or PatchedModelQuantizer(p.config, pre_quantized=False)
        ),
        uninstall=lambda model: detach_quantizer(model),
    ),
    Mode(
        "config",
        install=lambda p: set_config_metadata(p.model, p.config),
        uninstall=lambda model: clear_config_metadata(model),
    ),
)
