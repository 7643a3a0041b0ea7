"""Access to a server: requests need its key, and come from this machine unless allowed otherwise."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_mesh import MeshConfig
from torch_mesh.cli import main

openai = pytest.importorskip("openai")

KEY = "mesh-3f9a"
PATHS = (
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/metrics",
    "/nothing",
)


@pytest.fixture(scope="module")
def server(serving: Callable[..., Any], folder: Path) -> Any:
    return serving(folder, MeshConfig(resident=1.0), api_key=KEY)


def _get(server: Any, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.address + path, headers=headers), timeout=30
        ) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_answered_without_the_key(path: str, server: Any) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer none"},
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer "},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": ""},
    ):
        status, body = _get(server, path, headers)
        error = json.loads(body)["error"]
        assert status == 401 and error["code"] == "invalid_api_key" and "--api-key" in error["message"]


def test_the_key_is_taken_in_either_header(server: Any) -> None:
    for headers in ({"Authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"X-Api-Key": KEY}):
        assert _get(server, "/v1/models", headers)[0] == 200
    assert _get(server, "/health", {})[0] == 200


def test_clients_raise_authentication_errors(server: Any) -> None:
    ask = {"model": server.model, "prompt": "a", "max_tokens": 2}
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        assert client.completions.create(**ask).usage.completion_tokens == 2
    with (
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.completions.create(**ask)
    anthropic = pytest.importorskip("anthropic")
    with (
        anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0, timeout=120) as client,
        pytest.raises(anthropic.AuthenticationError) as error,
    ):
        client.messages.count_tokens(model=server.model, messages=[{"role": "user", "content": "a"}])
    assert error.value.body["error"]["type"] == "authentication_error"


def test_a_host_for_other_machines_needs_a_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for host, named in (("0.0.0.0", "--allow-anyone"), ("::", "--allow-anyone"), ("", "--host is empty")):
        assert main(["serve", str(folder), "--host", host]) == 2
        assert named in capsys.readouterr().err
    for key in ("", "a b", "schl\u00fcssel"):
        assert main(["serve", str(folder), "--api-key", key]) == 2
        assert "--api-key" in capsys.readouterr().err


def test_the_key_may_be_in_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class OpenedError(Exception):
        pass

    def server(*given: Any, **_: Any) -> None:
        seen.append(given[-1].get("api_key"))
        raise OpenedError

    monkeypatch.setattr("torch_mesh.serving.server.Server", server)
    monkeypatch.setenv("TORCH_MESH_API_KEY", KEY)
    for more in ([], ["--api-key", "another"]):
        with pytest.raises(OpenedError):
            main(["serve", str(folder), *more])
    monkeypatch.setenv("TORCH_MESH_API_KEY", "")
    with pytest.raises(OpenedError):
        main(["serve", str(folder)])
    assert seen == [KEY, "another", None]


def _status_without_host(server: Any) -> int:
    address = urllib.parse.urlsplit(server.address)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"  # 1.1 requires the header
    with contextlib.closing(connection):
        connection.putrequest("GET", "/v1/models", skip_host=True)
        connection.endheaders()
        return connection.getresponse().status


def test_a_server_without_a_key_is_asked_by_the_machines_own_names(
    server: Any, serving: Callable[..., Any], folder: Path
) -> None:
    assert _get(server, "/health", {"Host": "example.org"})[0] == 200  # it has a key
    for allow_anyone in (False, True):
        keyless = serving(folder, MeshConfig(resident=1.0), allow_anyone=allow_anyone)
        for host in (
            "localhost",
            "LOCALHOST:80",
            "127.0.0.1:1",
            "127.1.2.3",
            "[::1]:8000",
            "localhost.:1",
            "[::ffff:127.0.0.1]:1",
        ):
            assert _get(keyless, "/v1/models", {"Host": host})[0] == 200, host
        for host in ("example.org", "localhost.example.org:8000", "127.0.0.1.example.org", "192.0.2.1", "[::2]"):
            for path in ("/v1/models", "/v1/messages", "/health"):
                status, body = _get(keyless, path, {"Host": host})
                assert (status == 403) == (not allow_anyone), host
                error = {} if allow_anyone else json.loads(body)["error"]
                assert allow_anyone or error["code"] == "host_not_allowed"
                assert allow_anyone or (repr(host) in error["message"] and "TORCH_MESH_API_KEY" in error["message"])
        assert _status_without_host(keyless) == 200
        keyless.stop()


def test_a_host_for_others_listens_with_a_key_or_for_anyone(serving: Callable[..., Any], folder: Path) -> None:
    for more in ({"api_key": KEY}, {"allow_anyone": True}):
        server = serving(folder, MeshConfig(resident=1.0), host="0.0.0.0", **more)
        assert server.address.startswith("http://0.0.0.0:")
        server.stop()
