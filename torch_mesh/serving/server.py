"""``transformers serve`` for one model that is opened with a MeshConfig.

It is transformers' own server with two parts replaced: the model manager, which opens the model, and the application,
which gets one more address.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import json
import os
import re
import socket
import threading
import time
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging
from transformers.utils.import_utils import is_serve_available

from torch_mesh.config import MeshConfig
from torch_mesh.errors import MeshError
from torch_mesh.hf.compat import generation_managers, generation_state
from torch_mesh.modules.experts import patched_modules
from torch_mesh.serving.admission import Admission, find_needs
from torch_mesh.serving.errors import MissingFieldError, RequestError, answer_errors
from torch_mesh.serving.handling import Requests, blaming_messages, keeping_unparsed, noting_failures
from torch_mesh.serving.kept_keys import Counts, KeptKeys
from torch_mesh.serving.requests import check_model_name, check_values
from torch_mesh.statistics.counters import Stats
from torch_mesh.statistics.stats import stats
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.header import check_folder, store_error
from torch_mesh.store.hub import local_folder

if TYPE_CHECKING:
    from typing_extensions import Self

HOW_TO_INSTALL = "pip install torch_mesh[serve]"
GRACE = 5.0  # seconds for pending requests when the server stops
AFTERMATH = 20.0  # further seconds for computations to end
_ANSWERING = 2.0  # seconds for answers to requests that are cut off

_NO_TEMPLATE = (
    "has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), as models that are not "
    "made for chats: put one beside its tokenizer (for Qwen's models ChatML, which docs/serving.md has), or use a "
    "server's /v1/completions."
)

# Addresses of transformers' server that are removed. /reset is for its tests: any page in a browser could unload the
# model with it, since a POST without a body needs no permission. Transcriptions need a model without a prompt.
# /load_model is added again with a check of its body.
_NOT_SERVED = ("/reset", "/v1/audio/transcriptions", "/load_model")

# Options of transformers' server that MeshConfig, or torch_mesh's way to run it, replaces.
_NOT_TAKEN = ("self", "force_model", "quantization", "model_timeout", "non_blocking")


@dataclass(frozen=True)
class Option:
    """An option of transformers' server."""

    name: str
    default: Any
    kind: type
    choices: tuple[str, ...]
    about: str


def options() -> list[Option]:
    """The options of the installed ``transformers serve``."""
    from transformers.cli.serve import Serve

    start = Serve.__init__
    hints = typing.get_type_hints(start, include_extras=True)
    found = []
    for name, parameter in inspect.signature(start).parameters.items():
        if name in _NOT_TAKEN:
            continue
        hint, *about = typing.get_args(hints[name])
        kinds = [each for each in (typing.get_args(hint) or (hint,)) if each is not type(None)]
        members = getattr(kinds[0], "__members__", None)
        choices = () if members is None else tuple(str(member.value) for member in members.values())
        if name == "log_level":  # transformers looks it up unchecked
            choices = tuple(logging.log_levels)
        text = next((each.help for each in about if getattr(each, "help", None)), "")
        found.append(Option(name, parameter.default, str if choices else kinds[0], choices, text))
    return found


# owner/model, @revision, and a GGUF file of it behind a colon (transformers) or a slash (torch_mesh).
_ON_HUB = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<repo>[^:@]+)(?P<revision>@[^:@]+)?:(?P<file>[^:]+(?i:\.gguf))",
        r"(?P<repo>[^/:@]+/[^/:@]+)(?P<revision>@[^/:@]+)?/(?P<file>[^:]+(?i:\.gguf))",
        r"(?P<repo>[^:@]+)(?P<revision>@[^:@]+)?",
    )
)


def name_for(model: str) -> str:
    """The name of a model in transformers' server: for a GGUF file its folder or repository, revision, a colon and the
    file.

    Raises ValueError for a path that it would misread, StoreError for a path that does not exist.
    """
    if os.path.lexists(model) or model.startswith(("/", "./", "../", "~")):
        check_path = check_folder if not is_gguf(model) else _check_file
        check_path(model)
        folder, _, file = model.rpartition("/") if is_gguf(model) else (model, "", "")
        if special := re.search("[:@]", folder):
            raise ValueError(
                f"{model}: transformers takes what follows {special[0]!r} for a revision or a file. Rename the "
                "folder, or make a link to it."
            )
        return f"{folder or '.'}:{file}" if file else folder
    found = next((match for pattern in _ON_HUB if (match := pattern.fullmatch(model))), None)
    try:
        if found is None or is_gguf(found["repo"]):
            raise HFValidationError
        validate_repo_id(found["repo"])
    except HFValidationError:
        raise ValueError(
            f"{model}: there is no such file or folder, and a model of the hub is named owner/model, "
            "owner/model@revision, "
            "owner/model/file.gguf or owner/model@revision/folder/file.gguf"
        ) from None
    parts = found.groupdict()
    return f"{parts['repo']}{parts['revision'] or ''}" + (f":{parts['file']}" if parts.get("file") else "")


def _check_file(path: str) -> None:
    if not os.path.isfile(path):
        raise store_error(path, "there is no such file")


class Server:
    """A server that runs in its own threads until ``stop``.

    ``kept_bytes``: limit of KV caches kept between requests. ``must_chat``: refuse models without a chat template.
    Raises ImportError for a missing package, OSError for an unusable address, and the errors of opening a model.
    """

    def __init__(
        self, model: str, config: MeshConfig, kept_bytes: int, given: Mapping[str, Any], must_chat: bool = False
    ) -> None:
        serve = _transformers_serve()
        self.must_chat = must_chat
        self.model = name_for(model)
        given = {option.name: option.default for option in options()} | dict(given)
        # Before the model is opened, which may take long.
        _check_template_arguments(given.get("chat_template_kwargs"))
        _check_decision_config(given.get("decision_config"))
        _check_blocks_options(given)
        _check_address(given["host"], given["port"])
        with _in_place_of_transformers(self.model, config, kept_bytes, self):
            self._serve = serve(self.model, **given, non_blocking=True)
        self._thread: threading.Thread = self._serve._thread
        try:
            while not self._serve.server.started:
                if not self._thread.is_alive():
                    raise MeshError(f"The server ended before it began to listen on {given['host']}:{given['port']}.")
                time.sleep(0.01)
        except BaseException:  # Ctrl-C: the process would wait for the thread for ever
            self._serve.server.should_exit = True
            raise
        host, port = self._serve.server.servers[0].sockets[0].getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    manager: Any = None  # of transformers' classes, once it exists
    requests: Requests

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, grace: float = GRACE) -> None:
        """Refuse further requests, and end.

        Pending requests have ``grace`` seconds, then get status 503. Their computation is waited for, at most AFTERMATH
        seconds.
        """
        server = self._serve.server
        server.should_exit = True
        self._thread.join(grace)
        end = time.monotonic() + AFTERMATH
        if self._thread.is_alive():
            self.requests.cut_off()
            for model in [timed.model for timed in list(self.manager.loaded_models.values())]:
                # None: transformers is unloading it.
                for pool in set() if model is None else {module._mesh_pool for module in patched_modules(model)}:
                    pool.close()  # pending computations raise
            self._thread.join(_ANSWERING)
            server.force_exit = True  # a client does not read its answer
            self._thread.join(_ANSWERING)
        generation = generation_state(self._serve)
        generation.shutdown()
        # After the threads of generate: a process that ends before they do is aborted.
        for manager in generation_managers(generation):
            with contextlib.suppress(concurrent.futures.TimeoutError):
                manager.submit(lambda: None).result(max(0, end - time.monotonic()))
        self.manager.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


@contextlib.contextmanager
def _in_place_of_transformers(model: str, config: MeshConfig, kept_bytes: int, server: Server) -> Iterator[None]:
    from fastapi import Response
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from transformers.cli.serving import model_manager
    from transformers.cli.serving import server as application

    from torch_mesh.serving.metrics import Metrics

    class Manager(model_manager.ModelManager):
        kept: KeptKeys | None = None

        def get_quantization_config(self) -> Any:
            return config

        def _load_processor(self, model_id_and_revision: str, gguf_file: str | None = None) -> Any:
            """From the model's own files: transformers would look for another revision and download it."""
            name, _, revision = model_id_and_revision.partition("@")
            if gguf_file is not None and not any(map(os.path.isdir, (name, model_id_and_revision))):
                path = os.fspath(local_folder(f"{name}/{gguf_file}", revision=revision))
                model_id_and_revision = self.process_model_name(path.removesuffix(f"/{gguf_file}"))
            found = super()._load_processor(model_id_and_revision, gguf_file=gguf_file)
            if not getattr(found, "chat_template", None):
                if server.must_chat:
                    raise ValueError(f"{model} {_NO_TEMPLATE}")
                vars(found)["apply_chat_template"] = _refuse_chat
            else:
                vars(found)["apply_chat_template"] = blaming_messages(found.apply_chat_template)
            tokenizer = getattr(found, "tokenizer", found)
            vars(tokenizer)["parse_response"] = keeping_unparsed(tokenizer)
            return found

        def load_model_and_processor(  # type: ignore[override]  # nobody gives the others by position
            self, model_id_and_revision: str, *, gguf_file: str | None = None, **kwargs: Any
        ) -> Any:
            asked = self.process_model_name(model_id_and_revision), gguf_file
            named, _, file = model.partition(":")
            if asked != (self.process_model_name(named), file or None):
                raise ValueError(f"This server has {model} and opens no other model.")
            found, processor = super().load_model_and_processor(model_id_and_revision, gguf_file=gguf_file, **kwargs)
            if self.kept is None:
                self.kept = KeptKeys(found, kept_bytes, Admission(found, find_needs(found, kept_bytes > 0)))
                vars(found)["generate"] = noting_failures(self.kept.generate)
            return found, processor

        def shutdown(self) -> None:
            self.kept = None  # it refers to the model
            super().shutdown()

        def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
            """The served model, instead of the hub's cache."""
            return [{"id": model, "object": "model", "created": int(started), "owned_by": "torch_mesh"}]

        list_models = get_gen_models  # its name in transformers 5.24 and later

        def now(self) -> tuple[Stats, Counts] | None:
            kept = self.kept
            return None if kept is None else (stats(kept.model), kept.counts)

    started = time.time()
    build = application.build_server

    def build_server(manager: Manager, *args: Any, **kwargs: Any) -> Any:
        server.manager = manager
        app = build(manager, *args, **kwargs)
        answer_errors(app)
        server.requests = Requests(manager, kwargs["generation_state"], model)
        for handler in (*args, *kwargs.values()):
            server.requests.wrap_handler(handler)
        routes: list[Any] = app.routes
        (load,) = (route.endpoint for route in routes if getattr(route, "path", None) == "/load_model")
        app.router.routes[:] = [route for route in routes if getattr(route, "path", None) not in _NOT_SERVED]

        @app.post("/load_model", response_model=None)
        async def load_model(body: dict[str, Any]) -> Any:
            check_values(body)
            check_model_name(body.get("model"), model)
            if body.get("model") is None:
                raise MissingFieldError(f"model is missing: give {model!r}.", "model")
            return await load(body)

        registry = Metrics(manager.now).registry

        @app.get("/metrics")
        def metrics() -> Response:
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

        return app

    pieces: list[tuple[Any, str, Any]] = [
        (model_manager, "ModelManager", Manager),
        (application, "build_server", build_server),
    ]
    before = [getattr(module, name) for module, name, _ in pieces]
    for module, name, ours in pieces:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for (module, name, _), theirs in zip(pieces, before, strict=True):
            setattr(module, name, theirs)


def _refuse_chat(*_: Any, **__: Any) -> None:
    raise RequestError(f"This model {_NO_TEMPLATE}", "messages")


def _transformers_serve() -> Any:
    if not is_serve_available():
        raise ImportError(f"Serving a model needs fastapi, uvicorn and openai: {HOW_TO_INSTALL}")
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Serving a model needs prometheus_client: {HOW_TO_INSTALL}") from error
    from transformers.cli.serve import Serve

    return Serve


def _check_template_arguments(text: str | None) -> None:
    if not text:
        return
    with contextlib.suppress(ValueError):
        if isinstance(json.loads(text), dict):
            return
    raise ValueError(
        f"--chat-template-kwargs is {text!r}, which is not a JSON object; give one such as '{{\"name\": true}}'"
    )


def _check_decision_config(path: str | None) -> None:
    if path is None:
        return
    from transformers.decision import DecisionConfig

    try:
        DecisionConfig.from_file(path)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--decision-config {path} is not a decision config: {error}") from error


def _check_blocks_options(given: Mapping[str, Any]) -> None:
    """Check options of continuous batching, which would fail at the first request."""
    for name in ("cb_block_size", "cb_num_blocks", "cb_max_batch_tokens"):
        if (value := given.get(name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    share = given.get("cb_max_memory_percent")
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--cb-max-memory-percent {share} must be above 0 and at most 1")


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
