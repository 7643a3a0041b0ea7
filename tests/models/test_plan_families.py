"""The sizes of torch_mesh.planning are those that loading takes, for families with various embeddings, routers and
dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pairs import each_once_quick
from tiny_models import TINY_MODELS
from transformers import AutoModelForCausalLM

from torch_mesh import MeshConfig, PackedWeight
from torch_mesh.planning.plan import plan

FAMILIES = (
    "DeepseekV3Experts",
    "GptOssExperts",
    "MixtralExperts",
    "Qwen3MoeExperts",
    "GraniteMoeExperts",
    "JambaExperts",
)


@pytest.mark.parametrize(("name", "dense"), each_once_quick([*FAMILIES], ["none", "int4"]))
def test_sizes_are_those_of_loading(name: str, dense: str, tmp_path: Path) -> None:
    TINY_MODELS[name].build().save_pretrained(tmp_path)
    config = MeshConfig(resident=0.5, dense=dense, io="threads")
    sizes = plan(tmp_path, config).sizes
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    packed = sum(module._mesh_packed.nbytes for module in model.modules() if hasattr(module, "_mesh_packed"))
    plain = sum(parameter.nbytes for parameter in model.parameters() if not isinstance(parameter, PackedWeight))
    assert sizes.dense_bytes == packed + plain
    embedding = model.get_input_embeddings().weight
    tied = dense == "none" and model.get_output_embeddings().weight is embedding
    assert sizes.dense_bytes_per_token == packed + plain - (0 if tied else embedding.nbytes)
