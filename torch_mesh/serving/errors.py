"""Errors of a server in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_mesh.errors import MeshError


class AnsweredError(MeshError):
    """An error for the client: HTTP ``status``, OpenAI's ``code``, and ``param``, the field in question."""

    status = 500
    code: str | None = None
    param: str | None = None


class RequestError(AnsweredError):
    """A refused request."""

    status = 400
    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MissingFieldError(RequestError):
    """A request without a required field."""

    code = "missing_required_parameter"


class RequestTooLongError(RequestError):
    """A request that needs more than is available."""

    code = "context_length_exceeded"

    def __init__(self, message: str) -> None:
        super().__init__(message, "max_tokens")


class ModelNotFoundError(RequestError):
    """A request for another model than the one that is served."""

    status = 404
    code = "model_not_found"


class StoppingError(AnsweredError):
    """The server is stopping, and this request did not finish in time."""

    status = 503
    code = "server_stopping"

    def __init__(self) -> None:
        super().__init__("The server is ending and has cut this request off. Ask again when it is back.")


class FailedRequestError(AnsweredError):
    """A request that failed through no fault of its own."""


def envelope(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error.

    Lone surrogates in ``message`` are escaped: JSON allows them, UTF-8 does not.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[dict[str, Any], int]:
    """Body and status of the answer to a request that ended with ``error``."""
    from transformers.cli.serving.utils import CBWorkerDeadError

    if isinstance(error, AnsweredError):
        return envelope(str(error), error.status, param=error.param, code=error.code), error.status
    status = 503 if isinstance(error, CBWorkerDeadError) else 500
    return envelope(f"{type(error).__name__}: {error}", status), status


def answer_errors(app: Any) -> None:
    """Let ``app`` answer every error in this format, including those of transformers and FastAPI."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from transformers.cli.serving.utils import CBWorkerDeadError

    async def known(_: Request, error: Exception) -> JSONResponse:
        body, status = describe(error)
        return JSONResponse(body, status_code=status)

    # Starlette re-raises other exceptions after answering: they are logged, and the connection is closed.
    for kind in (AnsweredError, CBWorkerDeadError, Exception):
        app.add_exception_handler(kind, known)

    @app.exception_handler(RequestValidationError)
    async def not_an_object(_: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()[0]
        reason = found.get("ctx", {}).get("error", found["msg"])
        message = f"The body has to be a JSON object, with Content-Type: application/json: {reason}."
        return JSONResponse(envelope(message, 400), status_code=400)

    @app.exception_handler(HTTPException)
    async def of_transformers(request: Request, error: HTTPException) -> JSONResponse:
        status = 400 if error.status_code == 422 else error.status_code  # OpenAI has 400 for both
        message, param = _said(error.detail)
        if status in (404, 405):
            message = f"{request.method} {request.url.path}: {message}"
        return JSONResponse(envelope(message, status, param=param), status_code=status, headers=error.headers)


def _said(detail: Any) -> tuple[str, str | None]:
    """Message and field of FastAPI's detail: a text, or what pydantic found."""
    if not isinstance(detail, Sequence) or isinstance(detail, str):
        return str(detail), None
    fields = [".".join(map(str, each["loc"][1:])) for each in detail if isinstance(each, Mapping)]
    lines = [f"{field}: {each['msg']}" if field else each["msg"] for field, each in zip(fields, detail, strict=True)]
    return "; ".join(lines), fields[0] if fields and fields[0] else None
