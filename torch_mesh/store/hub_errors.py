"""Errors of downloading a model from the Hugging Face hub: each cause in its own words, with advice."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)

from torch_mesh.errors import HubError

# Causes on this machine, with advice. {choose} stands for how to choose another folder.
_MORE_ROOM = "free some room there, or {choose} a folder on another disk"
_MORE_RIGHTS = "let this user read and write there, or {choose} a folder where it may"
_OF_THIS_MACHINE = {
    errno.ENOSPC: _MORE_ROOM,
    errno.EDQUOT: _MORE_ROOM,
    errno.EACCES: _MORE_RIGHTS,
    errno.EPERM: _MORE_RIGHTS,
    errno.EROFS: _MORE_RIGHTS,
    errno.EMFILE: "close some, or raise the limit of this process (ulimit -n)",
    errno.ENFILE: "close some, or raise the limit of the machine (sysctl fs.file-max)",
    errno.ENOTDIR: "a part of that path is a file: move it away, or {choose} another folder",
    errno.EISDIR: "that is a folder, where a file has to be: move it away, or {choose} another folder",
    errno.ENAMETOOLONG: "{choose} a folder with a shorter path",
    errno.ELOOP: "a link there leads back to itself: remove it, or {choose} another folder",
    errno.EIO: "look at the kernel's log (dmesg), or {choose} a folder on another disk",
}


@contextmanager
def hub_errors(source: str | os.PathLike[str], folder: str | os.PathLike[str], variable: str | None) -> Iterator[None]:
    """Within the block, errors of downloading ``source`` to ``folder`` get advice. ``variable``: the environment
    variable that moves the folder; None if it is beside the destination.

    Raises ``HubError`` for the hub's answers and connection errors, and an ``OSError`` of the same number for a full or
    broken disk, missing permissions, impossible paths, and too many open files.
    """
    try:
        yield
    except (HTTPError, HFValidationError, EntryNotFoundError, SafetensorsParsingError, OSError) as problem:
        raise _explained(os.fspath(source), problem, Path(folder), variable) from problem


def _explained(source: str, problem: Exception, folder: Path, variable: str | None) -> Exception:
    causes = list(_causes(problem))
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in _OF_THIS_MACHINE:
            return _local_error(source, cause, cause.errno, folder, variable)
    for cause in causes:
        if isinstance(cause, HfHubHTTPError):
            return HubError(f"{source}: {_answer(source, cause)}.")
    if isinstance(problem, HFValidationError):
        return HubError(f"{source}: there is no such folder, and no model of the hub can have such a name: {problem}")
    if isinstance(problem, SafetensorsParsingError):
        return HubError(f"{source}: the header of a file on the hub cannot be read: {problem}")
    if isinstance(problem, OfflineModeIsEnabled | LocalEntryNotFoundError) and huggingface_hub.is_offline_mode():
        return HubError(
            f"{source}: there is no such folder, {huggingface_hub.constants.HF_HUB_CACHE} does not have all of that "
            "model, and HF_HUB_OFFLINE forbids to ask the hub: unset it, or name a folder."
        )
    return HubError(
        f"{source}: there is no such folder, and the hub cannot be reached ({_first_line(causes[-1])}): check the "
        "network, or name a folder."
    )


def _local_error(source: str, problem: OSError, number: int, folder: Path, variable: str | None) -> OSError:
    where = folder if problem.filename is None else Path(os.fsdecode(problem.filename))
    if not where.is_relative_to(folder):  # a file of the hub's library, such as a token
        variable = "HF_HOME"
    choose = "choose as destination" if variable is None else f"set {variable} to"
    message = f"{os.strerror(number)} while {source} was fetched: {_OF_THIS_MACHINE[number].format(choose=choose)}"
    return OSError(number, message, os.fspath(where))


def _answer(source: str, problem: HfHubHTTPError) -> str:
    model = "/".join(source.split("/")[:2])
    if isinstance(problem, GatedRepoError):
        page = f"{huggingface_hub.constants.ENDPOINT}/{model}"
        return f"the model is gated: ask for access at {page}, then run `hf auth login`, or set HF_TOKEN"
    if isinstance(problem, RepositoryNotFoundError):
        return (
            "there is no such folder, and the hub has no such model, or shows it to some users only: check the name, "
            "or run `hf auth login`"
        )
    if isinstance(problem, RevisionNotFoundError):
        return "the hub's model has no such revision: name a branch, a tag or a commit of it"
    if isinstance(problem, EntryNotFoundError):
        return f"the hub's model lacks a file that is needed: {_first_line(problem)}"
    status = problem.response.status_code
    if status in (401, 403):
        return f"the hub refuses the token ({status}): run `hf auth login`, or set HF_TOKEN to one for this model"
    if status == 429:
        return "the hub has had too many requests from here (429): wait some minutes, or run `hf auth login`"
    return f"the hub answers with an error, and may be down: {_first_line(problem)}. Try again later, or name a folder"


def _first_line(problem: BaseException) -> str:
    return next(iter(str(problem).strip().splitlines()), type(problem).__name__).rstrip(".")


def _causes(problem: BaseException) -> Iterator[BaseException]:
    """The error and its causes: the hub's library and its HTTP client wrap errors of the system."""
    cause: BaseException | None = problem
    while cause is not None:
        yield cause
        cause = cause.__cause__
