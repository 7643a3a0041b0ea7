"""Models whose embedding tables stay in files, served and run: same answers as with tables in memory."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from torch_mesh import MeshConfig
from torch_mesh.cli import main
from torch_mesh.store.convert import convert

openai = pytest.importorskip("openai")

TEXTS = ["And it came to pass in those days, that", "def main():\n    parser =", "In the beginning", "import os\n"]
TOKENS = 8
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "eos_token_id": 4095,
}
NGRAMS = {
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 48,
    "layer_types": ["linear_attention", "qwen_sparse_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "ple_embed_dim": 96,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 400,
    "split_ngram_parts": 4,
}
PER_LAYER = {
    "top_k_experts": 3,
    "enable_moe_block": True,
    "vocab_size_per_layer_input": 4096,
    "hidden_size_per_layer_input": 8,
}
# The table and the family of transformers. Without a family: the small trained model with an untied head.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ngram_embedding": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", NGRAMS),
    "embed_tokens_per_layer": ("Gemma4TextConfig", "Gemma4ForCausalLM", PER_LAYER),
    "embed_tokens": ("", "", {}),
}


def _built(table: str, mesh_tiny: Path, **sizes: int) -> PreTrainedModel:
    config, model, fields = MODELS[table]
    if not config:
        untied = AutoModelForCausalLM.from_pretrained(mesh_tiny, tie_word_embeddings=False)
        untied.lm_head.weight.data.copy_(untied.model.embed_tokens.weight)
        return untied
    if not hasattr(transformers, model):
        pytest.skip(f"the installed transformers has no {model}")
    configured = getattr(transformers, config)(**SIZES | fields | sizes)
    built = getattr(transformers, model)._from_config(configured, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return built


@pytest.fixture(scope="module", params=MODELS)
def table(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(table: str, mesh_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    _built(table, mesh_tiny).save_pretrained(folder)
    AutoTokenizer.from_pretrained(mesh_tiny).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(serving: Callable[..., Any], model: Path, table: str) -> list[Any]:
    """Two servers: with tables in memory, and in files."""
    return [serving(model, MeshConfig(resident=0.5, tables=tables)) for tables in ("off", table)]


def _answers(server: Any) -> list[str]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        ask = {"model": server.model, "max_tokens": TOKENS, "temperature": 0}
        return [client.completions.create(prompt=text, **ask).choices[0].text for text in TEXTS]


def test_a_servers_answers_are_those_with_tables_in_memory(servers: list[Any]) -> None:
    for _ in range(2):  # the second time with kept keys
        expected, found = map(_answers, servers)
        assert found == expected and any(found)


@pytest.mark.parametrize("table", ["embed_tokens"], indirect=True)
def test_requests_of_a_file_are_computed_at_once(model: Path, table: str, tmp_path: Path) -> None:
    """Uses continuous batching, for which transformers has no caches of the other families."""
    requests = tmp_path / "requests.jsonl"
    lines = [json.dumps({"prompt": text, "max_tokens": TOKENS, "temperature": 0}) for text in TEXTS]
    requests.write_text("".join(f"{line}\n" for line in lines))
    texts = []
    for tables in ("off", table):
        answers = tmp_path / f"{tables}.jsonl"
        command = ["run", str(model), str(requests), str(answers), "--resident", "0.5", "--tables", tables]
        assert main([*command, "--at-once", "4"]) == 0
        found = {
            each["custom_id"]: each["response"]["body"] for each in map(json.loads, answers.read_text().splitlines())
        }
        texts.append([found[f"line-{number + 1}"]["choices"][0]["text"] for number in range(len(TEXTS))])
    assert texts[0] == texts[1] and any(texts[0])


ALLOWED = 256 << 20

# Opens, generates, converts and serves. Prints the results and the process's peak of anonymous memory.
# RLIMIT_DATA would not do, since it counts the checkpoint that transformers maps.
MEASURED = """
import json, sys, threading, urllib.request
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.modules.tables import table_modules
from torch_mesh.serving.server import Server
from torch_mesh.store.convert import convert

raw, store = sys.argv[1:3]
torch.set_num_threads(1)

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

peak, done, begin = [0], threading.Event(), anonymous_bytes()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous_bytes() - begin)

watching = threading.Thread(target=watch)
watching.start()

def generated(folder, **fields):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(threads=1, **fields))
    assert len(list(table_modules(model))) == (not fields)
    return model.generate(torch.arange(5, 60)[None], max_new_tokens=8, do_sample=False)[0].tolist()

said = [generated(raw), convert(raw, store, "int8", workers=1).store.manifest.weights, generated(store)]
with Server(store, MeshConfig(threads=1), 1 << 20, {"host": "127.0.0.1", "port": 0}) as server:
    body = json.dumps({"model": server.model, "prompt": "In the beginning", "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{server.address}/v1/completions", body, {"Content-Type": "application/json"})
    said.append(json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"])
said.append(peak[0])
said += [generated(folder, tables="off") for folder in (raw, store)]
done.set()
watching.join()
print(json.dumps([*said, peak[0]]))
"""


@pytest.mark.slow
def test_a_table_of_three_times_the_memory(mesh_tiny: Path, tmp_path: Path) -> None:
    raw, store = tmp_path / "raw", tmp_path / "store"
    rows = 3 * ALLOWED // 480
    sizes = {"ple_embed_dim": 960, "ngram_vocab_size_base": rows // 4, "split_ngram_parts": 16}
    built = _built("ngram_embedding", mesh_tiny, **sizes)
    assert built.model.layers[0].ple.ple_embedding.ngram_embedding.weight.nbytes >= 3 * ALLOWED
    built.save_pretrained(raw)
    AutoTokenizer.from_pretrained(mesh_tiny).save_pretrained(raw)
    del built
    command = [sys.executable, "-c", MEASURED, str(raw), str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    of_raw, weights, of_store, tokens, peak, *in_memory, whole = json.loads(done.stdout.splitlines()[-1])
    assert (weights, tokens, [of_raw, of_store]) == ("int8", 4, in_memory)
    assert peak < ALLOWED and whole > 3 * ALLOWED, f"{peak:,} and {whole:,} bytes"


# Memory of experts, rows of tables, workspace and the rest of a model. The other options fix memory that could grow
# beside them.
PLANNED = {"resident": 0.5, "tables": "64MiB", "workspace": "8MiB", "dense": "bf16", "threads": 1}
# Otherwise glibc keeps freed activations, in a heap per thread (docs/finetuning.md).
RETURNS_FREED = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "1"}

# Opens or serves, and fills row cache and pool. Prints its peak of anonymous memory, plan's prediction, and the
# imported modules.
FILLED = """
import json, sys, threading, urllib.request
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
import torch_mesh
from torch_mesh import MeshConfig
from torch_mesh.modules.tables import table_modules
from torch_mesh.planning.plan import plan
from torch_mesh.serving.server import Server
from torch_mesh.system.memory import anonymous_bytes

folder, serves, fields = sys.argv[1], sys.argv[2] == "serve", json.loads(sys.argv[3])
torch.set_num_threads(1)
config = MeshConfig(**fields)
planned = plan(Path(folder), config)
peak, done = [0], threading.Event()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous_bytes())

def fill(model):
    [(_, embedding)] = table_modules(model)
    [rows] = embedding._mesh_tables.engine.describe()["cache_rows"]
    draw = torch.Generator().manual_seed(0)
    for _ in range(3 * rows // 2000 + 1):  # each set of the cache is full then, but for one in many millions
        embedding(torch.randint(embedding.num_embeddings, (2000,), generator=draw))
    return torch.randint(5, 4000, (1, 8), generator=draw)  # whose activations are small

watching = threading.Thread(target=watch)
watching.start()
if serves:
    with Server(folder, config, 1 << 20, {"host": "127.0.0.1", "port": 0}) as server:
        prompt = fill(server.kept.model)[0].tolist()
        body = json.dumps({"model": server.model, "prompt": prompt, "max_tokens": 16}).encode()
        request = urllib.request.Request(
            f"{server.address}/v1/completions", body, {"Content-Type": "application/json"}
        )
        assert json.load(urllib.request.urlopen(request))["usage"]["prompt_tokens"] == len(prompt)
else:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    model.generate(fill(model), max_new_tokens=16, do_sample=False)
done.set()
watching.join()
states = {
    "peak": planned.peak_bytes - planned.process_bytes,
    "pool": planned.pool_bytes,
    "tables": planned.sizes.table_memory_bytes,
    "dense": planned.sizes.dense_bytes,
    "workspace": planned.workspace_bytes,
}
print(json.dumps([peak[0], states, list(sys.modules)]))
"""

# Prints the memory that the modules named on its input take.
IMPORTED = """
import contextlib, importlib, json, sys
import torch
torch.set_num_threads(1)
for name in json.load(sys.stdin):
    if name not in sys.modules and name != "__main__":
        with contextlib.suppress(ImportError):  # some are made by others as these are imported
            importlib.import_module(name)
from torch_mesh.system.memory import anonymous_bytes
print(anonymous_bytes())
"""


def _output_of(program: str, *arguments: str, given: str = "") -> Any:
    command = [sys.executable, "-c", program, *arguments]
    environment = os.environ | RETURNS_FREED
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _assert_as_planned(folder: Path, how: str, config: dict[str, Any], mapped: int, allowed: int) -> None:
    """Assert that memory without imported modules is within 5 % of plan's, which counts ``mapped`` file bytes too."""
    peak, states, modules = _output_of(FILLED, str(folder), how, json.dumps(config))
    imports = _output_of(IMPORTED, given=json.dumps(modules))
    stated = states["peak"] - mapped
    assert stated < allowed
    assert sum(states[name] for name in ("pool", "tables", "dense", "workspace")) <= states["peak"]
    measured = peak - imports
    found = f"{how} {folder.name}: {measured:,} bytes beside {imports:,}, {stated:,} planned of {states}"
    print(found)
    assert 0.95 * stated <= measured <= 1.05 * stated, found


@pytest.mark.slow
def test_memory_is_what_plan_predicts(mesh_tiny: Path, tmp_path: Path) -> None:
    raw, store = tmp_path / "raw", tmp_path / "store"
    sizes = {"ple_embed_dim": 960, "ngram_vocab_size_base": 3 * ALLOWED // 480 // 4, "split_ngram_parts": 16}
    experts = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 16}
    built = _built("ngram_embedding", mesh_tiny, **sizes, **experts)
    mapped = built.get_input_embeddings().weight.nbytes  # mapped from the file, so not anonymous memory
    built.save_pretrained(raw)
    AutoTokenizer.from_pretrained(mesh_tiny).save_pretrained(raw)
    del built
    convert(raw, store, "bf16", workers=1)
    for folder, how in ((raw, "open"), (store, "open")):
        _assert_as_planned(folder, how, PLANNED, mapped, ALLOWED)


# A server takes 13 MB for itself, such as its tokenizer, whatever its model's size. This model is not tiny.
SERVED = 1 << 30


def _save_with_zeros(built: Any, folder: Path, rows: int) -> int:
    """Save with at least ``rows`` rows of zeros in the table, which take no disk space; return their bytes."""
    config = copy.deepcopy(built.config)
    config.ngram_vocab_size_base = rows // 4
    with torch.device("meta"):
        outline: Any = type(built)(config)
    module, larger = (each.model.layers[0].ple.ple_embedding for each in (built, outline))
    module.ngram_heads_vocab_sizes.copy_(torch.tensor(larger.head_vocab_sizes))
    module.ngram_heads_offsets.copy_(torch.tensor(larger.head_offsets))
    built.config = config
    built.save_pretrained(folder)
    rest = load_file(folder / "model.safetensors")
    shards = [name for name in rest if ".shard_" in name]
    rows, width = larger.ngram_embedding.weight.shape
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in shards:
        begin, end = end, end + rows // len(shards) * width * 2
        header[name] = {"dtype": "BF16", "shape": [rows // len(shards), width], "data_offsets": [begin, end]}
        del rest[name]
    text = json.dumps(header).encode()
    with (folder / "table.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
    save_file(rest, folder / "rest.safetensors", {"format": "pt"})
    places = dict.fromkeys(rest, "rest.safetensors") | dict.fromkeys(shards, "table.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "model.safetensors").unlink()
    return end


@pytest.mark.slow
def test_memory_of_a_server_is_what_plan_predicts(mesh_tiny: Path, tmp_path: Path) -> None:
    sizes = {"ple_embed_dim": 960, "ngram_vocab_size_base": 400, "split_ngram_parts": 16}
    experts = {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts": 32, "num_experts_per_tok": 16}
    built = _built("ngram_embedding", mesh_tiny, **sizes, **experts)
    mapped = built.get_input_embeddings().weight.nbytes
    assert _save_with_zeros(built, tmp_path, 3 * SERVED // 480 + 1) >= 3 * SERVED
    AutoTokenizer.from_pretrained(mesh_tiny).save_pretrained(tmp_path)
    del built
    _assert_as_planned(tmp_path, "serve", PLANNED | {"resident": 0.75, "tables": "256MiB"}, mapped, SERVED)
