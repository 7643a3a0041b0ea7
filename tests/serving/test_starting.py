"""``torch-mesh serve`` and ``chat`` as commands: their arguments, the terminal, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import warm
from pairs import first_quick

from torch_mesh.cli import main

openai = pytest.importorskip("openai")


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_invalid_arguments_are_refused_before_the_model_is_opened(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([command, str(folder), "--resident", "much"]) == 2
    assert "--resident='much' is not a size" in capsys.readouterr().err
    assert main([command, "a@b/c:d"]) == 2
    assert "owner/model@revision" in capsys.readouterr().err
    assert main([command, str(tmp_path / "nothing")]) == 1
    assert f"{tmp_path / 'nothing'}: " in capsys.readouterr().err
    for wrong in ("{", "[1]", "{'a': 1}"):
        assert main([command, str(folder), "--chat-template-kwargs", wrong]) == 2
        assert "--chat-template-kwargs is" in capsys.readouterr().err
    for unread in ('{"tools": []}', '{"moo": 1}'):
        assert main([command, str(folder), "--chat-template-kwargs", unread]) == 2
        assert "--chat-template-kwargs has " in capsys.readouterr().err
    for name, value, code, message in (
        *([("--default-tokens", "0", 2, "at least 1")] if command == "serve" else ()),
        ("--cb-num-blocks", "-3", 2, "at least 1"),
        ("--cb-block-size", "3", 2, "at least 4"),
        ("--device", "meta", 2, "computes nothing"),
        ("--device", "cuda:99", 2, "--device cuda:99 is not on this machine: give auto"),
        ("--device", "99", 2, "--device 99 is not on this machine: give auto"),
        ("--device", "nothing", 2, "--device nothing is not on this machine: give auto"),
        ("--cb-max-memory-percent", "7", 2, "at most 1"),
        ("--compile", "--continuous-batching", 2, "leave one out"),
        ("--cb-num-blocks", "3", 2, "without --continuous-batching"),
        ("--compile", "--keep-keys=1GiB", 2, "--keep-keys 0"),
        ("--continuous-batching", "--keep-keys=1GiB", 2, "--keep-keys 0"),
        ("--continuous-batching", "--speculation=lookup", 2, "leave one out"),
    ):
        assert main([command, str(folder), name, value]) == code
        assert message in capsys.readouterr().err
    if command == "chat":
        for flag, allowed in (
            ("max_new_tokens", "NAME=VALUE"),
            ("nothing=3", "NAME=VALUE"),
            ("max_new_tokens=x", "1 or more"),
            ("max_new_tokens=-1", "1 or more"),
            ("do_sample=maybe", "True or False"),
            ("temperature=-1", "0 or a larger number"),
            ("top_p=1.5", "from 0 to 1"),
            ("eos_token_id=[1,x]", "JSON"),
            ("eos_token_id=[-3]", "token id"),
            ("num_beams=3", "give 1"),
            ("max_length=2000", "max_new_tokens"),
        ):
            assert main([command, str(folder), flag]) == 2
            error = capsys.readouterr().err
            assert repr(flag) in error and allowed in error
    with pytest.raises(SystemExit) as end:
        main([command, str(folder), "--log-level", "loud"])
    assert end.value.code == 2 and "'warning'" in capsys.readouterr().err
    if command == "serve":
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            assert main([command, str(folder), "--host", "127.0.0.1", "--port", str(port)]) == 1
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main([command, str(folder)]) == 1
    assert "pip install torch_mesh[serve]" in capsys.readouterr().err


@pytest.mark.parametrize("reaches_the_network", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_a_conversation_in_the_terminal(
    reaches_the_network: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not reaches_the_network:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")  # nothing listens there
        monkeypatch.setenv("NO_PROXY", "example.org")
    # The second line answers the question whether to continue after so few tokens. The end of input counts as !exit.
    monkeypatch.setattr("sys.stdin", io.StringIO("In the beginning\nn\n!status\n"))
    options = ["max_new_tokens=9", "do_sample=False"]  # sampled answers may end before the limit
    assert main(["chat", str(folder), *options, "--resident", "0.3", "--log-level", "error"]) == 0
    output = capsys.readouterr().out
    assert f"Model: {folder}" in output and "9 tokens in" in output
    if not reaches_the_network:
        assert os.environ["NO_PROXY"] == "example.org" and "no_proxy" not in os.environ


def _converse(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> int:
    given = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    return main(["chat", str(folder), "max_new_tokens=9", "--resident", "0.3", "--log-level", "error"])


def test_a_conversation_goes_on_after_what_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = {
        "!set max_new_tokens=abc": "1 or more",
        "!set nothing=3": "'nothing=3' is not NAME=VALUE",
        "!set num_beams=4": "give 1",
        "![/x]": "'![/x]' is not a command",
        "!example nope": "There is no example 'nope'",
        "word " * 3000: "but the model supports 2,048",
        "\udcff": "not UTF-8",
        "!save /proc/chat.json": "/proc/chat.json",
        "!set stop_strings=a[/x]b": "",
        "!status": "a[/x]b",
        "!set stop_strings=None": "",
    }
    kept = ["!set max_new_tokens=4 do_sample=False", "In the beginning", "n", "!save", "!save of/mine.json"]
    assert _converse(folder, monkeypatch, *refused, *kept) == 0
    output = " ".join(capsys.readouterr().out.split())
    for message in refused.values():
        assert message in output
    [saved] = Path("chat_history", folder.name).glob("chat_*.json")
    assert saved.read_text() == Path("of/mine.json").read_text()
    contents = json.loads(saved.read_text())
    question, answer = contents["chat_history"]
    assert question == {"role": "user", "content": "In the beginning"}
    assert answer["role"] == "assistant" and answer["content"]
    assert contents["settings"]["config"]["max_new_tokens"] == 4


def test_a_conversation_shows_reasoning_and_keeps_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import ChatCompletionStreamOutput

    from torch_mesh.cli import conversation

    deltas = [{"reasoning_content": "Why"}, {"reasoning_content": "?"}, {"content": "Yes"}, {"content": "."}, {}]

    class Client:
        async def chat_completion(self, *_: Any, **given: Any) -> Any:
            assert "max_new_tokens" not in json.loads(given["extra_body"]["generation_config"])

            async def chunks() -> AsyncIterator[Any]:
                for delta in deltas:
                    choices = [{"index": 0, "delta": {"role": "assistant"} | delta, "finish_reason": None}]
                    yield ChatCompletionStreamOutput.parse_obj_as_instance({"choices": choices})

            return chunks()

    shown: list[str] = []

    async def stream_output(_self: Any, stream: Any) -> tuple[str, str]:
        async for chunk in await stream:
            shown.append(chunk.choices[0].delta.content)
        return "", "stop"

    monkeypatch.setattr(conversation, "AsyncInferenceClient", lambda **_: contextlib.nullcontext(Client()))
    monkeypatch.setattr(conversation.RichInterface, "stream_output", stream_output)
    talk = conversation.Conversation("a", "http://127.0.0.1:9", {}, system_prompt=None, save_folder=".")
    assert talk._answer("Is it?") is None
    assert "".join(shown) == "<think>\nWhy?\n</think>\n\nYes."
    assert talk._messages[-1] == {"role": "assistant", "content": "Yes."}


def test_a_conversation_keeps_no_answer_that_was_cut_within_its_reasoning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import ChatCompletionStreamOutput

    from torch_mesh.cli import conversation

    class Client:
        async def chat_completion(self, *_: Any, **__: Any) -> Any:
            async def chunks() -> AsyncIterator[Any]:
                for delta, reason in (({"reasoning_content": "Why"}, None), ({}, "length")):
                    choices = [{"index": 0, "delta": {"role": "assistant"} | delta, "finish_reason": reason}]
                    yield ChatCompletionStreamOutput.parse_obj_as_instance({"choices": choices})

            return chunks()

    shown: list[str] = []

    async def stream_output(_self: Any, stream: Any) -> tuple[str, str]:
        async for chunk in await stream:
            shown.append(chunk.choices[0].delta.content)
        return "", "length"

    monkeypatch.setattr(conversation, "AsyncInferenceClient", lambda **_: contextlib.nullcontext(Client()))
    monkeypatch.setattr(conversation.RichInterface, "stream_output", stream_output)
    monkeypatch.setattr(conversation.RichInterface, "confirm", lambda *_: pytest.fail("it offers to continue"))
    talk = conversation.Conversation("a", "http://127.0.0.1:9", {}, system_prompt=None, save_folder=".")
    assert talk._answer("Is it?") is None
    assert "".join(shown) == "<think>\nWhy\n</think>"
    assert talk._messages == [] and "max_new_tokens" in capsys.readouterr().out


def test_the_environment_may_speculate_where_the_command_line_may_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_mesh.serving import server

    class OpenedError(Exception):
        pass

    def opened(*_: Any) -> None:
        raise OpenedError

    monkeypatch.setenv("TORCH_MESH_SPECULATION", "lookup")
    monkeypatch.setattr(server, "open_for_serving", opened)
    with pytest.raises(OpenedError):
        main(["serve", str(folder), "--continuous-batching", "--port", "0"])


def test_ctrl_c_stops_an_answer_and_keeps_its_text(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers.cli.chat import RichInterface

    async def interrupted(_self: RichInterface, stream: Any) -> None:
        async for chunk in await stream:
            if chunk.choices[0].delta.content:
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(60)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RichInterface, "stream_output", interrupted)
    assert _converse(folder, monkeypatch, "In the beginning", "!save here.json") == 0
    assert "Stopped." in capsys.readouterr().out
    question, answer = json.loads(Path("here.json").read_text())["chat_history"]
    assert question["content"] == "In the beginning" and answer["content"]


def test_ctrl_c_at_the_prompt_ends_the_conversation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cli.chat import RichInterface

    def interrupted(_self: RichInterface) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(RichInterface, "input", interrupted)
    assert _converse(folder, monkeypatch) == 0


def test_a_conversation_is_offline_except_for_loopback() -> None:
    from torch_mesh.cli.chat import _except_loopback

    hosts = []

    async def hook(request: Any) -> None:
        hosts.append(request.url.host)

    for host in ("127.0.0.1", "192.0.2.1"):
        asyncio.run(_except_loopback(hook)(SimpleNamespace(url=SimpleNamespace(host=host))))
    assert hosts == ["192.0.2.1"]


def test_scripts_of_pages_can_read_the_headers_of_answers(folder: Path) -> None:
    with warm.start_command("serve", folder, "--resident", "0.25", "--port", "0", "--enable-cors") as process:
        try:
            address = process.stdout.readline().split()[3].removesuffix("/v1,")
            request = urllib.request.Request(f"{address}/health", headers={"Origin": "https://example.org"})
            headers = urllib.request.urlopen(request, timeout=30).headers
        finally:
            process.kill()
    assert headers["access-control-allow-origin"] == "*"
    assert headers["access-control-expose-headers"] == "x-torch-mesh-left-out, x-request-id"
    assert headers["x-request-id"]


@pytest.mark.parametrize("tokens", first_quick(200, 1900))  # finished within the grace period, or cut off
def test_sigterm_ends_the_server_and_running_requests(folder: Path, tokens: int) -> None:
    with warm.start_command("serve", folder, "--resident", "0.25", "--port", "0") as process:
        try:
            line = process.stdout.readline()
            address = line.split()[3].removesuffix("/v1,")
            body = {
                "model": str(folder),
                "prompt": "And it came to pass in those days, that",
                "temperature": 0,
                "max_tokens": tokens,
            }
            request = urllib.request.Request(
                f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with ThreadPoolExecutor() as pool:
                answer = pool.submit(lambda: urllib.request.urlopen(request, timeout=300).read())
                try:
                    deadline = time.monotonic() + 120
                    while 'forwards_total{phase="decode"} 0.0' in _text(f"{address}/metrics"):
                        assert time.monotonic() < deadline and process.poll() is None
                        time.sleep(0.05)
                    process.send_signal(signal.SIGTERM)
                    _, errors = process.communicate(timeout=120)
                finally:
                    process.kill()  # otherwise the thread pool waits for the answer
                assert process.returncode == 0, errors
                error = answer.exception(60)
                if error is None:  # it finished within the grace period
                    assert json.loads(answer.result())["usage"]["completion_tokens"] > 0
                else:
                    assert isinstance(error, urllib.error.HTTPError) and error.code == 503
                    assert json.loads(error.read())["error"]["code"] == "server_stopping"
            assert "Fatal" not in errors and "terminate called" not in errors
        finally:
            process.kill()


_STUCK = """
import sys, threading
from torch_mesh.cli import main, serve
from torch_mesh.serving import kept_keys, server

def stuck(self, **arguments):
    print("computing", flush=True)
    threading.Event().wait()

serve.END = 4 + serve._FREEING
server.Server.stop.__defaults__ = (0.2,)
kept_keys.KeptKeys.generate = stuck
main(["serve", *sys.argv[1:]])
"""


@pytest.mark.thorough
def test_sigterm_ends_the_server_even_if_a_forward_never_ends(folder: Path) -> None:
    with warm.start(_STUCK, folder, "--resident", "0.25", "--host", "127.0.0.1", "--port", "0") as process:
        try:
            address = process.stdout.readline().split()[3].removesuffix(",")
            with (
                openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120) as client,
                ThreadPoolExecutor() as pool,
            ):
                try:
                    request = pool.submit(client.completions.create, model=str(folder), prompt="a")
                    assert process.stdout.readline() == "computing\n"
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(60) == 0
                finally:
                    process.kill()
                error: Any = request.exception(60)
                assert error.status_code == 503
        finally:
            process.kill()


_PATIENT = _STUCK.replace("stop.__defaults__ = (0.2,)", "stop.__defaults__ = (600.0,)")


def test_a_second_ctrl_c_ends_the_server_at_once(folder: Path) -> None:
    with warm.start(_PATIENT, folder, "--resident", "0.25", "--host", "127.0.0.1", "--port", "0") as process:
        try:
            address = process.stdout.readline().split()[3].removesuffix("/v1,")
            body = json.dumps({"model": str(folder), "prompt": "a"}).encode()
            request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
            with ThreadPoolExecutor() as pool:
                answer = pool.submit(urllib.request.urlopen, request, timeout=300)
                try:
                    assert process.stdout.readline() == "computing\n"
                    process.send_signal(signal.SIGINT)
                    deadline = time.monotonic() + 120
                    with pytest.raises(OSError):  # once it no longer listens, the first one has arrived
                        while _text(f"{address}/metrics"):
                            assert time.monotonic() < deadline
                    process.send_signal(signal.SIGINT)
                    assert process.wait(60) == 128 + signal.SIGINT
                finally:
                    process.kill()
                assert answer.exception(60) is not None
        finally:
            process.kill()


def _text(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode()
