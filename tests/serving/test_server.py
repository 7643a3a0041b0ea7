"""``torch-mesh serve``, used by OpenAI's client over loopback: its answers equal the model's own output."""

from __future__ import annotations

import concurrent.futures
import functools
import http.client
import json
import logging
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import psutil
import pytest
import warm
from pairs import first_quick
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from torch_mesh import MeshConfig, UnsupportedModelError
from torch_mesh.cli import main
from torch_mesh.pool.shared_pool import SharedPool
from torch_mesh.serving.server_options import OPTIONS
from torch_mesh.statistics.stats import stats
from torch_mesh.store.manifest import open_store

openai = pytest.importorskip("openai")

TEXTS = ["And it came to pass in those days, that", "def main():\n    parser =", "In the beginning", "import os\n"]
CHAT = [{"role": "user", "content": TEXTS[0]}]
TOKENS = 12


@pytest.fixture(scope="module")
def server(serving: Callable[..., Any], folder: Path) -> Any:
    return serving(folder, MeshConfig(resident=0.25, policy="lru"))


@pytest.fixture(scope="module")
def expected_text(folder: Path) -> Callable[..., str]:
    """Returns the model's own continuation of a text, with all experts resident."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(resident=1.0))
    tokenizer = AutoTokenizer.from_pretrained(folder)

    @functools.lru_cache
    def expected_text(text: str, tokens: int = TOKENS) -> str:
        inputs = tokenizer(text, return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        return tokenizer.decode(made[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)

    return expected_text


def _complete(client: Any, server: Any, text: str, **more: Any) -> Any:
    return client.completions.create(
        **{"model": server.model, "prompt": text, "max_tokens": TOKENS, "temperature": 0} | more
    )


def _chat(client: Any, server: Any, messages: list[dict[str, Any]], **more: Any) -> Any:
    given = {"model": server.model, "messages": messages, "max_tokens": TOKENS, "temperature": 0} | more
    return client.chat.completions.create(**given)


def _metrics(server: Any) -> dict[str, float]:
    """Return the metrics by name, those by phase also summed."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{server.address}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        name = sample.name.removeprefix("torch_mesh_").removesuffix("_total")
        found[name] = found.get(name, 0) + sample.value
        found[f"{name} {sample.labels.get('phase')}"] = sample.value
    return found


def test_the_server_lists_its_model_and_opens_no_other(client: Any, server: Any) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    for ask in (
        lambda: client.completions.create(model="another/model", prompt="a"),
        lambda: client.chat.completions.create(model="another/model", messages=[{"role": "user", "content": "a"}]),
        lambda: client.responses.create(model="another/model", input="a"),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            ask()
        assert error.value.code == "model_not_found" and error.value.param == "model"
    request = urllib.request.Request(
        f"{server.address}/load_model", b'{"model": "another/model"}', {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 404 and b"opens no other model" in refused.value.read()
    request.data = json.dumps({"model": server.model}).encode()
    assert b'"ready"' in urllib.request.urlopen(request, timeout=30).read()


def test_addresses_that_are_read_answer_head_too(server: Any) -> None:
    for path in ("/health", "/metrics", "/v1/models", f"/v1/models/{server.model}", "/v1/models/another"):
        answers = []
        for method in ("GET", "HEAD"):
            connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=30)
            connection.request(method, path)
            answer = connection.getresponse()
            answers.append((answer.status, answer.headers["content-type"]))
            assert bool(answer.read()) == (method == "GET")
            connection.close()
        assert answers[0] == answers[1] and answers[0][0] == (404 if path.endswith("another") else 200)


def test_a_web_page_cannot_unload_the_model(server: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{server.address}/reset", method="POST"), timeout=30)
    assert refused.value.code == 404
    assert server.kept is not None


@pytest.fixture(scope="module")
def speculating(serving: Callable[..., Any], folder: Path) -> list[Any]:
    """One server whose model does not speculate, and one whose model does."""
    configs = (MeshConfig(resident=0.5, attention="mesh", speculation=each) for each in ("off", "lookup"))
    return [serving(folder, config) for config in configs]


def test_a_model_that_speculates_answers_and_keeps_keys(speculating: list[Any]) -> None:
    text = "self.names.append(name)\nself.values.append(value)\n" * 4
    options = {"max_tokens": 60}
    answers = []
    for server in speculating:
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
            answers.append(_complete(client, server, text, **options).choices[0].text)
            streamed = _complete(client, server, text, stream=True, **options)
            assert "".join(part.choices[0].text for part in streamed if part.choices) == answers[-1]
            assert _metrics(server)["reused_tokens"] > 0
    found = stats(speculating[1].kept.model).speculation
    assert found.tokens > 60 and found.accepted > 0
    same = len(os.path.commonprefix(answers))  # noqa: RUF071  # of texts, not of paths
    assert same == len(answers[0]) or same > 20  # on some processors rounding decides between two nearly equal logits


@pytest.mark.parametrize("text", TEXTS[:2])
def test_completions(client: Any, server: Any, expected_text: Callable[..., str], text: str) -> None:
    assert _complete(client, server, text).choices[0].text == expected_text(text)
    streamed = _complete(client, server, text, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected_text(text)


def test_chats(client: Any, server: Any, expected_text: Callable[..., str]) -> None:
    expected = expected_text(f"<|im_start|>user\n{TEXTS[0]}<|im_end|>\n<|im_start|>assistant\n")
    answer = _chat(client, server, CHAT)
    # transformers' parser strips trailing blanks as part of the template.
    assert answer.choices[0].message.content.strip() == expected.strip() and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == TOKENS
    deltas = [chunk.choices[0].delta for chunk in _chat(client, server, CHAT, stream=True)]
    assert "".join(delta.content or "" for delta in deltas).strip() == expected.strip() != ""


def test_tools(client: Any, server: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ur"}}\n</tool_call>'
    forced = [*tokenizer(call)["input_ids"], tokenizer.eos_token_id]
    generate = server.kept._generate
    prompts = []

    def forced_generate(**arguments: Any) -> Any:
        prompts.append(tokenizer.decode(arguments["input_ids"][0]))
        start = arguments["input_ids"].shape[1]
        return generate(
            **arguments, prefix_allowed_tokens_fn=lambda _, ids: [forced[min(len(ids) - start, len(forced) - 1)]]
        )

    monkeypatch.setattr(server.kept, "_generate", forced_generate)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": parameters}}
    ]
    messages = [{"role": "user", "content": "What is the weather in Ur?"}]
    answer = _chat(client, server, messages, tools=tools, max_tokens=100).choices[0]
    (parsed,) = answer.message.tool_calls
    assert (parsed.function.name, json.loads(parsed.function.arguments)) == ("weather", {"city": "Ur"})
    assert answer.finish_reason == "tool_calls" and '"the weather"' in prompts[0]
    chunks = list(_chat(client, server, messages, tools=tools, max_tokens=100, stream=True))
    (streamed,) = (call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ())
    assert (
        streamed.function.to_dict() == parsed.function.to_dict() and chunks[-1].choices[0].finish_reason == "tool_calls"
    )
    cut = _chat(client, server, messages, tools=tools, max_tokens=len(forced) // 2).choices[0]
    assert cut.finish_reason == "length" and not cut.message.tool_calls and '{"name": "wea' in cut.message.content
    forced[:] = [*tokenizer('<tool_call>\n{"nothing": 1}\n</tool_call>')["input_ids"], tokenizer.eos_token_id]
    answer = _chat(client, server, messages, tools=tools, max_tokens=100).choices[0]
    assert not answer.message.tool_calls and '{"nothing": 1}' in answer.message.content


def test_several_clients_at_once(client: Any, server: Any, expected_text: Callable[..., str]) -> None:
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda text: _complete(client, server, text).choices[0].text, TEXTS * 2))
    assert answers == [expected_text(text) for text in TEXTS * 2]


def test_generation_ends_when_its_client_disconnects(
    client: Any, server: Any, expected_text: Callable[..., str]
) -> None:
    before = _metrics(server)["generated_tokens"]
    with _complete(client, server, TEXTS[3], stream=True, max_tokens=1500) as stream:
        for _ in range(3):
            next(stream)
    deadline = time.monotonic() + 60
    while (after := _metrics(server)["generated_tokens"]) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 0 < after - before < 1500
    assert _complete(client, server, TEXTS[2]).choices[0].text == expected_text(TEXTS[2])


def test_a_second_turn_computes_only_new_tokens(client: Any, server: Any) -> None:
    long = "\n".join(f"{line}. And it came to pass that the word was heard." for line in range(60))
    messages = [{"role": "user", "content": long}]
    first = _metrics(server)
    answer = _chat(client, server, messages, max_tokens=5).choices[0].message.content
    second = _metrics(server)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    _chat(client, server, messages, max_tokens=5)
    third = _metrics(server)

    def computed(after: dict[str, float], before: dict[str, float]) -> float:
        return sum((after[name] - before[name]) * sign for name, sign in (("prompt_tokens", 1), ("reused_tokens", -1)))

    assert second["prompt_tokens"] - first["prompt_tokens"] > 800
    assert computed(third, second) <= 0.05 * computed(second, first)


def test_metrics_equal_the_pools_statistics(client: Any, server: Any) -> None:
    before = _metrics(server)
    _complete(client, server, TEXTS[1] + " # once more", max_tokens=7)
    after = _metrics(server)
    more = {name: after[name] - before[name] for name in after}
    assert more["generated_tokens"] == 7
    # The prompt is one forward, of few rows or many. The last token needs none.
    assert more["forwards"] == 7
    assert more["accesses"] == more["hits"] + more["cold_misses"] + more["inflight_misses"] > 0
    assert more["cold_misses"] == 0 or (more["read_bytes"] > 0 and after["wait_seconds"] > 0)
    assert after["slots"] == after["slots_limit"] == 48
    assert after["kept_keys_bytes"] > 0 and after["kept_tokens"] > 0


def test_metrics_leave_a_pending_error_of_a_gpu_to_the_next_forward(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_mesh.statistics.stats.shared_devices_of", lambda _: pytest.fail("it was checked"))
    assert _metrics(server)["slots"] == 48


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_error_is_of_the_options_only_before_the_first_token(
    has_begun: bool, client: Any, server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generate = server.kept._generate

    def fail(**arguments: Any) -> None:
        if has_begun:
            generate(**arguments)
        raise ValueError("no such value")

    monkeypatch.setattr(server.kept, "_generate", fail)
    own = {"extra_body": {"generation_config": '{"max_new_tokens": 3}'}}
    with pytest.raises(openai.InternalServerError if has_begun else openai.BadRequestError, match="no such value"):
        client.completions.create(model=server.model, prompt="a", **own)
    # The client's errors are logged without a traceback, since it may send as many as it likes.
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError] * has_begun
    (line,) = [record.getMessage() for record in caplog.records if record.name == "torch_mesh.serving.engine"]
    assert "\n" not in line


def test_responses_are_streamed_on_request(client: Any, server: Any) -> None:
    ask = {"model": server.model, "input": TEXTS[0], "max_output_tokens": TOKENS, "temperature": 0}
    answer = client.responses.create(**ask)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == TOKENS
    assert client.responses.create(**ask, stream=None).output_text == answer.output_text
    events = list(client.responses.create(**ask, stream=True))
    assert events[-1].type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text.strip() == answer.output_text.strip() != ""  # see test_chats


def test_an_error_in_a_stream_is_raised_by_the_client(
    client: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = server.kept._generate

    def failing(**arguments: Any) -> Any:
        streamer = arguments.pop("streamer", None)
        if streamer is not None:
            for tokens in generate(**arguments | {"max_new_tokens": 3}).T.split(arguments["input_ids"].shape[1]):
                streamer.put(tokens[:, 0])
        raise RuntimeError('a "quote"\nand a line')

    monkeypatch.setattr(server.kept, "_generate", failing)
    # A logged error has frames, through which pytest would keep the model alive.
    monkeypatch.setattr(logging.getLogger("torch_mesh.serving.engine"), "disabled", True)
    with pytest.raises(openai.InternalServerError, match='a "quote"'):
        _complete(client, server, TEXTS[0])
    for ask in (_complete(client, server, TEXTS[0], stream=True), _chat(client, server, CHAT, stream=True)):
        parts = []
        with pytest.raises(openai.APIError, match='a "quote"\nand a line') as error:
            parts += list(ask)
        assert error.value.type == "server_error"
    events = list(client.responses.create(model=server.model, input=TEXTS[0], stream=True))
    assert [event.type for event in events][-2:] == ["error", "response.failed"] and 'a "quote"' in events[-2].message


def test_options_that_generate_refuses_are_the_clients_error(client: Any, server: Any) -> None:
    options = {"generation_config": '{"sequence_bias": 3}'}
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.APIError, match="generation_config") as error:
            list(_complete(client, server, TEXTS[0], extra_body=options, **more))
        assert error.value.code == "invalid_value" and error.value.param == "generation_config"


@pytest.mark.parametrize("name", ["num_beams", "num_beam_groups", "num_return_sequences"])
def test_several_sequences_at_a_time_are_refused(name: str, client: Any, server: Any) -> None:
    def ask(count: int) -> Any:
        options = json.dumps({"do_sample": True, name: count})
        return _complete(client, server, TEXTS[0], temperature=1, extra_body={"generation_config": options})

    with pytest.raises(openai.BadRequestError, match=f"{name} is 2: .* Give 1") as error:
        ask(2)
    assert error.value.param == "generation_config"
    assert len(ask(1).choices) == 1


def test_beams_of_the_models_own_options_are_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    from torch_mesh.serving.service import Service

    model = SimpleNamespace(generation_config=GenerationConfig(num_beams=4, num_return_sequences=2, length_penalty=2.0))
    service = Service("beams", model, None, None)  # type: ignore[arg-type]
    assert model.generation_config.num_beams == model.generation_config.num_return_sequences == 1
    assert "num_beams 4" in caplog.text and "num_return_sequences 2" in caplog.text
    assert service._config({"max_tokens": 1}, "max_tokens")[0].num_beams == 1


def test_a_temperature_close_to_0_counts_as_0(client: Any, server: Any, expected_text: Callable[..., str]) -> None:
    sampling = {"generation_config": json.dumps({"max_new_tokens": TOKENS, "do_sample": True})}
    answer = _complete(client, server, TEXTS[0], temperature=1e-300, extra_body=sampling)
    assert answer.choices[0].text == expected_text(TEXTS[0])


def test_stop_fails_pending_requests_and_waits_for_the_running_one(serving: Callable[..., Any], folder: Path) -> None:
    server = serving(folder, MeshConfig(resident=0.5))
    generate = server.kept._generate
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(**arguments: Any) -> Any:
        begun.set()
        try:
            assert go_on.wait(60)
            return generate(**arguments)
        finally:
            ended.set()

    server.kept._generate = slow
    address = f"{server.address}/v1"
    with (
        openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        try:
            requests = [pool.submit(_complete, client, server, TEXTS[0])]
            assert begun.wait(60)
            requests += [pool.submit(_complete, client, server, TEXTS[1])]  # waits behind the first
            stream = _chat(client, server, CHAT, stream=True)
            next(iter(stream))  # the role, which is sent before anything is computed
            stopping = pool.submit(server.stop, 0.5)
            for each in requests:
                error: Any = each.exception(60)
                assert error.status_code == 503 and error.code == "server_stopping" and error.type == "server_error"
            with pytest.raises(openai.APIError) as cut_off:
                list(stream)
            assert cut_off.value.code == "server_stopping"
            with pytest.raises(concurrent.futures.TimeoutError):
                stopping.result(0.3)
        finally:
            go_on.set()
        stopping.result(60)
        assert ended.is_set()


def test_a_gguf_file_is_served_by_its_name(serving: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    import gguf_files

    made = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", {"_exps.weight": "Q8_0"})
    server = serving(made.path, MeshConfig(resident=0.5))
    assert server.model == str(made.path)
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        answer = client.completions.create(model=server.model, prompt="a b", max_tokens=3)
        assert answer.choices[0].finish_reason in ("length", "stop")  # random weights may end the answer
    assert _metrics(server)["accesses"] > 0
    server.stop()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("owner/model", "owner/model"),
        ("model", "model"),
        ("owner/model@v1", "owner/model@v1"),
        ("owner/model@refs/pr/3", "owner/model@refs/pr/3"),
        ("owner/model/file-Q4_K_M.gguf", "owner/model:file-Q4_K_M.gguf"),
        ("owner/model/Q4/deep/file.gguf", "owner/model:Q4/deep/file.gguf"),
        ("owner/model@v1/Q4/file.gguf", "owner/model@v1:Q4/file.gguf"),
        ("owner/model:Q4/file.gguf", "owner/model:Q4/file.gguf"),
        ("owner/model/Q4/File.GGUF", "owner/model:Q4/File.GGUF"),
        ("owner/model@refs/pr/3:Q4/file.gguf", "owner/model@refs/pr/3:Q4/file.gguf"),
    ],
)
def test_names_on_the_hub(given: str, name: str) -> None:
    from torch_mesh.serving.opening import source_of

    assert source_of(given).name == name


def test_a_local_gguf_file_has_the_name_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_mesh.serving.opening import source_of

    monkeypatch.setattr("os.path.lexists", lambda _: True)
    monkeypatch.setattr("os.path.isfile", lambda _: True)
    for given, folder in (("/a.gguf", "/"), ("a.gguf", "."), ("b/a.gguf", "b"), ("../b/a.gguf", "../b")):
        source = source_of(given)
        assert (source.name, source.folder, source.file) == (given, folder, "a.gguf")


@pytest.mark.parametrize("given", ["a/b/c", "owner/model@", "owner/model@a@b", "owner/model:file.bin", "file.gguf", ""])
def test_invalid_names_are_refused(given: str) -> None:
    from torch_mesh.serving.opening import source_of

    with pytest.raises(ValueError, match="owner/model/file.gguf"):
        source_of(given)


def test_a_gguf_file_of_a_revision_is_served_from_the_hub(
    serving: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    import gguf_files

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--model"
    (repository / "snapshots" / commit / "Q8").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    gguf_files.write(repository / "snapshots" / commit / "Q8" / "file.gguf", "qwen3moe", {"_exps.weight": "Q8_0"})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    server = serving(Path("owner/model@v1/Q8/file.gguf"), MeshConfig(resident=0.5))
    assert server.model == "owner/model@v1:Q8/file.gguf"
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        answer = client.completions.create(model=server.model, prompt="a b", max_tokens=3)
        assert answer.choices[0].finish_reason in ("length", "stop")  # random weights may end the answer
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="owner/model@v2:Q8/file.gguf", prompt="a b", max_tokens=3)
    server.stop()


def test_log_levels_are_those_of_transformers() -> None:
    (choices,) = (option.choices for option in OPTIONS if option.name == "log_level")
    assert choices == tuple(transformers_logging.log_levels)


@pytest.mark.parametrize("level", first_quick("detail", *sorted(transformers_logging.log_levels.keys() - {"detail"})))
def test_a_server_starts_with_each_log_level(level: str, serving: Callable[..., Any], mesh_tiny: Path) -> None:
    server = serving(mesh_tiny, MeshConfig(resident=0.3), log_level=level)
    assert logging.getLogger("uvicorn.access").level == transformers_logging.log_levels[level]
    server.stop()


def test_a_model_without_a_chat_template_is_an_error(
    serving: Callable[..., Any], mesh_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(mesh_tiny), "--resident", "0.3", "--log-level", "error"]) == 2
    message = capsys.readouterr().err
    assert f"{mesh_tiny} has no chat template" in message and "for Qwen's models ChatML" in message
    server = serving(mesh_tiny, MeshConfig(resident=0.25))
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="no chat template") as error:
                _chat(client, server, [{"role": "user", "content": "a"}], stream=stream)
            assert error.value.param == "messages"
        assert _complete(client, server, TEXTS[0], max_tokens=3).usage.completion_tokens == 3
    server.stop()


@pytest.mark.slow
def test_eight_clients_for_minutes(serving: Callable[..., Any], folder: Path) -> None:
    """No errors, the same tokens as a client alone gets, and memory that does not grow.

    No keys are kept, since those of a decode step may differ from a prompt's in the last bit, which may decide a near
    tie.
    """
    server = serving(folder, MeshConfig(resident=0.25, policy="lru"), kept_bytes=0)
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120)
    texts = [text[: len(text) - cut] for text in TEXTS for cut in range(4)]
    expected = {text: _complete(client, server, text, max_tokens=6 + len(text) % 7).choices[0].text for text in texts}
    end = time.monotonic() + float(os.environ.get("TORCH_MESH_TEST_SOAK_SECONDS", "300"))

    def ask(which: int) -> int:
        draw, asked = random.Random(which), 0
        while time.monotonic() < end:
            text = draw.choice(texts)
            stream = draw.random() < 0.5
            answer = _complete(client, server, text, max_tokens=6 + len(text) % 7, stream=stream)
            chunks = list(answer) if stream else [answer]
            if stream and draw.random() < 0.1:
                with _complete(client, server, text, max_tokens=1000, stream=True) as left:
                    next(left)
            assert "".join(chunk.choices[0].text for chunk in chunks) == expected[text]
            asked += 1
        return asked

    process = psutil.Process()
    with client, ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(ask, which) for which in range(8)]
        memory = []
        while not all(each.done() for each in asked):
            time.sleep(1)
            memory.append(process.memory_info().rss)
    assert sum(each.result() for each in asked) > 50
    third = len(memory) // 3
    assert max(memory[-third:]) < 1.1 * max(memory[third : 2 * third])
    server.stop()


@pytest.mark.thorough
def test_two_servers_share_one_pool(folder: Path, tmp_path: Path, expected_text: Callable[..., str]) -> None:
    socket_path = tmp_path / "pool.socket"
    pool = SharedPool(open_store(folder), socket_path, 0.5, workers=2)
    with ExitStack() as stack:
        stack.callback(pool.close)
        servers = []
        for _ in range(2):
            serving = warm.start_command("serve", folder, "--shared", socket_path, "--port", "0")
            servers.append(stack.enter_context(serving))
            stack.callback(servers[-1].kill)
        clients = []
        for server in servers:
            address = server.stdout.readline().split()[3].removesuffix(",")
            clients.append(
                stack.enter_context(openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120))
            )

        def complete(client: Any, text: str) -> str:
            made = client.completions.create(model=str(folder), prompt=text, max_tokens=TOKENS, temperature=0)
            return str(made.choices[0].text)

        with ThreadPoolExecutor(2) as threads:
            for text in TEXTS[:2]:
                assert (
                    list(threads.map(lambda client, text=text: complete(client, text), clients))
                    == [expected_text(text)] * 2
                )
        assert pool.lender.workers == 2
        servers[0].kill()
        servers[0].wait()
        assert complete(clients[1], TEXTS[2]) == expected_text(TEXTS[2])
        assert pool.lender.workers == 1 and pool.engine.pinned() <= pool.lender.slots


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_steps_are_one_graph_for_all_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    from torch_mesh.serving.server import Server

    options = {"host": "127.0.0.1", "port": 0, "compile": True}
    monkeypatch.setattr("torch_mesh.hf.compile.CompileConfig", functools.partial(CompileConfig, backend="eager"))
    with Server(str(folder), MeshConfig(resident=1.0), None, options) as server:
        progress = server.engine.progress
        fractions, end = [], progress.end

        def ending() -> None:
            fractions.append(progress.fraction)
            end()

        monkeypatch.setattr(progress, "end", ending)
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
            not_compiled = json.dumps({"disable_compile": True, "do_sample": False, "max_new_tokens": TOKENS})
            _complete(client, server, TEXTS[2], extra_body={"generation_config": not_compiled})
            assert counters["stats"]["unique_graphs"] == 0
            answer = _complete(client, server, TEXTS[2]).choices[0].text
            streamed = _complete(client, server, TEXTS[2], stream=True)
            assert answer == "".join(chunk.choices[0].text for chunk in streamed)
            _complete(client, server, TEXTS[0], temperature=1, seed=1, stop=["the"])
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        assert set(fractions) == {1.0} and not server.kept.conversations
    monkeypatch.setattr("torch_mesh.hf.compile.can_compile", lambda model: False)
    with pytest.raises(UnsupportedModelError, match="leave out --compile"):
        Server(str(folder), MeshConfig(resident=1.0), None, options)
