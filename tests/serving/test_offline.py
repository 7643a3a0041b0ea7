"""``torch-mesh run``: each request is answered once, however a run ends. An invalid file computes nothing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from pairs import first_quick
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.cli import main
from torch_mesh.serving import admission, offline
from torch_mesh.serving.offline import read_requests, unanswered
from torch_mesh.system.atomic_files import locked

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def _line(name: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def _write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def _read(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True)
    assert all(line.endswith("\n") for line in lines)
    answers = [json.loads(line) for line in lines]
    assert len({each["custom_id"] for each in answers}) == len(answers)
    return {each["custom_id"]: each for each in answers}


def _run(folder: Path, requests: Path, answers: Path, *options: str) -> int:
    return main(["run", str(folder), str(requests), str(answers), "--resident", "0.3", *options])


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"


def test_requests_in_both_forms_are_answered(folder: Path, paths: tuple[Path, Path]) -> None:
    requests, answers = paths
    texts = ["In the beginning", "def main():", "And the LORD spake unto Moses,", "import os"]
    lines: list[Any] = [{"prompt": text, "max_tokens": 5 + number} for number, text in enumerate(texts)]
    lines += ["", _line("chat", CHAT, messages=[{"role": "user", "content": "Hello"}], max_tokens=3)]
    lines += [{"messages": [{"role": "user", "content": "Hello"}], "custom_id": "bare", "max_tokens": 3}]
    lines += [_line("several", prompt=texts[:2], n=2, max_tokens=2)]
    _write(requests, lines)
    assert _run(folder, requests, answers, "--at-once", "4") == 0
    found = _read(answers)
    assert set(found) == {"line-1", "line-2", "line-3", "line-4", "chat", "bare", "several"}
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in found.values())
    said = [found[name]["response"]["body"]["choices"][0]["message"]["content"] for name in ("chat", "bare")]
    assert said[0] == said[1]
    assert len(found["several"]["response"]["body"]["choices"]) == 4

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(resident=1.0))
    agreeing = 0
    for number, text in enumerate(texts):
        inputs = tokenizer(text, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=5 + number, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        body = found[f"line-{number + 1}"]["response"]["body"]
        assert body["usage"]["completion_tokens"] == len(tokens)
        agreeing += body["choices"][0]["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
    assert agreeing >= 3  # rows computed together round differently, which may decide a near tie


def _refuse_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "open_service", lambda *_: pytest.fail("the model was opened"))


def test_finished_lines_are_not_computed_again(
    folder: Path, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, answers = paths
    lines = [_line(f"{number}", prompt=f"Verse {number}", max_tokens=3) for number in range(5)]
    _write(requests, lines[:3])
    assert _run(folder, requests, answers) == 0
    before = answers.read_bytes()
    with monkeypatch.context() as unopened:
        _refuse_to_open(unopened)
        assert _run(folder, requests, answers) == 0
    assert answers.read_bytes() == before
    _write(requests, lines)
    assert _run(folder, requests, answers) == 0
    assert answers.read_bytes().startswith(before) and set(_read(answers)) == set("01234")
    assert "5 of 5" in capsys.readouterr().out


@pytest.mark.parametrize("left", first_quick("both", "half a line", "a failed line"))
def test_truncated_and_failed_lines_are_computed_again(folder: Path, paths: tuple[Path, Path], left: str) -> None:
    requests, answers = paths
    _write(requests, [_line(f"{number}", prompt=f"Verse {number}", max_tokens=3) for number in range(3)])
    assert _run(folder, requests, answers) == 0
    first, second, third = answers.read_bytes().splitlines(keepends=True)
    failed = json.loads(second)
    failed["response"] |= {"status_code": 500, "body": {"error": {}}}
    lines = [first]
    if left != "half a line":
        lines.append(json.dumps(failed).encode() + b"\n")
    if left != "a failed line":
        lines.append(third[: len(third) // 2])
    answers.write_bytes(b"".join(lines))
    assert _run(folder, requests, answers) == 0
    assert answers.read_bytes().startswith(first)
    assert all(each["response"]["status_code"] == 200 for each in _read(answers).values())


def test_a_killed_run_can_be_resumed(folder: Path, paths: tuple[Path, Path]) -> None:
    requests, answers = paths
    _write(requests, [_line(f"{number}", prompt=f"Verse {number}", max_tokens=20) for number in range(12)])
    running = warm.start_command("run", folder, requests, answers, "--at-once", "2", "--resident", "0.3")
    while running.poll() is None and not (answers.exists() and answers.stat().st_size):
        time.sleep(0.02)
    running.kill()
    _, errors = running.communicate()
    assert running.returncode in (-signal.SIGKILL, 0), errors
    before = answers.read_bytes()
    assert before.endswith(b"\n")
    assert _run(folder, requests, answers) == 0
    assert answers.read_bytes().startswith(before) and len(_read(answers)) == 12


def test_an_interrupted_run_says_how_to_continue_and_nothing_else(folder: Path, paths: tuple[Path, Path]) -> None:
    requests, answers = paths
    _write(requests, [_line(f"{tokens}", prompt="In the beginning", max_tokens=tokens) for tokens in (2, 1500, 1501)])
    running = warm.start_command("run", folder, requests, answers, "--at-once", "2", "--resident", "0.3")
    while running.poll() is None and not (answers.exists() and answers.stat().st_size):
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate()
    assert running.returncode == 130, errors
    assert "Traceback" not in errors and "Error" not in errors
    assert errors.splitlines()[-1] == "torch-mesh: interrupted: repeat the command to continue"


WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "no JSON"),
    "a list": ([1], "not a JSON object"),
    "nothing asked": ({"max_tokens": 3}, "none of messages, prompt"),
    "a twin": (_line("fine", prompt="Hello"), "line 1 too"),
    "another method": (_line("a", prompt="Hello") | {"method": "GET"}, "give POST"),
    "another url": (_line("a", "/v1/embeddings", input="Hello"), "/v1/embeddings"),
    "a field too many": (_line("a", prompt="Hello") | {"priority": 1}, "custom_id, method, url and body"),
    "no id": ({"prompt": "Hello", "custom_id": 7}, "custom_id is 7"),
    "a stream": ({"prompt": "Hello", "stream": True}, "stream"),
    "an unknown field": ({"prompt": "Hello", "tokens": 3}, "tokens"),
    "a wrong value": ({"prompt": "Hello", "temperature": "x"}, "temperature"),
    "another model": ({"prompt": "Hello", "model": "gpt-5"}, "gpt-5"),
    "too long": ({"prompt": "Hello", "max_tokens": 10**6}, "max_position_embeddings"),
    "no batches": ({"prompt": "Hello", "logprobs": 1}, "logprobs"),
}


def test_an_invalid_line_ends_the_run_before_anything_is_computed(
    folder: Path, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    requests, answers = paths
    opened = list(WRONG).index("a stream")  # the cases from here on need the model
    names = list(WRONG)
    for some in (names[:opened], names[opened:]):
        for start in range(0, len(some), 5):
            part = some[start : start + 5]
            _write(requests, [_line("fine", prompt="Hello"), *(WRONG[name][0] for name in part)])
            assert _run(folder, requests, answers) == 2
            errors = capsys.readouterr().err
            assert not answers.exists()
            for number, name in enumerate(part, 2):
                assert f"line {number}: " in errors and WRONG[name][1] in errors, (name, errors)


def test_answers_to_other_requests_are_not_overwritten(folder: Path, paths: tuple[Path, Path]) -> None:
    requests, answers = paths
    _write(requests, [_line("a", prompt="Hello", max_tokens=2)])
    assert _run(folder, requests, answers) == 0
    before = answers.read_bytes()
    assert unanswered(read_requests(requests), answers, str(folder)) == []
    assert unanswered(read_requests(requests), answers, f"{folder}/") == []
    with pytest.raises(ValueError, match=f"was answered by {folder}, and not by owner/other"):
        unanswered(read_requests(requests), answers, "owner/other")
    assert answers.read_bytes() == before
    for changed in ([_line("a", prompt="Hello", max_tokens=3)], [_line("b", prompt="Hello", max_tokens=2)]):
        with pytest.raises(ValueError, match="name another file"):
            unanswered(read_requests(_write(requests, changed)), answers, str(folder))
    _write(requests, [_line("b", prompt="Hello", max_tokens=2)])
    no_model = json.loads(before)
    del no_model["response"]["body"]["model"]
    others = [
        json.dumps(no_model).encode() + b"\n",
        b"notes\n",
        b"notes",
        b"\x7fELF\r\x00",
        b'{"id": "batch_7"}',
        before.rstrip(b"\n"),
    ]
    for text in others:
        answers.write_bytes(text)
        with pytest.raises(ValueError, match="name another file"):
            unanswered(read_requests(requests), answers, str(folder))
        assert answers.read_bytes() == text


def test_the_requests_are_no_answers_file(folder: Path, paths: tuple[Path, Path]) -> None:
    requests, _ = paths
    requests.write_text(json.dumps(_line("a", prompt="Hello", max_tokens=2)))
    before = requests.read_bytes()
    assert _run(folder, requests, requests) == 2
    assert requests.read_bytes() == before


def test_a_pipe_is_refused(
    folder: Path, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_to_open(monkeypatch)
    requests, answers = paths
    _write(requests, [_line("a", prompt="Hello", max_tokens=2)])
    os.mkfifo(answers)
    assert _run(folder, requests, answers) == 2
    assert "is not a regular file" in capsys.readouterr().err


def test_two_runs_do_not_write_the_same_answers(
    folder: Path, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    requests, answers = paths
    _write(requests, [_line(f"{number}", prompt="Hello", max_tokens=2) for number in range(2)])
    assert _run(folder, requests, answers) == 0
    before = answers.read_bytes()[:-9]  # with half a line, which a run removes
    answers.write_bytes(before)
    (answers.parent / "link").symlink_to(answers)
    for name in (answers, answers.parent / "link"):
        with locked(answers.with_name(".answers.jsonl.lock")):
            assert _run(folder, requests, name) == 1
        assert "another torch-mesh run is writing it" in capsys.readouterr().err
        assert answers.read_bytes() == before
    assert _run(folder, requests, answers) == 0
    assert len(_read(answers)) == 2


def test_answers_that_cannot_be_written_end_the_run_before_the_model_is_opened(
    folder: Path, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, answers = paths
    _write(requests, [_line("a", prompt="Hello", max_tokens=2)])
    _refuse_to_open(monkeypatch)
    assert _run(folder, requests, answers.parent / "none" / "answers") == 1
    assert "no such file" in capsys.readouterr().err


def test_files_that_are_empty_or_absent(folder: Path, paths: tuple[Path, Path]) -> None:
    requests, answers = paths
    assert _run(folder, requests, answers) == 1  # the file does not exist
    requests.write_text("\n \n")
    assert _run(folder, requests, answers) == 2


def test_blocks_of_any_size_hold_a_request(folder: Path, paths: tuple[Path, Path]) -> None:
    requests, answers = paths
    _write(requests, [_line("one", prompt="In the beginning", max_tokens=40)])
    assert _run(folder, requests, answers, "--cb-block-size", "16") == 0
    assert _read(answers)["one"]["response"]["status_code"] == 200


def test_a_request_longer_than_the_given_blocks_ends_the_run_before_anything_is_computed(
    folder: Path, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    requests, answers = paths
    _write(requests, [_line("fits", prompt="Hello", max_tokens=3), _line("long", prompt="Hello", max_tokens=1500)])
    assert _run(folder, requests, answers, "--cb-num-blocks", "1") == 2
    errors = capsys.readouterr().err
    assert "line 2: " in errors and "hold 256" in errors and "--cb-num-blocks" in errors
    assert not answers.exists()
    _write(requests, [_line("fits", prompt="Hello", max_tokens=3)])
    assert _run(folder, requests, answers, "--cb-num-blocks", "1") == 0


def test_a_request_without_memory_is_named_by_its_line(
    folder: Path, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, answers = paths
    lines = [_line("fits", prompt="Hello", max_tokens=3), _line("long", prompt="Hello", max_tokens=1500)]
    _write(requests, lines)
    monkeypatch.setattr(admission, "left_bytes", lambda: admission.RESERVE_BYTES + 10_000)
    assert _run(folder, requests, answers) == 2
    error = capsys.readouterr().err
    assert "line 2: This request has" in error and "give a smaller --resident" in error
    assert "server" not in error and not answers.exists()


def test_a_limit_that_no_request_gave_is_what_memory_allows(
    folder: Path, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, answers = paths
    _write(requests, [_line("a", prompt="Hello"), _line("b", prompt="Hello", max_tokens=3)])
    left = itertools.count(admission.RESERVE_BYTES + 200_000, -100)  # falls a little with each look
    monkeypatch.setattr(admission, "left_bytes", lambda: next(left))
    assert _run(folder, requests, answers) == 0
    counts = {name: each["response"]["body"]["usage"]["completion_tokens"] for name, each in _read(answers).items()}
    assert counts["b"] == 3 < counts["a"] < 500


def test_a_full_disk_is_an_error_that_names_the_answers(
    folder: Path, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, answers = paths
    _write(requests, [_line("a", prompt="Hello", max_tokens=2)])

    write = os.write

    def full(file: int, data: bytes) -> int:
        if not os.path.sameopenfile(file, reading.fileno()):
            return write(file, data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    answers.touch()
    reading = answers.open()
    monkeypatch.setattr(offline.os, "write", full)
    assert _run(folder, requests, answers) == 1
    assert f"{answers}: no space left on device" in capsys.readouterr().err
    reading.close()


def test_speculation_is_refused_before_opening_where_the_command_line_gave_it(
    folder: Path, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, answers = paths
    _write(requests, [_line("a", prompt="In the", max_tokens=2)])
    monkeypatch.setenv("TORCH_MESH_SPECULATION", "lookup")
    with monkeypatch.context() as closed:
        closed.setattr(offline, "open_for_serving", lambda *_: pytest.fail("the model is opened"))
        assert main(["run", str(folder), str(requests), str(answers), "--speculation", "lookup"]) == 2
    assert "--speculation lookup is not possible" in capsys.readouterr().err
    assert _run(folder, requests, answers) == 0


@pytest.mark.parametrize("lines", [8, 1])
def test_answers_that_are_computed_together_share_reads(
    lines: int, folder: Path, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, answers = paths
    each = {"max_tokens": 12, "n": 8 // lines}
    _write(requests, [_line(f"{number}", prompt=f"Verse {number} of", **each) for number in range(lines)])
    read, forwards = [], []
    opened = offline.open_service

    @contextlib.contextmanager
    def measured(model: str, config: MeshConfig, given: Any, at_once: int, *more: Any) -> Iterator[Any]:
        with opened(model, config, given, at_once, *more) as service:
            arrived = threading.Semaphore(0)
            add, calls = service.engine._add, []

            def count(*arguments: Any) -> None:
                add(*arguments)
                arrived.release()

            def begin(*_: Any) -> None:
                if not calls:  # the first forward waits for all answers; the second computes the rest
                    assert all(arrived.acquire(timeout=60) for _ in range(at_once))
                calls.append(1)

            monkeypatch.setattr(service.engine, "_add", count)
            hook = service.model.register_forward_pre_hook(begin)
            torch_mesh.reset_stats(service.model)
            yield service
            hook.remove()
            read.append(torch_mesh.stats(service.model).bytes_read)
            forwards.append(len(calls))

    monkeypatch.setattr(offline, "open_service", measured)
    for at_once in (1, 8):
        answers.unlink(missing_ok=True)
        assert _run(folder, requests, answers, "--at-once", str(at_once)) == 0
    assert forwards[0] == 8 * 12 and forwards[1] <= 13
    assert read[1] < 0.7 * read[0]
