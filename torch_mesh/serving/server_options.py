"""The options of ``torch-mesh serve`` beside the fields of MeshConfig, and their checks."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_mesh.validators import parse_size


@dataclass(frozen=True)
class Option:
    name: str
    default: Any
    kind: type
    about: str
    choices: tuple[str, ...] = ()


API_KEY_VARIABLE = "TORCH_MESH_API_KEY"
_LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical")  # transformers' names
# Options of transformers' ContinuousBatchingConfig, there without the prefix.
_BATCHES = "cb_"
OPTIONS = (
    Option(
        "continuous_batching",
        False,
        bool,
        "compute concurrent requests together, by transformers' continuous batching",
    ),
    Option(
        "prefix_cache",
        "off",
        str,
        "disk space for the KV cache of conversations, in the folder of torch-mesh cache; later processes read them "
        "too: a size such as 8GiB, or off",
    ),
    Option("attn_implementation", None, str, "attention of transformers, such as sdpa or eager"),
    Option("compile", False, bool, "compile decode steps, with a static cache"),
    Option(
        "reasoning",
        "auto",
        str,
        "whether the model reasons before it answers, where its chat template has a switch for it",
        ("auto", "on", "off"),
    ),
    Option(
        "chat_template_kwargs", None, str, "variables of the chat template, as a JSON object; a request may give others"
    ),
    Option("device", "auto", str, "where the model runs: auto, cpu, cuda:0"),
    Option("dtype", "auto", str, "dtype of the weights outside the experts: auto, bfloat16, float32"),
    Option("trust_remote_code", False, bool, "run code from the checkpoint"),
    Option("cb_block_size", None, int, "tokens in a KV cache block of continuous batching"),
    Option("cb_num_blocks", None, int, "number of KV cache blocks of continuous batching"),
    Option("cb_max_batch_tokens", None, int, "maximum number of tokens in a forward of continuous batching"),
    Option("cb_max_memory_percent", None, float, "fraction of memory for KV cache blocks, above 0 and up to 1"),
    Option("cb_use_cuda_graph", None, bool, "use CUDA graphs in continuous batching"),
    Option(
        "fetch_media",
        False,
        bool,
        "fetch pictures, videos and sound from http(s) addresses in requests, also those of internal hosts; otherwise "
        "requests have to contain them",
    ),
    Option("host", "localhost", str, "address to listen on"),
    Option("port", 8000, int, "port to listen on; 0: any free one"),
    Option(
        "api_key",
        None,
        str,
        "key that requests have to send, as Authorization: Bearer KEY or x-api-key: KEY (default: that in the variable "
        f"{API_KEY_VARIABLE}, which hides it from other users of this machine)",
    ),
    Option("allow_anyone", False, bool, "let other machines ask without a key, and requests name any host"),
    Option("enable_cors", False, bool, "accept requests from web pages of any site (CORS)"),
    Option("log_level", "warning", str, "lowest level that is logged", _LOG_LEVELS),
    Option(
        "default_tokens",
        None,
        int,
        "limit of an answer whose request gives none, as far as positions and memory allow; unless given, 1024 tokens, "
        "or more where the model's generation_config has more",
    ),
    Option("default_seed", None, int, "seed of requests that give none; unless given, each start draws one"),
)


def complete_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the ``given`` OPTIONS, set log level and seed, and return all options.

    The result also has ``arguments`` of the chat template, ``prefix_bytes``, and ``blocks``: the options of continuous
    batching. Raises ValueError for an invalid option, ImportError where a package is missing.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    options = {option.name: option.default for option in OPTIONS} | dict(given)
    _check_numbers(options)
    if options["compile"] and options["continuous_batching"]:
        raise ValueError("--compile is not possible with --continuous-batching: leave one out")
    if options["dtype"] != "auto" and not isinstance(getattr(torch, options["dtype"], None), torch.dtype):
        raise ValueError(f"--dtype {options['dtype']} is not a torch dtype: give auto, bfloat16, float16 or float32")
    _check_device(options["device"])
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


def _check_device(name: str) -> None:
    import torch

    if name == "meta":
        raise ValueError("--device meta computes nothing: give auto, cpu, or a device such as cuda:0")
    if name in ("auto", "balanced", "balanced_low_0", "sequential"):  # transformers' own choices
        return
    try:
        torch.empty(0, device=int(name) if name.isdigit() else name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # each backend has its own
        there = ["auto", "cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise ValueError(
            f"--device {name} is not on this machine: give {', '.join(there[:-1])} or {there[-1]}"
        ) from error


def _template_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    text = options["chat_template_kwargs"]
    given: Any = {}
    if text:
        with contextlib.suppress(ValueError):
            given = json.loads(text)
        if not isinstance(given, dict) or (not given and text.strip() != "{}"):
            raise ValueError(
                f"--chat-template-kwargs is {text!r}, which is not a JSON object; give one such as '{{\"name\": true}}'"
            )
    if options["reasoning"] != "auto":
        given["enable_thinking"] = options["reasoning"] == "on"
    return dict(given)


_MIN_BLOCK = 4  # tokens, of transformers' continuous batching


def _check_numbers(given: Mapping[str, Any]) -> None:
    """Check numbers now: continuous batching would check its own only at the first request, and end."""
    minimums = {"cb_block_size": _MIN_BLOCK, "cb_num_blocks": 1, "cb_max_batch_tokens": 1, "default_tokens": 1}
    for name, minimum in minimums.items():
        if (value := given[name]) is not None and value < minimum:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {minimum}")
    fraction = given["cb_max_memory_percent"]
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"--cb-max-memory-percent {fraction} must be above 0 and at most 1")


def _prefix_bytes(given: Mapping[str, Any]) -> int:
    """Bytes of the prefix cache; 0 for none."""
    size = given["prefix_cache"]
    if size == "off":
        return 0
    for name in ("compile", "continuous_batching"):
        if given[name]:
            raise ValueError(f"--prefix-cache {size} is not possible with --{name.replace('_', '-')}: leave one out")
    try:
        return parse_size(size, "--prefix-cache")
    except ValueError as error:
        raise ValueError(f"{error} Or give off.") from None


def check_unused(options: Mapping[str, Any], kept_bytes: int | None, speculation: str | None) -> None:
    """Raises ValueError for an option of a server that would have no effect.

    ``kept_bytes`` and ``speculation``: as given on the command line. What the environment says has no effect there.
    """
    for name in ("compile", "continuous_batching"):
        if options[name] and kept_bytes:
            raise ValueError(
                f"--keep-keys has no effect with --{name.replace('_', '-')}: leave it out, or --keep-keys 0"
            )
    if options["continuous_batching"] and speculation not in (None, "off"):
        raise ValueError(f"--speculation {speculation} is not possible with --continuous-batching: leave one out")
    if options["blocks"] and not options["continuous_batching"]:
        name = f"{_BATCHES}{next(iter(options['blocks']))}".replace("_", "-")
        raise ValueError(f"--{name} has no effect without --continuous-batching: give that too, or leave it out")


def check_api_key(given: Mapping[str, Any]) -> None:
    key, host = given["api_key"], given["host"]
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(
            f"the key of --api-key or {API_KEY_VARIABLE} has to be printable ASCII without blanks, since it is sent in "
            "a header"
        )
    if key is None and not given["allow_anyone"] and not _is_loopback(host):
        raise ValueError(
            f"--host {host} lets other machines ask, and there is no key: give one in {API_KEY_VARIABLE} or by "
            "--api-key, or --allow-anyone for none"
        )


def _is_loopback(host: str) -> bool:
    """Whether every address of ``host`` is loopback. A host without an address counts as loopback and is refused by
    ``check_address``."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
    return True


def check_address(host: str, port: int) -> None:
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
