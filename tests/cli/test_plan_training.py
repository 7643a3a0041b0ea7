"""torch-mesh plan --train: a real training step confirms its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

import torch_mesh
from torch_mesh import MeshConfig, PackedWeight
from torch_mesh.cli import main

GIVEN = ["--disk-speed", "1GB/s", "--memory-speed", "20GB/s"]
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TOKENS = 96


@pytest.fixture(autouse=True)
def process_of_constant_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for a process of fixed size: the tests' own grows between two plans."""
    monkeypatch.setattr("torch_mesh.planning.plan.anonymous_bytes", lambda: 300 << 20)


def run(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> dict[str, Any]:
    assert main(["plan", str(folder), "--train", *arguments, *GIVEN, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def adapted(
    folder: Path, modules: list[str], parameters: list[str], rank: int = 4, resident: float = 0.25
) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MeshConfig(resident=resident))
    config = LoraConfig(r=rank, target_modules=modules, target_parameters=parameters)
    return get_peft_model(model, config).train()


def step(model: PeftModel, optimizer: torch.optim.Optimizer) -> int:
    """Run one training step; return the bytes that its forward kept for the backward."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters() if not isinstance(p, PackedWeight)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, PackedWeight) and tensor.untyped_storage().data_ptr() not in weights:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    ids = torch.randint(3, 200, (2, TOKENS // 2))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    bytes_kept = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    optimizer.step()
    return bytes_kept


@pytest.mark.parametrize(
    ("modules", "parameters"),
    [
        ([], BOTH),
        pytest.param(["q_proj", "o_proj"], [*BOTH, "mlp.gate.weight"], marks=pytest.mark.slow),
        pytest.param(["lm_head"], [], marks=pytest.mark.slow),
    ],
)
def test_a_training_step_takes_the_planned_bytes(
    mesh_tiny: Path, capsys: pytest.CaptureFixture[str], modules: list[str], parameters: list[str]
) -> None:
    targets = ["--targets", *modules, *parameters] if modules else []
    planned = run(capsys, mesh_tiny, "--lora-rank", "4", "--tokens", str(TOKENS), "--resident", "0.25", *targets)[
        "training"
    ]
    model = adapted(mesh_tiny, modules, parameters)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    kept = step(model, optimizer)
    assert planned["trained_parameters"] == sum(p.numel() for p in trained)
    assert planned["adapter_bytes"] == sum(p.nbytes for p in trained)
    assert planned["gradient_bytes"] == sum(p.grad.nbytes for p in trained if p.grad is not None)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert planned["optimizer_bytes"] == sum(moment.nbytes for moment in moments)
    if "lm_head" not in modules:  # with an adapter on the head alone, no layer below it keeps anything
        logits = TOKENS * model.config.vocab_size  # the forward keeps 4 bytes of each, the peak holds 12
        layers = kept - 4 * logits
        assert layers / 2 < planned["activation_bytes"] - 12 * logits < 2 * layers


def test_gradient_checkpointing_keeps_less_and_reads_more(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tokens", str(TOKENS), "--resident", "0.25"]
    plain = run(capsys, mesh_tiny, *arguments)["training"]
    saved = run(capsys, mesh_tiny, *arguments, "--gradient-checkpointing")["training"]
    assert saved["activation_bytes"] == plain["activation_bytes_checkpointed"] < plain["activation_bytes"]
    assert saved["read_bytes_per_step"] == pytest.approx(1.5 * plain["read_bytes_per_step"], rel=1e-3)
    assert saved["peak_bytes"] < plain["peak_bytes"]


@pytest.mark.slow
def test_planned_reads_are_those_of_a_step(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = run(capsys, mesh_tiny, "--tokens", str(TOKENS), "--resident", "0.25")["training"]
    model = adapted(mesh_tiny, [], BOTH, rank=8)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    step(model, optimizer)
    torch_mesh.reset_stats(model)
    for _ in range(3):
        step(model, optimizer)
    read = torch_mesh.stats(model).bytes_read / 3
    assert read / 2 < planned["read_bytes_per_step"] < 2 * read


def test_memory_for_training_counts_in_the_peak(mesh_tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = (run(capsys, mesh_tiny, "--lora-rank", rank, "--memory", "64GiB") for rank in ("1", "64"))
    assert small["training"]["adapter_bytes"] * 64 == large["training"]["adapter_bytes"]
    beside = [
        sum(planned["training"][name] for name in ("adapter_bytes", "gradient_bytes", "optimizer_bytes"))
        for planned in (small, large)
    ]
    grown = large["training"]["peak_bytes"] - small["training"]["peak_bytes"]
    assert abs(grown - (beside[1] - beside[0])) < 0.1 * grown


@pytest.fixture
def shared_expert(tmp_path: Path) -> Path:
    """A checkpoint whose linear layers and experts both have a down_proj."""
    config = Qwen2MoeConfig(
        vocab_size=120,
        hidden_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen2MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("checkpoint", "modules", "parameters"),
    [
        ("mesh_tiny", ["q_proj", "gate_proj", "up_proj", "down_proj"], []),
        ("shared_expert", ["q_proj", "down_proj"], []),
        ("shared_expert", ["gate_proj", "up_proj", "down_proj"], []),
        ("shared_expert", ["q_proj"], ["experts.down_proj"]),
    ],
)
def test_targets_mean_what_they_mean_to_peft(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    checkpoint: str,
    modules: list[str],
    parameters: list[str],
) -> None:
    folder = request.getfixturevalue(checkpoint)
    planned = run(capsys, folder, "--lora-rank", "4", "--resident", "0.5", "--targets", *modules, *parameters)
    model = adapted(folder, modules, parameters, resident=0.5)
    assert planned["training"]["trained_parameters"] == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_table_of_training_and_refused_options(
    mesh_tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", str(mesh_tiny), "--train", "--resident", "0.25", *GIVEN]) == 0
    output = capsys.readouterr().out
    for words in ("AdamW's two moments", "activations of 512 tokens", "reads of a step", "seconds of a step"):
        assert words in output
    assert "tokens per second" not in output
    assert main(["plan", str(mesh_tiny), "--train", "--targets", "query_proj", *GIVEN]) == 2
    assert "query_proj: no module or parameter of Qwen3MoeForCausalLM" in capsys.readouterr().err
    assert main(["plan", str(mesh_tiny), "--train", "--targets", "q_proj", "query_proj", *GIVEN]) == 2
    assert "--targets query_proj: no module or parameter of Qwen3MoeForCausalLM" in capsys.readouterr().err
    assert main(["plan", str(mesh_tiny), "--train", "--targets", "q_proj", "gate_proj", *GIVEN]) == 2
    assert "without also targeting up_proj" in capsys.readouterr().err
    for arguments, message in (
        (["--lora-rank", "4"], "--lora-rank is for training: give --train"),
        (["--gradient-checkpointing"], "--gradient-checkpointing is for training"),
        (["--train", "--hit-rate", "0.5"], "--hit-rate is for generating"),
        (["--train", "--lora-rank", "193"], "193 (--lora-rank) is more than the widths of the experts, 192 and 64"),
        (["--train", "--lora-rank", "9" * 30], "such adapters are larger than the experts"),
    ):
        assert main(["plan", str(mesh_tiny), *arguments, *GIVEN]) == 2
        assert message in capsys.readouterr().err
    assert main(["plan", str(mesh_tiny), "--train", "--fallback", "int4", *GIVEN]) == 2
    assert "do not support adapters" in capsys.readouterr().err
