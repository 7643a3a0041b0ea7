"""A server of one model: open it, listen, and stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch_mesh.config import MeshConfig
from torch_mesh.errors import MeshError
from torch_mesh.hf.compile import compile
from torch_mesh.modules.experts import patched_modules
from torch_mesh.serving.admission import Admission, find_needs
from torch_mesh.serving.kept_keys import Counts, KeptKeys
from torch_mesh.serving.opening import open_for_serving, source_of
from torch_mesh.serving.padded_products import pad_products
from torch_mesh.serving.prefix_cache import PrefixCache
from torch_mesh.serving.server_options import check_address, check_api_key, check_unused, complete_options
from torch_mesh.statistics.counters import Stats
from torch_mesh.statistics.stats import pool_stats

if TYPE_CHECKING:
    from typing_extensions import Self

    from torch_mesh.serving.engine import Engine

HOW_TO_INSTALL = "pip install torch_mesh[serve]"
DEFAULT_KEPT_BYTES = 1 << 30
GRACE = 5.0  # seconds for pending requests when the server stops
AFTERMATH = 20.0  # further seconds for computations to end
# Number of products that oneDNN keeps compiled, each of 0.3 MB. A forward has fewer. Prompts of all lengths would fill
# oneDNN's default of 1,024.
_COMPILED_PRODUCTS = "128"
_ANSWERING = 2.0  # seconds for error responses to pending requests


class Server:
    """Serves in threads of its own, from its creation to ``stop``.

    Args:
        model: a folder, a GGUF file, or a model of the hub.
        kept_bytes: memory for keys that are kept between requests. None: ``DEFAULT_KEPT_BYTES`` where they can be.
        given: values of OPTIONS, by name.
        must_chat: raise for a model without a chat template.
        speculation: that of the command line, which is refused where it has no effect.

    Raises ImportError for a missing package, ValueError for an invalid option, OSError if the address is in use, and
    the errors of opening a model.
    """

    _stopped = False

    def __init__(
        self,
        model: str,
        config: MeshConfig,
        kept_bytes: int | None,
        given: Mapping[str, Any],
        must_chat: bool = False,
        speculation: str | None = None,
    ) -> None:
        _check_packages()
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _COMPILED_PRODUCTS)  # read with the first product
        source = source_of(model)
        self.model = source.name
        # Before the model is opened, which may take long.
        options = complete_options(given)
        check_unused(options, kept_bytes, speculation)
        kept_bytes = DEFAULT_KEPT_BYTES if kept_bytes is None else kept_bytes
        check_api_key(options)
        check_address(options["host"], options["port"])
        opened, self.prompts = open_for_serving(source, config, options, must_chat)
        if options["compile"]:
            compile(opened)
            kept_bytes = 0  # steps over kept keys are not compiled
        else:
            pad_products(opened)
        limit = options["prefix_bytes"]
        with contextlib.ExitStack() as undo:
            prefixes = PrefixCache(opened, limit, self.prompts.special_ids) if limit else None
            if prefixes is not None:
                undo.callback(prefixes.close)
            needs = find_needs(opened, keeps_windows=kept_bytes > 0 or prefixes is not None)
            self.kept = KeptKeys(opened, kept_bytes, Admission(opened, needs), prefixes)
            self.engine = self._open_engine(opened, options)
            undo.callback(self.engine.worker.stop, 0)
            self._serve(opened, options)
            undo.pop_all()

    def _open_engine(self, model: Any, options: Mapping[str, Any]) -> Engine:
        from torch_mesh.serving.batches import Batches
        from torch_mesh.serving.engine import Engine

        if not options["continuous_batching"]:
            return Engine(self.kept, self.prompts.tokenizer)
        if not hasattr(model, "init_continuous_batching"):
            raise ValueError(f"{self.model} has no continuous batching in transformers: leave the option out")
        return Batches(self.kept, self.prompts.tokenizer, options["blocks"])

    def _serve(self, model: Any, options: Mapping[str, Any]) -> None:
        import uvicorn
        from transformers.utils.logging import log_levels  # uvicorn has no "detail"

        from torch_mesh.serving.app import build_app
        from torch_mesh.serving.metrics import Metrics
        from torch_mesh.serving.service import Service

        service = self._service = Service(
            self.model, model, self.prompts, self.engine, options["continuous_batching"], options["default_tokens"]
        )
        app = build_app(
            service,
            Metrics(self._counters, self.engine.progress),
            options["enable_cors"],
            options["api_key"],
            options["host"] if options["api_key"] is None and not options["allow_anyone"] else None,
        )
        self._server = uvicorn.Server(
            uvicorn.Config(app, host=options["host"], port=options["port"], log_level=log_levels[options["log_level"]])
        )
        self._thread = threading.Thread(target=self._run, name="torch-mesh-http")
        self._thread.start()
        try:
            while not self._server.started:
                if not self._thread.is_alive():
                    raise MeshError(
                        f"The server has ended before it began to listen on {options['host']}:{options['port']}."
                    )
                time.sleep(0.01)
        except BaseException:  # Ctrl-C: the process would wait for the thread forever
            self._server.should_exit = True
            self._thread.join()
            raise
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):  # such as a port that was taken meanwhile, which is logged
            asyncio.run(self._server.serve())

    def _counters(self) -> tuple[Stats, Counts]:
        # Not stats(): it counts each expert, and raises a pending error of a GPU, which the next forward would miss.
        return pool_stats(self.kept.model, experts=False), self.kept.counts

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, grace: float = GRACE) -> None:
        """Refuse further requests, and stop.

        Pending requests have ``grace`` seconds, then get status 503. Waits up to AFTERMATH seconds for their
        computation.
        """
        if self._stopped:
            return
        self._stopped = True
        self._server.should_exit = True
        self._thread.join(grace)
        end = time.monotonic() + AFTERMATH
        if self._thread.is_alive():
            self.engine.abort()
            for pool in {module._mesh_pool for module in patched_modules(self.kept.model)}:
                pool.close()  # running computations raise
            self._thread.join(_ANSWERING)
            self._server.force_exit = True  # a client does not read its answer
            self._thread.join(_ANSWERING)
        self.engine.stop()
        # The process would abort if it ended before the thread of generate.
        self.engine.worker.stop(max(0, end - time.monotonic()))
        if self.kept.prefixes is not None:
            self.kept.prefixes.close()
        # The application has reference cycles, and FastAPI keeps its functions.
        self._service.close()
        del self._server, self.engine, self.prompts, self.kept
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _check_packages() -> None:
    missing = []
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise ImportError(f"To serve a model torch_mesh needs {', '.join(missing)}: {HOW_TO_INSTALL}")
