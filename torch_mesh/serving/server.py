"""A server of one model: open it, listen, and stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging as transformers_logging

from torch_mesh.config import MeshConfig
from torch_mesh.errors import MeshError
from torch_mesh.modules.experts import patched_modules
from torch_mesh.serving.admission import Admission, find_needs
from torch_mesh.serving.kept_keys import Counts, KeptKeys
from torch_mesh.serving.opening import open_processor, open_served, source_of
from torch_mesh.serving.padded_products import pad_products
from torch_mesh.serving.prefix_cache import PrefixCache
from torch_mesh.serving.prompts import NO_TEMPLATE, Prompts
from torch_mesh.statistics.counters import Stats
from torch_mesh.statistics.stats import stats
from torch_mesh.validators import parse_size

if TYPE_CHECKING:
    from typing_extensions import Self

    from torch_mesh.serving.engine import Engine

HOW_TO_INSTALL = "pip install torch_mesh[serve]"
GRACE = 5.0  # seconds for pending requests when the server stops
AFTERMATH = 20.0  # further seconds for computations to end
# Products that oneDNN keeps ready, each of 0.3 MB: more than a forward has, less than its default of 1,024, which
# prompts of all lengths would fill.
_COMPILED_PRODUCTS = "128"
_ANSWERING = 2.0  # seconds for error responses to pending requests


@dataclass(frozen=True)
class Option:
    """An option of ``torch-mesh serve`` beside the fields of MeshConfig."""

    name: str
    default: Any
    kind: type
    about: str
    choices: tuple[str, ...] = ()


# Options of transformers' ContinuousBatchingConfig, there without the prefix.
_BATCHES = "cb_"
OPTIONS = (
    Option(
        "continuous_batching",
        False,
        bool,
        "Compute concurrent requests together, by transformers' continuous batching.",
    ),
    Option(
        "prefix_cache",
        "off",
        str,
        "Disk for keys and values of conversations, also of earlier processes, in the folder of torch-mesh cache: a "
        "size such as 8GiB, or off.",
    ),
    Option("attn_implementation", None, str, "Attention of transformers (such as sdpa or eager)."),
    Option("compile", False, bool, "Compile decode steps, with a static cache."),
    Option(
        "reasoning",
        "auto",
        str,
        "Whether the model reasons before it answers, where its chat template has a switch for it.",
        ("auto", "on", "off"),
    ),
    Option(
        "chat_template_kwargs",
        None,
        str,
        "Variables of the chat template, as a JSON object; a request may give others.",
    ),
    Option("decision_config", None, str, "JSON file with the labels, temperatures and template of /v1/systemone."),
    Option("device", "auto", str, "Where the model runs (auto, cpu, cuda:0)."),
    Option("dtype", "auto", str, "Type of the weights that are no experts' (auto, bfloat16, float32)."),
    Option("trust_remote_code", False, bool, "Run code that the checkpoint brings."),
    Option("cb_block_size", None, int, "Tokens in a block of keys of continuous batching."),
    Option("cb_num_blocks", None, int, "Blocks of keys of continuous batching."),
    Option("cb_max_batch_tokens", None, int, "Tokens in a forward of continuous batching, at most."),
    Option("cb_max_memory_percent", None, float, "Fraction of memory for blocks of keys, from 0 to 1."),
    Option("cb_use_cuda_graph", None, bool, "Continuous batching with CUDA graphs."),
    Option("host", "localhost", str, "Address to listen at."),
    Option("port", 8000, int, "Port to listen at; 0 for any that is free."),
    Option("api_key", None, str, "Key that requests need, as Authorization: Bearer KEY or x-api-key: KEY."),
    Option("allow_anyone", False, bool, "Let a host that others reach listen without a key."),
    Option("enable_cors", False, bool, "Let web pages of any site ask."),
    Option("log_level", "warning", str, "From which level on there is a log.", tuple(transformers_logging.log_levels)),
    Option("default_seed", None, int, "Seed of requests without one, drawn anew at each start unless given."),
)


class Server:
    """Serves in threads of its own, from its creation to ``stop``.

    Args:
        model: a folder, a GGUF file, or a model of the hub.
        kept_bytes: memory for keys that are kept between requests.
        given: values of OPTIONS, by name.
        must_chat: raise for a model without a chat template.

    Raises ImportError for a missing package, ValueError for an invalid option, OSError if the address is in use, and
    the errors of opening a model.
    """

    _stopped = False

    def __init__(
        self, model: str, config: MeshConfig, kept_bytes: int, given: Mapping[str, Any], must_chat: bool = False
    ) -> None:
        _check_packages()
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _COMPILED_PRODUCTS)  # read with the first product
        source = source_of(model)
        self.model = source.name
        # Before the model is opened, which may take long.
        options = settle_options(given)
        _check_key(options)
        _check_address(options["host"], options["port"])
        processor = open_processor(source, options["trust_remote_code"])
        if must_chat and not getattr(processor, "chat_template", None):
            raise ValueError(f"{self.model} {NO_TEMPLATE}")
        opened = open_served(source, config, options)
        if not options["compile"]:
            pad_products(opened)
        self.prompts = Prompts(self.model, processor, opened.config.model_type, opened.device, options["arguments"])
        limit = options["prefix_bytes"]
        prefixes = PrefixCache(opened, limit, self.prompts.special_ids) if limit else None
        needs = find_needs(opened, keeps_windows=kept_bytes > 0 or prefixes is not None)
        self.kept = KeptKeys(opened, kept_bytes, Admission(opened, needs), prefixes)
        self._serve(opened, options)

    def _serve(self, model: Any, options: Mapping[str, Any]) -> None:
        import uvicorn

        from torch_mesh.serving.app import build_app
        from torch_mesh.serving.batches import Batches
        from torch_mesh.serving.decisions import Decisions, is_available
        from torch_mesh.serving.engine import Engine
        from torch_mesh.serving.metrics import Metrics
        from torch_mesh.serving.service import Service

        batches = options["continuous_batching"]
        if batches:
            if not hasattr(model, "init_continuous_batching"):
                raise ValueError(f"{self.model} has no continuous batching in transformers: leave the option out")
            self.engine: Engine = Batches(self.kept, self.prompts.tokenizer, options["blocks"])
        else:
            self.engine = Engine(self.kept, self.prompts.tokenizer, options["compile"])
        service = self._service = Service(self.model, model, self.prompts, self.engine, options["compile"], batches)
        decisions = Decisions(service, options["decision_config"]) if is_available() else None
        app = build_app(
            service, Metrics(self._now, self.engine.progress), decisions, options["enable_cors"], options["api_key"]
        )
        self._server = uvicorn.Server(
            uvicorn.Config(app, host=options["host"], port=options["port"], log_level=options["log_level"])
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
            raise
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):  # such as a port that was taken meanwhile, which is logged
            asyncio.run(self._server.serve())

    def _now(self) -> tuple[Stats, Counts]:
        return stats(self.kept.model), self.kept.counts

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
            self.engine.cut_off()
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


def settle_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """All OPTIONS, and what follows from them: ``arguments`` of the chat template, ``prefix_bytes`` and ``blocks``, of
    continuous batching. Sets the level of the log, and the seed.

    Raises ValueError for an option that cannot be, ImportError where a package is missing.
    """
    options = {option.name: option.default for option in OPTIONS} | dict(given)
    _check_decision_config(options["decision_config"])
    _check_numbers(options)
    if options["dtype"] != "auto" and not isinstance(getattr(torch, options["dtype"], None), torch.dtype):
        raise ValueError(f"--dtype {options['dtype']} is none of torch: give auto, bfloat16, float16 or float32")
    blocks = {
        name.removeprefix(_BATCHES): value
        for name, value in options.items()
        if name.startswith(_BATCHES) and value is not None
    }
    derived = {"arguments": _template_arguments(options), "prefix_bytes": _prefix_bytes(options), "blocks": blocks}
    logging.getLogger("transformers").setLevel(transformers_logging.log_levels[options["log_level"]])
    if options["default_seed"] is None:
        torch.seed()
    else:
        torch.manual_seed(options["default_seed"])
    return options | derived


def _check_packages() -> None:
    missing = []
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise ImportError(f"To serve a model torch_mesh needs {', '.join(missing)}: {HOW_TO_INSTALL}")


def _template_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    text = options["chat_template_kwargs"]
    given: Any = {}
    if text:
        with contextlib.suppress(ValueError):
            given = json.loads(text)
        if not isinstance(given, dict) or (not given and text.strip() != "{}"):
            raise ValueError(
                f"--chat-template-kwargs is {text!r}, which is no JSON object; give one such as '{{\"name\": true}}'"
            )
    if options["reasoning"] != "auto":
        given["enable_thinking"] = options["reasoning"] == "on"
    return dict(given)


def _check_decision_config(path: str | None) -> None:
    if path is None:
        return
    try:
        from transformers.decision import DecisionConfig
    except ImportError as error:
        raise ImportError("--decision-config needs transformers 5.24 or later") from error
    try:
        DecisionConfig.from_file(path)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--decision-config {path} is not a decision config: {error}") from error


def _check_numbers(given: Mapping[str, Any]) -> None:
    """Check options of continuous batching now: it would check them with the first request, and end."""
    for name in ("cb_block_size", "cb_num_blocks", "cb_max_batch_tokens"):
        if (value := given[name]) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    fraction = given["cb_max_memory_percent"]
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"--cb-max-memory-percent {fraction} must be above 0 and at most 1")


def _prefix_bytes(given: Mapping[str, Any]) -> int:
    """0: no prefix cache."""
    size = given["prefix_cache"]
    if size == "off":
        return 0
    for name in ("compile", "continuous_batching"):
        if given[name]:
            raise ValueError(f"--prefix-cache {size} is not possible with --{name.replace('_', '-')}: leave one out")
    try:
        return parse_size(int(size) if size.isdigit() else size, "--prefix-cache")
    except ValueError as error:
        raise ValueError(f"{error} Or give off.") from None


def _check_key(given: Mapping[str, Any]) -> None:
    key, host = given["api_key"], given["host"]
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ValueError("--api-key has to be printable ASCII without blanks, since it is sent in a header")
    if key is None and not given["allow_anyone"] and not _is_loopback(host):
        raise ValueError(
            f"--host {host} lets other machines ask, and there is no key: give --api-key, or --allow-anyone for none"
        )


def _is_loopback(host: str) -> bool:
    """Of every address that ``host`` stands for. One that stands for none is refused where it is listened at."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
    return True


def _check_address(host: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ValueError(f"--port {port} is not a port: give 1 to 65535, or 0 for any free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot listen on {host}:{port}: {error.strerror}; give another --host or --port"
        ) from error
