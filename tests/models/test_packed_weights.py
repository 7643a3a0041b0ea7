"""Packed weights in code that expects ordinary ones: they give their values or raise, and never give garbage."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model, save_file, save_model
from tiny_models import TINY_MODELS, build, logits_of
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import prune
from transformers import PreTrainedModel

import torch_mesh
from torch_mesh import MeshError
from torch_mesh.models.families import supported_families
from torch_mesh.modules.dense import WEIGHT_READERS, MeshLinear
from torch_mesh.modules.experts import patched_modules
from torch_mesh.modules.packed_weight import PackedExpertsWeight, PackedLinearWeight, PackedWeight

QWEN = "Qwen3MoeExperts"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def _ids() -> torch.Tensor:
    return torch.randint(3, 100, (2, 9))


@pytest.mark.parametrize("dense", ["bf16", "bf12", "int8", "int4", "lut4"])
def test_arithmetic_with_a_packed_linear_weight_gets_its_values(dense: str) -> None:
    model = build()
    x = torch.randn(5, 72).bfloat16()
    expected = model.lm_head.weight.detach().clone()
    torch_mesh.patch(model, dense=dense)
    weight = model.lm_head.weight
    values = model.lm_head.unpacked_weight()
    assert type(values) is torch.Tensor and torch.equal(values, expected) == (dense in ("bf16", "bf12"))
    assert torch.equal(linear(x, weight), linear(x, values)) and torch.equal(x @ weight.T, x @ values.T)
    assert torch.equal(weight[3:7], values[3:7]) and torch.equal(weight.data[:, 0], values[:, 0])
    assert torch.equal(weight.clone(), values) and weight.tolist() == values.tolist()
    assert torch.equal(torch.zeros_like(values).copy_(weight), values)
    parameter, part = nn.Parameter(torch.zeros_like(values)), torch.zeros(2, *values.shape).bfloat16()
    part[1] = weight
    assert torch.equal(part[1], values)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):  # torch's own error
        parameter.data = weight.data
    x.requires_grad_()
    linear(x, weight).float().sum().backward()
    torch.testing.assert_close(x.grad.float(), values.float().sum(0).expand(5, -1), rtol=0.02, atol=0.02)
    wide = model.lm_head.float().weight  # no longer rounded to bf16
    assert (wide.numpy() == wide.unpacked().numpy()).all() and torch.equal(wide.unpacked().bfloat16(), values)


@pytest.mark.parametrize("use", ["linear", "matmul", "index", "add", "clone", "numpy", "where", "equal"])
def test_arithmetic_with_packed_experts_raises(use: str) -> None:
    weight = torch_mesh.patch(build(), resident=0.5).get_parameter(EXPERTS)
    x = torch.randn(8, 5, 72).bfloat16()
    uses = {
        "linear": lambda: linear(x[0], weight),
        "matmul": lambda: x @ weight.transpose(1, 2),
        "index": lambda: weight[1],
        "add": lambda: weight + 1,
        "clone": lambda: weight.clone(),
        "numpy": lambda: weight.numpy(),
        "where": lambda: torch.where(torch.tensor(True), weight, 0.0),
        "equal": lambda: torch.equal(weight, torch.zeros(weight.shape)),
    }
    with pytest.raises(MeshError, match=rf"{re.escape(EXPERTS)} is packed \(bf16\) and frozen.*torch_mesh.unpatch"):
        uses[use]()


def test_packed_weights_have_the_attributes_of_parameters() -> None:
    model = torch_mesh.patch(build(), resident=0.5, dense="int8")
    for weight, shape in ((model.get_parameter(EXPERTS), (8, 80, 72)), (model.lm_head.weight, (120, 72))):
        assert isinstance(weight, nn.Parameter) and isinstance(weight, PackedWeight)
        assert weight.shape == shape and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        assert not weight.requires_grad and not weight.is_meta and weight.nbytes == 2 * weight.numel()
        assert "int8" in repr(model.lm_head.weight) and str(list(shape)) in repr(weight)
        assert isinstance(weight.detach(), PackedWeight) and isinstance(weight.data, PackedWeight)
        assert weight.float().dtype == torch.float32
        assert weight.to("meta").is_meta if isinstance(weight, PackedLinearWeight) else True


def test_nothing_can_be_written_into_a_packed_weight() -> None:
    model = torch_mesh.patch(build(), resident=0.5, dense="int8")
    for weight in (model.get_parameter(EXPERTS), model.lm_head.weight):
        for change in (
            lambda weight: weight.data.add_(1),
            lambda weight: weight.zero_(),
            lambda weight: weight.data.__setitem__(0, 1.0),
            lambda weight: torch.add(torch.zeros(weight.shape), 1, out=weight),
            lambda weight: setattr(weight, "data", torch.zeros(weight.shape).bfloat16()),
            lambda weight: weight.requires_grad_(),
            lambda weight: setattr(weight, "requires_grad", True),
            lambda weight: weight.data_ptr(),
            lambda weight: weight.share_memory_(),
            lambda weight: weight.copy_(torch.zeros(3)),
            lambda weight: torch._foreach_zero_([torch.zeros(2), weight.data]),
        ):
            with pytest.raises(MeshError, match=re.escape(weight.path)):
                change(weight)
    with pytest.raises(MeshError, match="Cannot assign other values to"):
        model.get_parameter(EXPERTS).copy_(torch.zeros(8, 80, 72))
    with pytest.raises(MeshError, match="Cannot assign other values to"):
        model.model.layers[0].mlp.experts.gate_up_proj = nn.Parameter(torch.zeros(8, 80, 72))
    with pytest.raises(MeshError, match=f"NoneType cannot replace {EXPERTS}"):
        model.model.layers[0].mlp.experts.gate_up_proj = None


def test_pruning_is_refused_and_loses_no_other_weight() -> None:
    model = torch_mesh.patch(build(), resident=0.5, dense="int8")
    with pytest.raises(MeshError, match="MeshLinear.weight is packed.*prune"):
        prune.l1_unstructured(model.lm_head, "weight", 0.5)
    experts = model.model.layers[0].mlp.experts
    with pytest.raises(MeshError, match="is packed"):
        prune.l1_unstructured(experts, "down_proj", 0.5)
    with pytest.raises(MeshError, match="has lost its parameter down_proj, as .*prune"):
        model.half()
    assert "gate_up_proj" in experts._parameters


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dense", ["none", "int8"])
def test_a_patched_model_is_exported(dense: str, strict: bool) -> None:
    ids, model = _ids(), torch_mesh.patch(build(), resident=0.5, dense=dense)
    model.config.use_cache = False
    exported = torch.export.export(model, (ids,), strict=strict).module()
    assert torch.equal(exported(ids).logits, logits_of(model, ids))


def test_a_tensor_copied_or_assigned_to_a_packed_layer_is_packed() -> None:
    ids, model = _ids(), torch_mesh.patch(build(), dense="int8", group_size=32)
    before = logits_of(model, ids)
    head = 0.1 * torch.randn(120, 72).bfloat16()
    copied, assigned = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.copy_(head)
        assigned.lm_head.weight = nn.Parameter(head)
    expected = copy.deepcopy(model)
    expected.lm_head._mesh_packed.copy_(torch.ops.torch_mesh.pack_linear(head, "int8", 32))
    assert torch.equal(logits_of(copied, ids), logits_of(expected, ids))
    assert torch.equal(logits_of(assigned, ids), logits_of(expected, ids))
    assert torch.equal(logits_of(model, ids), before) and not torch.equal(logits_of(copied, ids), before)

    double = torch_mesh.patch(build(), dense="bf16").double()
    double.load_state_dict(double.state_dict() | {"lm_head.weight": head.double()})
    assert torch.equal(double.lm_head.unpacked_weight(), head.double())

    exact = torch_mesh.patch(build(), dense="bf16").float()
    with pytest.raises(MeshError, match="Values that bf16 would round"), torch.no_grad():
        exact.lm_head.weight.copy_(torch.randn(120, 72))


def test_values_that_a_weight_has_already_are_not_rounded_again() -> None:
    values = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = torch.ops.torch_mesh.pack_linear(values, "int8", 64)
    weight = PackedLinearWeight(packed.clone(), values.shape, values.dtype, "weight", "int8", 64, False)
    rounded = weight.unpacked()
    assert not torch.equal(torch.ops.torch_mesh.pack_linear(rounded, "int8", 64), packed)  # rounds once more
    weight.copy_(rounded)
    assert torch.equal(weight.packed, packed)


def test_a_tied_head_stays_packed_through_tie_weights() -> None:
    ids, model = _ids(), build(tie_word_embeddings=True)
    torch_mesh.patch(model, dense="int8")
    expected = logits_of(model, ids)
    model.tie_weights()
    assert isinstance(model.lm_head, MeshLinear) and isinstance(model.lm_head.weight, PackedWeight)
    assert torch.equal(logits_of(model, ids), expected)
    head = model.lm_head.unpacked_weight()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.5)
    assert torch.equal(model.lm_head.unpacked_weight(), head)  # docs/finetuning.md says so
    model.tie_weights()
    assert torch.equal(
        model.lm_head.unpacked_weight(), torch_mesh.patch(_halved(model), dense="int8").lm_head.unpacked_weight()
    )


def _halved(model: PreTrainedModel) -> PreTrainedModel:
    other = build(tie_word_embeddings=True)
    with torch.no_grad():
        other.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight)
    return other


@pytest.mark.parametrize("dense", ["none", "bf16"])
def test_a_state_dict_loads_into_an_ordinary_model(dense: str) -> None:
    ids, model = _ids(), build()
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch_mesh.patch(model, resident=0.3, dense=dense)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert loaded.keys() == original.keys() and all(torch.equal(loaded[name], original[name]) for name in original)
    assert all(type(tensor) is torch.Tensor for tensor in loaded.values())
    plain = build()
    plain.load_state_dict(loaded)
    assert logits_of(plain, ids).isfinite().all()
    assert torch.equal(pickle.loads(pickle.dumps(model.get_parameter(EXPERTS))), original[EXPERTS])


def test_saving_a_state_dict_of_rounded_weights_is_refused() -> None:
    for fields, name in (({"weights": "int8"}, "experts"), ({"dense": "int4"}, "_proj|lm_head")):
        model = torch_mesh.patch(build(), **fields)
        with pytest.raises(MeshError, match=rf"({name}).* was rounded to int."):
            torch.save(model.state_dict(), io.BytesIO())


def test_loading_other_experts_raises_and_loading_the_same_does_not() -> None:
    model, other = build(), build()
    with torch.no_grad():
        other.get_parameter(EXPERTS)[5, 0, 0] += 1
    own = copy.deepcopy(model.state_dict())
    torch_mesh.patch(model, resident=0.3)
    router = "model.layers.0.mlp.gate.weight"
    own[router] = own[router] + 1
    assert not any(model.load_state_dict(own))
    assert torch.equal(model.get_parameter(router), own[router])
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"gate_up_proj.*packed \(bf16\) and frozen"):
            model.load_state_dict(own | {EXPERTS: other.get_parameter(EXPERTS)}, assign=assign)
    assert not any(model.load_state_dict(model.state_dict()))
    # Experts are frozen, so a checkpoint may lack them. It must have all other weights.
    trained = {name: tensor for name, tensor in own.items() if ".experts." not in name}
    assert not any(model.load_state_dict(trained))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "model.layers.0.mlp.gate.weight"'):
        model.load_state_dict({name: tensor for name, tensor in trained.items() if name != router})


def test_safetensors_writes_every_weight_and_loads_it_again(tmp_path: Path) -> None:
    ids, model = _ids(), build()
    original = copy.deepcopy(model.state_dict())
    torch_mesh.patch(model, resident=0.3, dense="bf16")
    expected = logits_of(model, ids)
    save_model(model, str(tmp_path / "model.safetensors"))
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == original.keys() and all(torch.equal(written[name], original[name]) for name in original)
    assert load_model(model, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(logits_of(model, ids), expected)
    with pytest.raises(MeshError, match=r".contiguous\(\)"):
        save_file(model.state_dict(), tmp_path / "again.safetensors")


def test_saving_a_state_dict_that_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_mesh.patch(build(), resident=0.3)
    monkeypatch.setattr("torch_mesh.system.memory.available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match=r"gate_up_proj takes 92,160 bytes .* 1,000 left\. .*save_pretrained"):
        torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.parametrize("mean_resizing", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [130, 60])
def test_token_embeddings_can_be_resized(tokens: int, tied: bool, mean_resizing: bool) -> None:
    model = build(tie_word_embeddings=tied)
    ids = torch.randint(3, 50, (2, 9))
    torch_mesh.patch(model, dense="bf16")
    expected = logits_of(model, ids)
    model.resize_token_embeddings(tokens, mean_resizing=mean_resizing)
    value = logits_of(model, ids)
    assert value.shape[-1] == tokens and model.config.vocab_size == tokens
    torch.testing.assert_close(value[..., :60], expected[..., :60], rtol=0.02, atol=0.02 * expected.abs().max().item())
    torch_mesh.unpatch(model)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_token_embeddings_of_every_family_can_be_resized(name: str) -> None:
    model = build(name)
    plain = copy.deepcopy(model)
    try:
        plain.resize_token_embeddings(130)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        pytest.skip("transformers cannot resize this one, patched or not")
    head = model.get_output_embeddings()
    kept = 0 if head is None else len(head.weight)  # Inkling 2's head has fewer rows than the embedding
    torch_mesh.patch(model, dense="bf16")
    model.resize_token_embeddings(130)
    head = model.get_output_embeddings()
    if head is not None and type(head) is nn.Linear:
        assert torch.equal(head.weight[:kept], plain.get_output_embeddings().weight[:kept])


def test_a_pruned_head_of_an_assistant_gets_values() -> None:
    from transformers.generation.candidate_generator import _PruneReindexingLMHead

    model = torch_mesh.patch(build(), dense="bf16")
    kept = torch.tensor([3, 9, 80])
    pruned = _PruneReindexingLMHead(model.lm_head, kept)
    hidden = torch.randn(2, 72).bfloat16()
    torch.testing.assert_close(pruned(hidden), model.lm_head(hidden)[:, kept], rtol=0.02, atol=0.02)


def test_jamba_computes_with_a_dt_proj_of_real_size() -> None:
    """Its mixer multiplies with ``dt_proj.weight`` itself. Below 32 features that layer would stay unpacked for its
    size."""
    model = build("JambaExperts", mamba_dt_rank=40)
    ids = _ids()
    expected = logits_of(model, ids)
    torch_mesh.patch(model, dense="bf16")
    assert any(isinstance(module, MeshLinear) for module in model.modules())
    assert not any(isinstance(module, MeshLinear) for name, module in model.named_modules() if name.endswith("dt_proj"))
    by_token = (logits_of(model, ids) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert by_token.min() < 0.05 and by_token.median() < 0.5


def test_every_family_that_multiplies_with_a_weight_itself_is_known() -> None:
    models = Path(transformers.__file__).parent / "models"
    found = {}
    for family in supported_families():
        for source in models.glob(f"{family}/modeling_*.py"):
            for block in re.split(r"^class ", source.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
                linears = set(re.findall(r"self\.(\w+) = nn\.Linear\(", block))
                read = set(re.findall(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape))", block))
                # Passed to a CUDA kernel, which dense= does not affect.
                cuda = set(re.findall(r"outproj_weight=self\.(\w+)\.weight", block))
                if names := (linears & read) - cuda:
                    found[re.match(r"\w+", block)[0]] = tuple(sorted(names))
    assert found == WEIGHT_READERS


def test_compiled_code_may_use_packed_weights() -> None:
    torch._dynamo.reset()
    model = torch_mesh.patch(build(), dense="bf16")
    experts, head = model.model.layers[0].mlp.experts, model.lm_head

    @torch.compile(backend="aot_eager", fullgraph=True)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return linear(x.to(head.weight.dtype), head.weight) * experts.gate_up_proj.shape[0]

    x = torch.randn(3, 72)
    assert torch.equal(forward(x), linear(x.bfloat16(), head.unpacked_weight()) * 8)


def test_deep_copies_have_packed_weights_of_their_own_modules() -> None:
    model = torch_mesh.patch(build(), resident=0.5, dense="int8")
    clone = copy.deepcopy(model)
    assert isinstance(clone.lm_head.weight, PackedLinearWeight) and isinstance(clone.lm_head.weight, nn.Parameter)
    assert clone.lm_head.weight.packed is clone.lm_head._mesh_packed is not model.lm_head._mesh_packed
    assert isinstance(clone.get_parameter(EXPERTS), PackedExpertsWeight)
    assert clone.get_parameter(EXPERTS) is not model.get_parameter(EXPERTS)


def test_a_forward_never_unpacks_a_packed_weight() -> None:
    """The forward itself never uses a packed weight. If it unpacked one, only the time would show it."""
    model = torch_mesh.patch(build(), resident=0.5, dense="int8")
    touched = []
    original = PackedWeight.__dict__["__torch_dispatch__"]

    def watching(cls: type, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
        touched.append(func)
        return original.__func__(cls, func, types, args, kwargs)

    try:
        PackedWeight.__torch_dispatch__ = classmethod(watching)
        logits_of(model, _ids())
        model.generate(_ids(), max_new_tokens=4, do_sample=False)
    finally:
        PackedWeight.__torch_dispatch__ = original
    assert touched == [] and list(patched_modules(model))
