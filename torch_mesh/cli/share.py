"""``torch-mesh share``: one pool of a store's experts for several processes of this machine."""

from __future__ import annotations

import argparse
import signal

from rich.filesize import decimal as format_bytes

from torch_mesh import validators
from torch_mesh.cli.options import positive
from torch_mesh.system.background import Flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Keeps experts of a store in shared memory and lends them to processes that open it with "
        "MeshConfig(shared=SOCKET), until Ctrl-C. They share one pool and one reader. Only processes of the "
        "same user are accepted."
    )
    parser.add_argument("store", help="a folder that torch-mesh convert wrote")
    parser.add_argument("--socket", required=True, metavar="SOCKET", help="path of the socket for workers")
    parser.add_argument(
        "--resident",
        metavar="SIZE",
        help="size of the whole pool, as in MeshConfig; auto leaves room for the rest of each worker (default: "
        "TORCH_MESH_RESIDENT, or auto)",
    )
    parser.add_argument(
        "--workers",
        type=positive,
        default=4,
        metavar="N",
        help="maximum number of processes, each of which may hold an equal part of the pool (default: 4)",
    )
    parser.add_argument(
        "--mirrors",
        metavar="FOLDERS",
        help="folders on other drives with copies of the store's files, as in MeshConfig",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from torch_mesh.config import MeshConfig
    from torch_mesh.pool.shared_pool import SharedPool
    from torch_mesh.store.manifest import open_store

    given = arguments.resident
    resident = MeshConfig().resident if given is None else validators.resident.check("--resident", given)
    mirrors = arguments.mirrors
    mirrors = MeshConfig().mirrors if mirrors is None else validators.folders.check("--mirrors", mirrors)
    store = open_store(arguments.store)
    ended = Flag()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        shared = SharedPool(store, arguments.socket, resident, arguments.workers, mirrors)
        try:
            size = format_bytes(shared.engine.describe_size()["slot_bytes"])
            print(
                f"{shared.slots} experts ({size}) of {arguments.store} are shared at {arguments.socket}: "
                f"{shared.lender.slots} for each of up to {arguments.workers} workers. Ctrl-C ends it.",
                flush=True,
            )
            ended.wait()
            counted = shared.engine.totals()
        finally:
            shared.close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print(
        f"Lent {counted['accesses']} times, {counted['hits']} of them from memory; "
        f"{format_bytes(counted['bytes_read'])} were read."
    )
    return 0
