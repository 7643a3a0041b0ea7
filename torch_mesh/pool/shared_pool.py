"""Several processes over one pool: lending and borrowing slots. docs/decisions/0060-shared-pools.md"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch_mesh import _C
from torch_mesh.config import MeshConfig
from torch_mesh.errors import UnsupportedModelError
from torch_mesh.models.families import ExpertsLayer
from torch_mesh.store.dense_codes import is_codes_file
from torch_mesh.store.manifest import Store
from torch_mesh.store.mirrors import find_copies
from torch_mesh.store.table_files import is_table_file
from torch_mesh.system.memory import resident_slots


def check_shared(config: MeshConfig, layers: Sequence[ExpertsLayer]) -> None:
    """Raises ValueError or UnsupportedModelError for settings that ``config.shared`` excludes."""
    if config.shared is None:
        return
    named: list[str] = []
    if config.resident != "auto":
        named.append(f"resident={config.resident!r} is set by torch-mesh share --resident")
    if config.io != "auto":
        named.append(f"io={config.io!r} is set by the pool's owner, which reads")
    if config.mirrors:
        named.append(f"mirrors={config.mirrors!r} is set by torch-mesh share --mirrors")
    if config.verify == "always":
        named.append("verify='always' is set by the pool's owner, which compares checksums on an expert's first read")
    if config.residency.guard == "on":
        named.append("residency.guard='on' would shrink the pool of another process")
    if config.lossy.modes:
        named.append(f"lossy ({config.lossy.modes}) would treat experts that other processes borrow as cold")
    if config.gpu.experts != 0:
        named.append("gpu.experts needs a pool of this process")
    if named:
        raise ValueError(
            f"shared={config.shared!r} excludes other settings: {'; '.join(named)}. Leave out shared or these."
        )
    if any(layer.expert_range is not None for layer in layers):
        raise UnsupportedModelError(
            f"shared={config.shared!r} lends experts of a whole model, but this process is one of several ranks, which "
            "have pools of their own. Leave shared out, or open the model without distributed_config."
        )


class SharedPool:
    """A pool of the experts of ``store`` that lends its slots to up to ``workers`` processes of this user via
    ``socket``.

    ``resident`` and ``mirrors`` are as in MeshConfig. The slots are divided evenly among the workers;
    ``resident="auto"`` leaves each worker memory for the stored rest of the model and a workspace.

    Raises ValueError if a part is too small for a token or the socket is in use, MemoryError if memory is short.
    """

    def __init__(
        self,
        store: Store,
        socket: str | os.PathLike[str],
        resident: str | float,
        workers: int,
        mirrors: Sequence[str] = (),
    ) -> None:
        manifest = store.manifest
        shape = manifest.shape
        defaults = MeshConfig()
        # Rows of tables stay in files, and codes of linear layers take less than their values.
        in_memory = (f for f in manifest.other_files if not (is_table_file(f.name) or is_codes_file(f.name)))
        of_a_worker = sum(file.bytes for file in in_memory) + defaults.workspace_bytes
        every = shape.layers * shape.experts
        if shape.top_k * workers > every:
            raise ValueError(
                f"workers={workers}: each needs {shape.top_k} experts for a token, and the store has {every}. Give at "
                f"most --workers {every // shape.top_k}."
            )
        slots = resident_slots(
            resident,
            layers=shape.layers,
            experts=shape.experts,
            top_k=shape.top_k * workers,
            record_bytes=manifest.record_bytes,
            reserved=workers * of_a_worker,
        )
        arguments = store.source_arguments()
        self.slots = slots
        self.engine = _C.Engine(
            layers=shape.layers,
            experts=shape.experts,
            format=manifest.weights,
            group_size=manifest.group_size,
            **shape.sizes._asdict(),
            activation=None,
            slots=slots,
            # For experts that no worker holds: the most recently used one is likely needed first.
            policy="lru",
            verify=defaults.verify,
            io=defaults.io,
            threads=1,
            workspace=1,
            timeout=defaults.residency.timeout,
            source=_C.Source(**arguments, copies=find_copies(arguments["files"], mirrors)),
            lendable=True,
        )
        try:
            self.lender = _C.Lender(self.engine, os.fspath(socket), workers)
        except BaseException:
            self.engine.close()
            raise

    def close(self) -> None:
        """End all loans. Workers keep what they hold."""
        try:
            self.lender.close()
        finally:
            self.engine.close()
