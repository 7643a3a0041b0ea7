"""The HTTP application: its addresses, and the middleware of every request."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hmac
import ipaddress
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from torch_mesh.serving import left_out
from torch_mesh.serving.answers import running
from torch_mesh.serving.anthropic_api import Anthropic
from torch_mesh.serving.errors import (
    AnsweredError,
    ApiKeyError,
    BodyTooLargeError,
    HostError,
    MissingFieldError,
    answer_errors,
    describe,
    describe_at,
)
from torch_mesh.serving.metrics import Metrics
from torch_mesh.serving.openai_api import OpenAI, event
from torch_mesh.serving.requests import check_model, check_values
from torch_mesh.serving.service import Service

_LOG = logging.getLogger(__name__)
_REQUEST_ID = b"x-request-id"
_READ = ["GET", "HEAD"]
_DISCARD_SECONDS = 5.0  # for the rest of a body that is refused
QUIET = 10.0  # seconds of a silent stream until a comment keeps the connection open


def build_app(
    service: Service, metrics: Metrics, allow_origins: bool, api_key: str | None, host: str | None
) -> FastAPI:
    """The application of one model.

    Args:
        allow_origins: accept requests of web pages of any site.
        api_key: required of requests. None: no key.
        host: the loopback name or address by which requests have to ask, as any other of this machine. None: any host.
    """
    app = FastAPI(title="torch-mesh serve", docs_url=None, redoc_url=None, openapi_url=None)
    answer_errors(app)
    _add_answers(app, service)
    _add_models(app, service.served)
    _add_state(app, service, metrics)
    # The middleware added last runs first: a body is read only for a client that may ask.
    app.add_middleware(_BodyLimit)
    if api_key is not None:
        app.add_middleware(_ApiKeyMiddleware, key=api_key)
    if host is not None:
        app.add_middleware(_HostMiddleware, host=host)
    if allow_origins:
        readable = [left_out.HEADER, _REQUEST_ID.decode()]  # by a page's script
        app.add_middleware(
            CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"], expose_headers=readable
        )
    app.add_middleware(_RequestIds)
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    """The addresses at which the model computes."""
    openai, anthropic = OpenAI(service), Anthropic(service)
    posts = {
        "/v1/chat/completions": openai.chat,
        "/v1/completions": openai.completions,
        "/v1/responses": openai.responses,
        "/v1/messages": anthropic.messages,
        "/v1/messages/count_tokens": anthropic.count_tokens,
    }

    async def answer(request: Request, made: Awaitable[dict[str, Any] | AsyncGenerator[str, None]]) -> Response:
        """Respond with a body or a stream. A disconnecting client ends its computation."""
        notes = left_out.collect()
        found = await _while_connected(request, made)
        headers = left_out.headers(notes)
        if isinstance(found, dict):
            return JSONResponse(found, headers=headers)
        parts = _kept_alive(_ending_with_error(found), service.engine.progress.describe)
        return StreamingResponse(parts, media_type="text/event-stream", headers=headers)

    def add_post(path: str, make: Callable[[dict[str, Any]], Any]) -> None:
        @app.post(path, response_model=None)
        async def post(request: Request, body: dict[str, Any]) -> Response:
            return await answer(request, make(body))

    for path, make in posts.items():
        add_post(path, make)


def _add_models(app: FastAPI, served: str) -> None:
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    about = {"id": served, "object": "model", "created": int(now.timestamp()), "owned_by": "torch_mesh"}
    about |= {"type": "model", "display_name": served, "created_at": now.isoformat()}  # Anthropic's

    @app.api_route("/v1/models", methods=_READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @app.api_route("/v1/models/{name:path}", methods=_READ)
    async def model(name: str) -> dict[str, Any]:
        check_model(name, served)
        return about

    @app.post("/load_model", response_model=None)
    async def load_model(body: dict[str, Any]) -> Response:
        """transformers' clients call this first. The model is loaded already."""
        await asyncio.to_thread(check_values, body)
        if body.get("model") is None:
            raise MissingFieldError(f"model is missing: give {served!r}.", "model")
        check_model(body["model"], served)
        ready = {"status": "ready", "model": served, "cached": True}
        return Response(event(ready), media_type="text/event-stream")


def _add_state(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.api_route("/health", methods=_READ)
    async def health() -> Response:
        healthy = service.engine.is_healthy()
        return JSONResponse({"status": "ok" if healthy else "unhealthy"}, status_code=200 if healthy else 503)

    @app.api_route("/metrics", methods=_READ)
    def counters() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _while_connected(request: Request, made: Awaitable[Any]) -> Any:
    async with running(made, _disconnected(request)) as tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise _DisconnectedError("The client has disconnected.")
        return tasks[0].result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _DisconnectedError(AnsweredError):
    status = 499  # client closed the request: for the log only


async def _ending_with_error(parts: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    try:
        async with contextlib.aclosing(parts) as several:
            async for part in several:
                yield part
    except Exception as error:  # noqa: BLE001  the answer has begun: its status cannot say so any more
        if not isinstance(error, AnsweredError):
            _LOG.error("A stream has failed", exc_info=error)
        yield f"data: {json.dumps(describe(error)[0])}\n\n"


async def _kept_alive(parts: AsyncGenerator[str, None], comment: Callable[[], str]) -> AsyncGenerator[str, None]:
    """Comments while a stream is silent: proxies and clients close silent connections."""
    following = None
    async with contextlib.aclosing(parts):
        try:
            while True:
                following = asyncio.ensure_future(anext(parts))
                while not (await asyncio.wait({following}, timeout=QUIET))[0]:
                    yield f": {comment()}\n\n"
                try:
                    part = following.result()
                except StopAsyncIteration:
                    return
                yield part
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


class _HostMiddleware:
    """Refuses requests by another name than this machine's: it could belong to another site's page (DNS rebinding)."""

    def __init__(self, app: Any, host: str) -> None:
        self._app, self._host = app, host.lower()

    async def __call__(self, scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        given = dict(scope["headers"]).get(b"host") if scope["type"] == "http" else None
        if given is None or self._is_own(host := given.decode("latin-1")):  # every browser sends the header
            return await self._app(scope, receive, send)
        body, status = describe_at(scope["path"], HostError(host))
        return await JSONResponse(body, status)(scope, receive, send)

    def _is_own(self, given: str) -> bool:
        name = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
        if name.lower().removesuffix(".") in ("localhost", self._host):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class _ApiKeyMiddleware:
    def __init__(self, app: Any, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._fits(dict(scope["headers"])):
            return await self._app(scope, receive, send)
        body, status = describe_at(scope["path"], ApiKeyError())
        return await JSONResponse(body, status, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _fits(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [bearer.strip()] if scheme.lower() == b"bearer" else []
        return any(hmac.compare_digest(each, self._key) for each in (*given, headers.get(b"x-api-key", b"")))


class _BodyLimit:
    """Reads a body before the application does, and refuses one that is too large."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] == "/health":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        too_large = announced.isdigit() and int(announced) > BodyTooLargeError.MAX_BYTES
        parts, unread, size = [], True, 0
        while unread and not too_large:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            too_large = size > BodyTooLargeError.MAX_BYTES
            unread = message.get("more_body", False)
        if too_large:
            # A client that still sends when the connection is closed may not see the answer. One that asks first sends
            # nothing, unless this reads.
            if unread and (parts or headers.get(b"expect", b"").lower() != b"100-continue"):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(_discard(receive), _DISCARD_SECONDS)
            error, status = describe_at(scope["path"], BodyTooLargeError())
            return await JSONResponse(error, status, {"Connection": "close"})(scope, receive, send)
        read = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]
        del parts

        async def receiving() -> Any:
            return read.pop() if read else await receive()

        return await self._app(scope, receiving, send)


async def _discard(receive: Callable[..., Any]) -> None:
    while (await receive()).get("more_body", False):
        pass


class _RequestIds:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == _REQUEST_ID), uuid.uuid4().hex.encode())

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (_REQUEST_ID, given)]}
            await send(message)

        return await self._app(scope, receive, sending)
