"""The page of torch-mesh report: its content, hostile files, and how a browser shows it."""

from __future__ import annotations

import errno
import html
import json
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from torch_mesh import MeshConfig, MeshError
from torch_mesh.cli import main
from torch_mesh.statistics.counters import HEADINGS, Counters, LayerCounters, Stats
from torch_mesh.statistics.live import LivePage
from torch_mesh.statistics.page import STRETCHES, read_plan, render_page
from torch_mesh.statistics.report import StatsFile, read_report

LAYERS, EXPERTS = 3, 12
HOSTILE = (
    "</script><script>document.title='broken'</script><!-- data --><img src=x "
    "onerror=\"document.title='broken'\">&amp;\ud800'"
)


def line(index: int, rng: np.random.Generator, **others: Any) -> dict[str, Any]:
    """The statistics of line number ``index``. Each line adds the same counts."""
    counts = {
        "forwards": index,
        "accesses": 40 * index,
        "hits": 30 * index,
        "bytes_read": 10**7 * index,
        "stall_seconds": 0.3 * index,
    }
    layers = [LayerCounters(**counts, decode=Counters(**counts)) for _ in range(LAYERS)]
    whole = {name: value * (1 if name == "forwards" else LAYERS) for name, value in counts.items()}
    resident = [np.packbits(rng.random(EXPERTS) < 0.5).tobytes().hex() for _ in range(LAYERS)]
    memory = {"process": 10**9 + index, "pool": 10**8, "budget": 2 * 10**8, "left": 10**9}
    stats = Stats(**whole, decode=Counters(**whole), per_layer=layers, slots=18)
    moment = {"experts": EXPERTS, "resident": resident, "memory": memory}
    return {"time": 1e9 + 4 * index, "forward": index} | moment | stats.to_dict(experts=False) | others


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_statistics_are_not_replaced_by_a_page(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write(tmp_path / f"stats.rank{rank}.jsonl", [line(1, rng)]) for rank in (0, 1)]
    before = files[0].read_text()
    for wrong in (["--html", *files], [files[0], "--html", files[0]]):
        assert main(["report", *map(str, wrong)]) == 2
        assert "stats.rank0.jsonl exists and is no earlier output of this kind" in capsys.readouterr().err
    assert main(["report", str(files[0]), "--html", str(tmp_path / "none" / "page.html")]) == 1
    assert "there is no such folder" in (shown := capsys.readouterr()).err and not shown.out
    assert files[0].read_text() == before
    for _ in range(2):
        assert main(["report", *map(str, files), "--html", str(tmp_path / "page.html")]) == 0


def data_of(page: str) -> dict[str, Any]:
    [(text)] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_the_page_has_the_figures_of_the_lines(tmp_path: Path, rng: np.random.Generator) -> None:
    lines = [line(index, rng) for index in range(1, 30)]
    file = write(tmp_path / "s.jsonl", lines)
    [run] = data_of(render_page([read_report(file, STRETCHES)]))["runs"]
    assert run["resident"] == [each["resident"] for each in lines[1:]] and run["experts"] == EXPERTS
    assert run["memory"]["process"] == [each["memory"]["process"] for each in lines[1:]]
    assert run["begin"] == [4 * index for index in range(28)] and run["end"][-1] == 4 * 28
    assert set(run["hit_rate"]["decode"]) == {0.75} and set(run["hit_rate"]["prefill"]) == {None}
    assert set(run["waiting"]) == {0.225} and set(run["read"]) == {7.5e6} and set(run["steps"]) == {0.25}
    assert data_of(render_page([read_report(file, STRETCHES)]))["live"] is False  # such a page asks for no updates
    assert run["summary"]["peak_bytes"] == 10**9 + 29 and run["summary"]["tokens_per_second"] == 0.25


def test_the_page_describes_the_run_and_explains_its_headings(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"model": HOSTILE, "format": "int4, groups of 64", "policy": "heat", "machine": "2 processors"}
    file = write(tmp_path / "s.jsonl", [line(1, rng), line(2, rng, about=about | {"more": 5}), line(3, rng)])
    growing = write(tmp_path / "t.jsonl", [line(1, rng), line(2, rng, about=about | {"more": 5})])
    page = render_page([read_report(growing, STRETCHES)])
    [run] = data_of(page)["runs"]
    assert run["about"] == about | {"model": HOSTILE.replace("\ud800", "?")}
    assert data_of(render_page([read_report(file, STRETCHES)]))["runs"][0]["about"] == {}
    assert page.count("<script") == 2 and "<img" not in page
    for heading, meaning in HEADINGS.items():
        assert f"<dt>{heading}</dt><dd>{html.escape(meaning)}</dd>" in page
    assert Stats().table()[0] == tuple(HEADINGS)
    assert main(["report", str(growing)]) == 0
    assert "format: int4, groups of 64\npolicy: heat\nmachine: 2 processors" in capsys.readouterr().out


def test_a_model_writes_its_description(mesh_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "s.jsonl"
    config = MeshConfig(resident=0.5, weights="int8", policy="lru", stats={"file": str(file), "every": 1})
    model = AutoModelForCausalLM.from_pretrained(mesh_tiny, quantization_config=config)
    with torch.no_grad():
        for _ in range(2):
            model(torch.tensor([[1, 2, 3]]))
    until = time.monotonic() + 60
    while not file.exists() or not file.read_bytes().endswith(b"\n"):
        assert time.monotonic() < until
        time.sleep(0.01)
    about = read_report(file).runs[0].about
    assert about["model"] == str(mesh_tiny) and about["format"] == "int8, groups of 64" and about["policy"] == "lru"
    assert f"torch {torch.__version__}" in about["machine"] and "processors" in about["machine"]


def test_lines_of_earlier_versions_have_curves_and_no_residency(tmp_path: Path, rng: np.random.Generator) -> None:
    lines = [line(index, rng) for index in range(1, 5)]
    for each in lines:
        del each["experts"], each["resident"], each["memory"]
    [run] = data_of(render_page([read_report(write(tmp_path / "s.jsonl", lines), STRETCHES)]))["runs"]
    assert run["resident"] is None and run["memory"] is None and len(run["waiting"]) == 3


def test_a_long_run_is_thinned_out(tmp_path: Path, rng: np.random.Generator) -> None:
    file = write(tmp_path / "s.jsonl", [line(index, rng) for index in range(1, 1500)])
    page = render_page([read_report(file, STRETCHES)])
    [run] = data_of(page)["runs"]
    assert STRETCHES / 2 < len(run["begin"]) <= STRETCHES and len(page) < 200_000
    assert run["end"][-1] == 4 * 1498 and run["begin"][0] == 0


def test_nothing_in_a_file_becomes_markup(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "<b>").mkdir()
    file = write(tmp_path / "<b>" / "<!-- data --><i>.jsonl", [line(index, rng, lossy=HOSTILE) for index in (1, 2, 3)])
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"status": HOSTILE, "peak_bytes": 5, "hit_rate": {"expected": 0.5}}))
    out = tmp_path / "out.html"
    assert main(["report", str(file), "--html", str(out), "--plan", str(plan)]) == 0
    page = out.read_text()
    assert page.count("<script") == 2 and "<img" not in page and "<b>" not in page and "<i>" not in page
    data = data_of(page)
    assert data["runs"][0]["lossy"] == HOSTILE.replace("\ud800", "?") and data["runs"][0]["name"] == str(file)
    assert data["plan"] == {
        "peak_bytes": 5,
        "hit_rate": 0.5,
        "tokens_per_second": None,
        "pool_bytes": None,
        "slots": None,
    }


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({"experts": -1}, "its experts are -1"),
        ({"experts": 1 << 20}, "its experts are 1048576"),
        ({"experts": True}, "its experts are True"),
        ({"experts": 0}, "its resident is no list"),
        ({"resident": None}, "its resident is no list"),
        ({"resident": ["ffff"]}, "its resident is no list"),
        ({"resident": ["ffff", "ffff", 3]}, "its resident has other bits"),
        ({"resident": ["ffff", "ffff", "ff"]}, "its resident has other bits"),
        ({"resident": ["ffff", "ffff", "<b>!"]}, "its resident has other bits"),
        ({"about": []}, "its about is no text"),
        ({"about": {"model": 5}}, "its about is no text"),
        ({"memory": []}, "its memory is not in bytes"),
        ({"memory": {"process": 1, "pool": 1, "budget": 1}}, "its memory is not in bytes"),
        ({"memory": {"process": 1, "pool": 1, "budget": 1, "left": 1.5}}, "its memory is not in bytes"),
    ],
)
def test_lines_with_wrong_values_are_refused(
    tmp_path: Path, rng: np.random.Generator, spoilt: dict[str, Any], message: str
) -> None:
    file = write(tmp_path / "s.jsonl", [line(1, rng), line(2, rng, **spoilt)])
    with pytest.raises(MeshError, match=f"line 2: not a line of statistics, {message}"):
        read_report(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "no status"),
        ("{}", "no status"),
        ('{"status": "ok", "peak_bytes": "much"}', "peak_bytes is 'much'"),
        ('{"status": "ok", "slots": NaN}', "slots is nan"),
        ('{"status": "ok", "hit_rate": {"expected": [1]}}', r"hit_rate is \[1\]"),
    ],
)
def test_files_that_are_no_plan_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(MeshError, match=f"is not what `torch-mesh plan --json` prints: {message}"):
        read_plan(tmp_path / "plan.json")


def test_the_plan_option_needs_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "s.jsonl"), "--plan", str(tmp_path / "plan.json")]) == 2
    assert "give --html" in capsys.readouterr().err


def test_a_growing_file_reads_like_a_complete_one(tmp_path: Path, rng: np.random.Generator) -> None:
    lines = [line(index, rng) for index in range(1, 40)] + [line(index, rng) for index in range(1, 20)]
    whole = "".join(json.dumps(each) + "\n" for each in lines).encode()
    file, growing = tmp_path / "s.jsonl", StatsFile(tmp_path / "s.jsonl")
    for end in [*sorted(rng.integers(0, len(whole), 12).tolist()), len(whole)]:
        file.write_bytes(whole[:end])
        complete = whole[: whole.rfind(b"\n", 0, end) + 1]
        (tmp_path / "complete.jsonl").write_bytes(complete)
        runs = growing.report(7, growing=True).runs
        assert runs == (read_report(tmp_path / "complete.jsonl", 7).runs if complete else ())
    write(file, lines[:3])  # as if another process began the file anew
    assert growing.report(7, growing=True).runs == read_report(file, 7).runs


@pytest.mark.parametrize("way", ["unlinked", "truncated"])
def test_a_replaced_file_is_read_anew(tmp_path: Path, rng: np.random.Generator, way: str) -> None:
    file = write(tmp_path / "s.jsonl", [line(index, rng) for index in range(1, 4)])
    growing = StatsFile(file)
    assert [run.lines for run in growing.report(7, growing=True).runs] == [3]
    if way == "unlinked":
        file.rename(tmp_path / "kept.jsonl")  # keeps its inode from being reused
    write(file, [line(index, rng) for index in range(4, 40)])  # forwards that could continue those of the first file
    assert growing.report(7, growing=True) == read_report(file, 7)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        growing.report(7, growing=True)
    write(file, [line(index, rng) for index in range(4, 60)])
    assert growing.report(7, growing=True) == read_report(file, 7)


def test_an_error_in_a_growing_file_names_the_same_line_each_time(tmp_path: Path, rng: np.random.Generator) -> None:
    file = write(tmp_path / "s.jsonl", [line(1, rng), {"a": 1}])
    growing = StatsFile(file)
    for _ in range(3):
        with pytest.raises(MeshError, match="line 2: not a line of statistics"):
            growing.report(7, growing=True)


def test_another_number_of_layers_begins_another_run(tmp_path: Path, rng: np.random.Generator) -> None:
    lines = [line(index, rng) for index in range(1, 9)]
    for each in lines[4:]:
        each["per_layer"], each["resident"] = each["per_layer"][:2], each["resident"][:2]
    runs = data_of(render_page([read_report(write(tmp_path / "s.jsonl", lines), STRETCHES)]))["runs"]
    assert [run["layers"] for run in runs] == [3, 2]
    assert all(len(hits) == run["layers"] for run in runs for hits in (*run["layer_hits"], *run["resident"]))


def test_runs_of_one_file_have_distinct_names(tmp_path: Path, rng: np.random.Generator) -> None:
    file = write(tmp_path / "s.jsonl", [line(1, rng)] * 3)
    runs = data_of(render_page([read_report(file, STRETCHES)]))["runs"]
    assert [run["name"] for run in runs] == [f"{file}, run {number} of 3" for number in (1, 2, 3)]


def test_the_peak_of_memory_is_the_maximum_of_all_lines(tmp_path: Path, rng: np.random.Generator) -> None:
    lines = [line(index, rng) for index in range(1, 60)]
    lines[int(rng.integers(1, 58))]["memory"] |= {"process": 10**11, "budget": 10**10}
    [run] = data_of(render_page([read_report(write(tmp_path / "s.jsonl", lines), 2)]))["runs"]
    assert run["summary"]["peak_bytes"] == 10**11 and run["summary"]["pool_bytes"] == 10**10


def test_lines_at_nearly_the_same_time_have_no_rate(tmp_path: Path, rng: np.random.Generator) -> None:
    file = write(tmp_path / "s.jsonl", [line(1, rng, time=0), line(2, rng, time=5e-324)])
    [run] = data_of(render_page([read_report(file, STRETCHES)]))["runs"]
    assert run["read"] == run["waiting"] == [None] and run["hit_rate"]["decode"] == [0.75]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LivePage]:
    with LivePage([tmp_path / "s.jsonl"], None, 0) as page:
        thread = threading.Thread(target=page.serve_forever, args=[0.01])
        thread.start()
        yield page
        page.shutdown()
        thread.join()


def ask(page: LivePage, path: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(page.address + path, headers=headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_live_page_follows_its_file(live: LivePage, tmp_path: Path, rng: np.random.Generator) -> None:
    file = tmp_path / "s.jsonl"
    assert json.loads(ask(live, "data.json")[1]) == {
        "runs": [],
        "plan": None,
        "notes": [f"{file} has no line yet"],
        "live": True,
    }
    assert ask(live, "")[0] == 200
    write(file, [line(1, rng), line(2, rng)])
    assert [len(run["begin"]) for run in json.loads(ask(live, "data.json")[1])["runs"]] == [1]
    with file.open("a") as more:
        more.write(json.dumps(line(3, rng)) + "\n" + '{"time": 5')
    assert [len(run["begin"]) for run in json.loads(ask(live, "data.json")[1])["runs"]] == [2]
    status, page = ask(live, "")
    assert status == 200 and data_of(page) == json.loads(ask(live, "data.json")[1])
    file.write_text("hello\n" * 1000)
    status, answer = ask(live, "data.json")
    assert status == 500 and "not JSON" in answer


def test_a_live_page_answers_queries_and_head_requests(live: LivePage) -> None:
    assert ask(live, "data.json?again=1") == ask(live, "data.json")
    request = urllib.request.Request(live.address, method="HEAD")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert (answer.status, answer.read()) == (200, b"") and int(answer.headers["Content-Length"]) > 1000


def test_an_unchanged_file_is_not_read_again(
    live: LivePage, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = tmp_path / "s.jsonl", []
    report = StatsFile.report

    def counted(self: StatsFile, *given: Any, **named: Any) -> Any:
        read.append(self.path)
        return report(self, *given, **named)

    monkeypatch.setattr(StatsFile, "report", counted)
    write(file, [line(index, rng) for index in (1, 2)])
    first = ask(live, "data.json")
    assert ask(live, "data.json") == first and read == [file]
    with file.open("a") as more:
        more.write(json.dumps(line(3, rng)) + "\n")
    assert ask(live, "data.json") != first and read == [file] * 2
    file.unlink()
    assert "has no line yet" in ask(live, "data.json")[1]


def test_a_client_that_disconnects_leaves_no_traceback(live: LivePage, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> str:
        try:
            raise error
        except type(error):
            live.handle_error(None, ("127.0.0.1", 1))
        return capfd.readouterr().err

    assert fail(BrokenPipeError()) == fail(ConnectionResetError()) == fail(TimeoutError()) == ""
    assert "of ours" in fail(RuntimeError("of ours"))


def test_a_live_page_refuses_other_host_names(live: LivePage) -> None:
    assert live.address.startswith("http://127.0.0.1:")
    port = live.server_address[1]
    for name in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "",
        ":80",
    ):
        assert ask(live, "", Host=name)[0] == 403
    for name in (
        "127.0.0.1",
        "localhost",
        f"localhost:{port}",
        "127.0.0.1:1",
        "LocalHost:80",
    ):  # names and ports at the other end of a tunnel
        assert ask(live, "", Host=name)[0] == 200
    assert ask(live, "../etc/passwd")[0] == 404 and ask(live, "data.json/x")[0] == 404


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--live", "x"], "from 0 to 65535"),
        (["--live", "65536"], "from 0 to 65535"),
        (["--live", "0", "--html", "o"], "still grow"),
        (["--live", "0", "--stretches", "12"], "--stretches is for the printed table"),
    ],
)
def test_live_needs_a_port_and_excludes_other_output(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LivePage, "serve_forever", lambda _: pytest.fail("it was served"))
    try:
        assert main(["report", str(tmp_path / "s.jsonl"), *options]) == 2
    except SystemExit as exit:
        assert exit.code == 2
    assert message in capsys.readouterr().err


def test_a_port_that_cannot_be_bound_is_named(
    live: LivePage, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = live.server_address[1]
    assert main(["report", str(tmp_path / "s.jsonl"), "--live", str(port)]) == 1
    message = capsys.readouterr().err
    assert f"--live {port}: Address already in use: give another port, or 0" in message

    def refuse(self: LivePage) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(LivePage, "server_bind", refuse)  # root may bind any port
    assert main(["report", str(tmp_path / "s.jsonl"), "--live", "80"]) == 1
    assert "--live 80: Permission denied; ports below 1024 are root's: give another" in capsys.readouterr().err


def test_ctrl_c_ends_a_live_page_with_exit_code_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: LivePage) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LivePage, "serve_forever", interrupt)
    assert main(["report", str(tmp_path / "s.jsonl"), "--live", "0"]) == 130
    assert "Ctrl-C ends it" in capsys.readouterr().out


@pytest.fixture
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--window-size=1200,900",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


@pytest.mark.slow
def test_a_browser_shows_the_page_and_the_keyboard_moves_the_chart(
    browser: Any, tmp_path: Path, rng: np.random.Generator
) -> None:
    from selenium.webdriver.common.keys import Keys

    lines = [line(index, rng, lossy=HOSTILE) for index in range(1, 8)] + [line(index, rng) for index in range(1, 4)]
    out = tmp_path / "out.html"
    assert main(["report", str(write(tmp_path / "s.jsonl", lines)), "--html", str(out)]) == 0
    backgrounds = []
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        browser.get(out.as_uri())
        backgrounds.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert len(set(backgrounds)) == 2
    assert browser.title == "torch_mesh report"

    def find(name: str) -> Any:
        return browser.find_element("id", name)

    find("run").send_keys(Keys.HOME)  # the first run of two
    assert find("lossy").text.startswith("lossy: </script>")
    assert "of 36 experts at this moment" in find("now-text").text
    slider, seen = find("when"), []
    for key in (Keys.HOME, Keys.ARROW_RIGHT, Keys.END):
        slider.send_keys(key)
        seen.append((slider.get_attribute("value"), find("clock").text, find("readout").text))
    assert [value for value, _, _ in seen] == ["0", "1", "5"] and len({clock for _, clock, _ in seen}) == 3
    assert "decode hits 75.0 %" in seen[0][2] and "process 1.00 GB" in seen[0][2]
    held = sum(int(bits, 16).bit_count() for bits in lines[6]["resident"])
    assert find("now-text").text.startswith(f"{held} of 36 ")
    find("layer").send_keys(Keys.END)
    assert find("layer-text").text == "2"
    drawn = (
        "const c = arguments[0], d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; return new "
        "Set(d).size"
    )
    assert all(browser.execute_script(drawn, find(name)) > 2 for name in ("layers", "now", "one"))
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_a_browser_follows_a_live_page(browser: Any, live: LivePage, tmp_path: Path, rng: np.random.Generator) -> None:
    from selenium.webdriver.common.keys import Keys

    def until(seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not seen():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def find(name: str) -> Any:
        return browser.find_element("id", name)

    browser.get(live.address)
    assert "has no line yet" in find("notes").text and not find("main").is_displayed()
    file = write(tmp_path / "s.jsonl", [line(index, rng) for index in range(1, 6)])
    until(lambda: find("main").is_displayed())
    assert find("when").get_attribute("value") == "3"
    with file.open("a") as more:
        more.write(json.dumps(line(6, rng)) + "\n")
    until(lambda: find("when").get_attribute("value") == "4")  # at the last moment the page follows new lines
    find("when").send_keys(Keys.HOME)
    with file.open("a") as more:
        more.write(json.dumps(line(7, rng)) + "\n")
    until(lambda: find("when").get_attribute("max") == "5")
    assert find("when").get_attribute("value") == "0"  # at an earlier moment it stays
    assert browser.get_log("browser") == []
    lines = file.read_text()
    file.write_text("hello\n")
    until(lambda: "Nothing new comes" in find("notes").text)
    file.write_text(lines)  # the same lines as before, so that nothing is drawn again
    until(lambda: find("notes").text == "")
