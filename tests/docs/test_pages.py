"""The README and docs/: every Python block and every `torch-mesh` command runs, links lead somewhere, quoted errors
exist.

A page is run from top to bottom as a reader would, in an empty folder, with the small model of examples/ in the place
of the large ones that it names.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoTokenizer
from upstream import needs_ep_size

from torch_mesh.cli import COMMANDS, _parser

REPOSITORY = Path(__file__).parents[2]
# The small model replaces these. A page may name no others, for transformers would look for those on the hub.
MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-30B-A3B",
    "deepseek-ai/DeepSeek-V3",
    "moonshotai/Kimi-K2-Thinking",
    "openai/gpt-oss-120b",
    "openai/gpt-oss-20b",
)
QUICK = {"README", "quickstart"}  # the other pages take seconds to minutes: make test-all runs them
SERVES = {
    "serve",
    "chat",
    "run",
    "share",
    "--live",
}  # do not end by themselves, or need a file that is not there: these are only parsed here, and have their own tests
FENCE = re.compile(r"^(`{3,})(\w*)([^\n]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Language, the words after it, and the text of each fenced block."""
    for _, language, words, code in FENCE.findall(page.read_text()):
        yield language, words.strip(), code


def commands(code: str, program: str = "torch-mesh") -> Iterator[list[str]]:
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == [program]:
            yield words[1:]


def runnable(page: Path) -> bool:
    return any(language == "python" or (language == "sh" and any(commands(code))) for language, _, code in blocks(page))


def _parameter(page: Path) -> object:
    # The word after a block's language: "gpu" needs a card, "ranks" runs on several ranks, and "server" asks a server,
    # which has tests of its own. No other word is allowed.
    words = {words for language, words, _ in blocks(page) if language == "python"}
    assert words <= {"", "gpu", "ranks", "server"}, f"{page}: {words}"
    marks = [pytest.mark.gpu] * ("gpu" in words) + [needs_ep_size] * ("ranks" in words)
    marks += [pytest.mark.thorough] * (page.stem not in QUICK)
    return pytest.param(page, id=page.stem, marks=marks)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for processes that a page starts
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_OFFLINE", True
    )  # for this process, which has read it already
    (tmp_path / "nvme").mkdir()
    (tmp_path / "mine.txt").write_text((REPOSITORY / "examples" / "demo.py").read_text() * 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # on busy processors two threads that wait for each other take many times as long for so small a model
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", [_parameter(page) for page in pages() if runnable(page)])
def test_page_runs(page: Path, empty_folder: Path, mesh_tiny: Path, request: pytest.FixtureRequest) -> None:
    if "gguf_file" in page.read_text():
        request.getfixturevalue("gguf_download")
    places = (
        dict.fromkeys(MODELS, str(mesh_tiny))
        | {'"examples/mesh-tiny"': f'"{mesh_tiny}"'}
        | {"/nvme": str(empty_folder / "nvme")}
    )
    names: dict[str, object] = {}
    try:
        for language, needs, code in blocks(page):
            for place, replacement in places.items():
                code = code.replace(place, replacement)
            if language == "python":
                block = compile(code, str(page), "exec")
                if needs == "ranks":
                    _run_by_ranks(empty_folder / "run.py", code)
                elif needs != "server":
                    exec(block, names)  # noqa: S102  the page's own code
            elif language == "sh":
                for words in commands(code):
                    _run_command(words)
    finally:
        names.clear()
        gc.collect()


def _run_by_ranks(script: Path, code: str) -> None:
    script.write_text(code)
    how = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(how, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def _run_command(words: list[str]) -> None:
    words, output = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, None)
    parsed = _parser(COMMANDS).parse_args(words)
    if SERVES & set(words):
        return
    with open(output, "w") if output else contextlib.nullcontext(sys.stdout) as file, contextlib.redirect_stdout(file):
        assert parsed.run(parsed) == 0, words


def test_the_template_for_chats_is_chatml(mesh_tiny: Path) -> None:
    [template] = [code for language, _, code in blocks(REPOSITORY / "docs" / "serving.md") if language == "jinja"]
    tokenizer = AutoTokenizer.from_pretrained(mesh_tiny)
    tokenizer.chat_template = template
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == text + "<|im_start|>assistant\n"


@pytest.fixture
def gguf_download(empty_folder: Path) -> None:
    pytest.importorskip("gguf")
    import gguf_files

    (empty_folder / "nvme" / "downloads").mkdir()
    gguf_files.write(empty_folder / "nvme" / "downloads" / "model.gguf", "qwen3moe", {"exps": "Q4_0"})


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_and_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for language, _, code in blocks(page):
        for words in commands(code, "make") if language == "sh" else []:
            assert {word for word in words if "=" not in word} <= targets, words


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


LINKING = [*pages(), *(REPOSITORY / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"))]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page}: {target}"
        assert linked.is_relative_to(REPOSITORY), f"{page}: {target}"
        assert not anchor or anchor in _anchors(linked), f"{page}: {target} is no heading of {linked}"


def test_errors_in_troubleshooting_exist_in_the_sources() -> None:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(quoted) > 10
    engine = [path for path in (REPOSITORY / "csrc").rglob("*") if path.suffix in (".cpp", ".h")]
    files = [*(REPOSITORY / "torch_mesh").rglob("*.py"), *engine, REPOSITORY / "setup.py"]
    # Adjacent literals on several lines become one, as in the compiler.
    sources = [re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in files]
    for message in quoted:
        assert any(message in source for source in sources), message
