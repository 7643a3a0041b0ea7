"""Errors of a server in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import reprlib
from typing import Any

from torch_mesh.errors import MeshError


class AnsweredError(MeshError):
    """An error for the client: HTTP ``status``, OpenAI's ``code``, and ``param``, the field in question."""

    status = 500
    code: str | None = None
    param: str | None = None


class RequestError(AnsweredError):
    status = 400
    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MissingFieldError(RequestError):
    """A request without a required field."""

    code = "missing_required_parameter"


class UnknownFieldError(RequestError):
    """A field that this server does not support."""

    code = "unknown_parameter"


class ThreadError(RequestError):
    """A request for a thread. Anthropic's client then sends all messages itself, because of this code."""

    code = "thread_unsupported_request"

    def __init__(self) -> None:
        super().__init__("This server keeps no threads: leave out thread, and send all messages.", "thread")


class RequestTooLongError(RequestError):
    """A request that needs more than is available. ``room``: how many new tokens would fit, 0 or less for none."""

    code = "context_length_exceeded"

    def __init__(self, message: str, room: int) -> None:
        super().__init__(message)
        self.room = room


class ModelNotFoundError(RequestError):
    """A request for another model than the one that is served."""

    status = 404
    code = "model_not_found"


class ApiKeyError(AnsweredError):
    """A request without the server's key, or with another."""

    status = 401
    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__(
            "This server requires its key (that of --api-key or TORCH_MESH_API_KEY): send Authorization: Bearer KEY, "
            "or x-api-key: KEY."
        )


class HostError(AnsweredError):
    """A request by a host name that is not this machine's."""

    status = 403
    code = "host_not_allowed"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"The request's header Host is {reprlib.repr(host)}; without a key this server answers to localhost and "
            "loopback addresses only: ask for localhost or 127.0.0.1, or start it with a key in the variable "
            "TORCH_MESH_API_KEY, or with --allow-anyone."
        )


class BodyTooLargeError(RequestError):
    """A body of more than ``MAX_BYTES``."""

    MAX_BYTES = 64 << 20  # pictures and sound of a long conversation, in base64

    status = 413
    code = "request_too_large"

    def __init__(self) -> None:
        super().__init__(
            f"The request's body has more than {self.MAX_BYTES >> 20} MiB: send less, such as smaller pictures or a "
            "shorter conversation."
        )


class StoppingError(AnsweredError):
    """The server is stopping, and this request did not finish in time."""

    status = 503
    code = "server_stopping"

    def __init__(self) -> None:
        super().__init__("The server is stopping and has ended this request. Send it again when the server is back.")


class FailedRequestError(AnsweredError):
    """A request that failed because of an error of the server."""


def envelope(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error.

    Lone surrogates in ``message`` are escaped: JSON allows them, UTF-8 does not.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": _utf8(message), "type": kind, "param": param and _utf8(param), "code": code}}


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


# Anthropic's names of errors, by status.
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
}


def for_anthropic(body: dict[str, Any], status: int) -> dict[str, Any]:
    """The body of an error in Anthropic's form."""
    error = body["error"]
    own = {"type": _ANTHROPIC.get(status, "api_error"), "details": {"error_code": error["code"]}}
    return {"type": "error", "error": error | own}


def describe_at(path: str, error: Exception) -> tuple[dict[str, Any], int]:
    """``describe`` in the form of the API at ``path``."""
    return _at(path, *describe(error))


def _at(path: str, body: dict[str, Any], status: int) -> tuple[dict[str, Any], int]:
    return (for_anthropic(body, status) if path.startswith("/v1/messages") else body), status


def describe(error: Exception) -> tuple[dict[str, Any], int]:
    """Body and status of the response to a request that failed with ``error``."""
    if isinstance(error, AnsweredError):
        return envelope(str(error), error.status, param=error.param, code=error.code), error.status
    return envelope(f"{type(error).__name__}: {error}", 500), 500


def answer_errors(app: Any) -> None:
    """Make ``app`` answer all errors in this form, also those of FastAPI."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    async def known(request: Request, error: Exception) -> JSONResponse:
        body, status = describe_at(request.url.path, error)
        return JSONResponse(body, status_code=status)

    # After answering any other Exception Starlette raises it again: it is logged, and the connection is closed.
    for kind in (AnsweredError, Exception):
        app.add_exception_handler(kind, known)

    @app.exception_handler(RequestValidationError)
    async def not_an_object(request: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()[0]
        reason = found.get("ctx", {}).get("error", found["msg"])
        message = f"The body must be a JSON object, with Content-Type: application/json: {reason}."
        body, status = _at(request.url.path, envelope(message, 400), 400)
        return JSONResponse(body, status_code=status)

    @app.exception_handler(HTTPException)
    async def of_address(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.__cause__ is not None:  # of a body that is not UTF-8, or compressed, or too deep
            message += f" ({type(error.__cause__).__name__}: {error.__cause__})"
        body, status = _at(request.url.path, envelope(message, error.status_code), error.status_code)
        return JSONResponse(body, status_code=status, headers=error.headers)
