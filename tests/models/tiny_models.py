"""A tiny random model of every transformers family whose experts have the decorated layout."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from torch_mesh.models.families import find_experts

# Sizes are no multiples of 64, so that padding is part of every comparison.
_SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "unpadded_vocab_size": 110,
    "hidden_size": 72,
    "intermediate_size": 40,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "dense_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "num_experts_per_token": 3,
    "moe_topk": 3,
    "top_k_experts": 3,
    "moe_k": 3,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Fields of a model whose tokens take all experts, so that rounding cannot change the choice.
ALL_EXPERTS = {"num_experts_per_tok": _SIZES["num_experts"]}


_SMALL_LINEAR_ATTENTION = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_HYBRID = ["linear_attention", "full_attention", "linear_attention"]


def _mrope(*section: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}


@dataclass(frozen=True)
class Tiny:
    """A family's config class, model class, and the config fields that are not in _SIZES."""

    family: str
    config: str
    model: str
    fields: dict[str, Any] = field(default_factory=dict)

    def build(self) -> PreTrainedModel:
        """A model with random bf16 weights. Experts and routers are large enough to change the output."""
        model = self._make()
        in_fp32 = tuple(model._keep_in_fp32_modules_strict or ())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(part in name for part in in_fp32):
                    parameter.data = parameter.data.float()
                if "experts" in name:
                    parameter.normal_(0, 0.15)
                elif parameter.dim() == 2:
                    parameter.normal_(0, parameter.size(-1) ** -0.5)
        return model

    def outline(self) -> PreTrainedModel:
        """The same model on the meta device."""
        with torch.device("meta"):
            return self._make()

    def _make(self) -> PreTrainedModel:
        config_class = self._find("configuration", self.config)
        known = set(config_class.__dataclass_fields__) | set(config_class.attribute_map)
        config = config_class(**{name: value for name, value in _SIZES.items() if name in known} | self.fields)
        return self._find("modeling", self.model)._from_config(config, dtype=torch.bfloat16).eval()

    def _find(self, kind: str, name: str) -> Any:
        return getattr(importlib.import_module(f"transformers.models.{self.family}.{kind}_{self.family}"), name)


# One for each decorated class of the newest transformers in tools/tested.txt.
_ALL: dict[str, Tiny] = {
    "AfmoeExperts": Tiny("afmoe", "AfmoeConfig", "AfmoeForCausalLM"),
    "AriaExperts": Tiny("aria", "AriaTextConfig", "AriaTextForCausalLM"),
    "AXK1Experts": Tiny("axk1", "AXK1Config", "AXK1ForCausalLM", {"num_key_value_heads": 4}),
    "AXK2Experts": Tiny("axk2", "AXK2Config", "AXK2ForCausalLM", {"num_key_value_heads": 4}),
    "BailingHybridExperts": Tiny(
        "bailing_hybrid",
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {"num_key_value_heads": 4, "layer_types": _HYBRID},
    ),
    "BeamExperts": Tiny("beam", "BeamConfig", "BeamForCausalLM", {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "Cohere2MoeExperts": Tiny("cohere2_moe", "Cohere2MoeConfig", "Cohere2MoeForCausalLM"),
    "DeepseekOcr2TextExperts": Tiny(
        "deepseek_ocr2",
        "DeepseekOcr2TextConfig",
        "DeepseekOcr2TextModel",
        {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "DeepseekV2Experts": Tiny("deepseek_v2", "DeepseekV2Config", "DeepseekV2ForCausalLM", {"num_key_value_heads": 4}),
    "DeepseekV3Experts": Tiny("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", {"num_key_value_heads": 4}),
    "DeepseekV32Experts": Tiny(
        "deepseek_v32", "DeepseekV32Config", "DeepseekV32ForCausalLM", {"num_key_value_heads": 4}
    ),
    "DeepseekV4Experts": Tiny(
        "deepseek_v4", "DeepseekV4Config", "DeepseekV4ForCausalLM", {"mlp_layer_types": ["hash_moe", "hash_moe", "moe"]}
    ),
    "DiffusionGemmaTextExperts": Tiny("diffusion_gemma", "DiffusionGemmaTextConfig", "DiffusionGemmaEncoderTextModel"),
    "Dots1Experts": Tiny("dots1", "Dots1Config", "Dots1ForCausalLM", {"n_shared_experts": 1}),
    "Dots3NoteExperts": Tiny("dots3_note", "Dots3NoteTextConfig", "Dots3NoteForCausalLM", {"num_key_value_heads": 4}),
    "Ernie4_5_MoeExperts": Tiny("ernie4_5_moe", "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "Ernie4_5_VLMoeMoeExperts": Tiny(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeTextConfig",
        "Ernie4_5_VLMoeTextModel",
        {"moe_intermediate_size": [40, 40], "rope_parameters": _mrope(3, 3, 3)},
    ),
    "ExaoneMoeExperts": Tiny("exaone_moe", "ExaoneMoeConfig", "ExaoneMoeForCausalLM"),
    "FlexOlmoExperts": Tiny("flex_olmo", "FlexOlmoConfig", "FlexOlmoForCausalLM"),
    "FlintExperts": Tiny("flint", "FlintConfig", "FlintForCausalLM"),
    "Gemma4TextExperts": Tiny(
        "gemma4",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {"enable_moe_block": True, "vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 8},
    ),
    "Glm4MoeExperts": Tiny("glm4_moe", "Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "Glm4MoeLiteExperts": Tiny(
        "glm4_moe_lite", "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {"num_key_value_heads": 4}
    ),
    "Glm4vMoeTextExperts": Tiny(
        "glm4v_moe", "Glm4vMoeTextConfig", "Glm4vMoeTextModel", {"rope_parameters": _mrope(1, 2, 2)}
    ),
    "Glm5NextTextExperts": Tiny(
        "glm5_next",
        "Glm5NextTextConfig",
        "Glm5NextTextModel",
        {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "GlmMoeDsaExperts": Tiny("glm_moe_dsa", "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", {"num_key_value_heads": 4}),
    "GptOssExperts": Tiny("gpt_oss", "GptOssConfig", "GptOssForCausalLM"),
    "GraniteMoeExperts": Tiny("granitemoe", "GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "GraniteMoeSWAExperts": Tiny("granitemoe_swa", "GraniteMoeSWAConfig", "GraniteMoeSWAForCausalLM"),
    "GraniteMoeHybridExperts": Tiny(
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {"mamba_n_heads": 4, "mamba_d_head": 36, "mamba_d_state": 16, "layer_types": ["mamba", "attention", "mamba"]},
    ),
    "GraniteMoeSharedExperts": Tiny("granitemoeshared", "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM"),
    "HunYuanMoEV1Experts": Tiny("hunyuan_v1_moe", "HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM"),
    "HYV3Experts": Tiny("hy_v3", "HYV3Config", "HYV3ForCausalLM"),
    "HYV4Experts": Tiny("hy_v4", "HYV4Config", "HYV4ForCausalLM", {"num_key_value_heads": 4}),
    "HYV4VLExperts": Tiny(
        "hy_v4_vl",
        "HYV4VLTextConfig",
        "HYV4VLTextModel",
        {"num_key_value_heads": 4, "rope_parameters": _mrope(2, 3, 3)},
    ),
    "InklingExperts": Tiny("inkling", "InklingTextConfig", "InklingForCausalLM"),
    "Inkling2Experts": Tiny("inkling2", "Inkling2TextConfig", "Inkling2ForCausalLM"),
    "Inkling2LoopExperts": Tiny(
        "inkling2_loop",
        "Inkling2LoopTextConfig",
        "Inkling2LoopForCausalLM",
        {
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
            "loop_num_passes": 2,
            "loop_gate_rank": 8,
        },
    ),
    "JambaExperts": Tiny(
        "jamba",
        "JambaConfig",
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "KimiLinearExperts": Tiny(
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {"num_key_value_heads": 4, "layer_types": _HYBRID, **_SMALL_LINEAR_ATTENTION},
    ),
    "Kolibri1Experts": Tiny("kolibri1", "Kolibri1Config", "Kolibri1ForCausalLM"),
    "LagunaExperts": Tiny("laguna", "LagunaConfig", "LagunaForCausalLM"),
    "Lfm2MoeExperts": Tiny(
        "lfm2_moe",
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "LaraMiniExperts": Tiny(
        "lara_mini",
        "LaraMiniConfig",
        "LaraMiniForCausalLM",
        {"layer_types": _HYBRID, **_SMALL_LINEAR_ATTENTION},
    ),
    "MellumExperts": Tiny("mellum", "MellumConfig", "MellumForCausalLM"),
    "MiMoV2FlashExperts": Tiny("mimo_v2_flash", "MiMoV2FlashConfig", "MiMoV2FlashForCausalLM"),
    "MiniMaxExperts": Tiny("minimax", "MiniMaxConfig", "MiniMaxForCausalLM"),
    "MiniMaxM2Experts": Tiny("minimax_m2", "MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "MiniMaxM3VLExperts": Tiny("minimax_m3_vl", "MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM"),
    "Mistral4Experts": Tiny(
        "mistral4", "Mistral4Config", "Mistral4ForCausalLM", {"num_key_value_heads": 4, "head_dim": 32}
    ),
    "MistralLarge4TextExperts": Tiny(
        "mistral_large4", "MistralLarge4TextConfig", "MistralLarge4TextModel", {"num_key_value_heads": 4}
    ),
    "MixtralExperts": Tiny("mixtral", "MixtralConfig", "MixtralForCausalLM"),
    "MuseSparkExperts": Tiny("muse_spark", "MuseSparkTextConfig", "MuseSparkTextModel", {"moe_hidden_size": 56}),
    "NemotronHExperts": Tiny(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    ),
    "OlmoeExperts": Tiny("olmoe", "OlmoeConfig", "OlmoeForCausalLM"),
    "OpenAIPrivacyFilterExperts": Tiny(
        "openai_privacy_filter", "OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterModel"
    ),
    "PhimoeExperts": Tiny("phimoe", "PhimoeConfig", "PhimoeForCausalLM"),
    "Qwen2MoeExperts": Tiny("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "Qwen3_5MoeExperts": Tiny(
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {"layer_types": _HYBRID, **_SMALL_LINEAR_ATTENTION},
    ),
    "Qwen3MoeExperts": Tiny("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "Qwen3NextExperts": Tiny(
        "qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", {"layer_types": _HYBRID, **_SMALL_LINEAR_ATTENTION}
    ),
    "Qwen3OmniMoeThinkerTextExperts": Tiny("qwen3_omni_moe", "Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextModel"),
    "Qwen3OmniMoeTalkerTextExperts": Tiny(
        "qwen3_omni_moe",
        "Qwen3OmniMoeTalkerTextConfig",
        "Qwen3OmniMoeTalkerModel",
        {"shared_expert_intermediate_size": 40},
    ),
    "Qwen3VLMoeTextExperts": Tiny("qwen3_vl_moe", "Qwen3VLMoeTextConfig", "Qwen3VLMoeTextModel"),
    "Qwen4ExpTextExperts": Tiny(
        "qwen4_exp",
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {
            "layer_types": _HYBRID,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [1, 3],
            "ple_embed_dim": 96,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 400,
            "split_ngram_parts": 4,
            **_SMALL_LINEAR_ATTENTION,
        },
    ),
    "SolarOpenExperts": Tiny("solar_open", "SolarOpenConfig", "SolarOpenForCausalLM"),
    "UnlimitedOcrTextExperts": Tiny(
        "unlimited_ocr", "UnlimitedOcrTextConfig", "UnlimitedOcrTextModel", {"num_key_value_heads": 4}
    ),
    "ZayaExperts": Tiny("zaya", "ZayaConfig", "ZayaForCausalLM", {"num_experts_per_tok": 1, "router_hidden_size": 32}),
}

_UNMARKED_TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 72,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA4 = {**_UNMARKED_TEXT, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
_STEP = {
    **_UNMARKED_TEXT,
    "moe_intermediate_size": 40,
    "share_expert_dim": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 16,
    "layer_types": ["full_attention"] * 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    # Low enough that many values exceed them; 0 means no limit.
    "swiglu_limits": [0, 0, 0.25, 0.5],
    "swiglu_limits_shared": [0, 0, 0.25, 0],
}
_SMALL_VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


class _Installed(dict[str, Tiny]):
    """The families that the installed transformers marks, fewer in older releases. A test that asks for another is
    skipped."""

    def __missing__(self, name: str) -> Tiny:
        if name in _ALL:
            pytest.skip(f"this transformers does not mark the experts of {_ALL[name].family}")
        raise KeyError(name)


def _is_marked(family: str) -> bool:
    folder = find_spec(f"transformers.models.{family}")
    if folder is None or folder.origin is None:
        return False
    source = Path(folder.origin).with_name(f"modeling_{family}.py")
    return "use_experts_implementation" in source.read_text(encoding="utf-8")


TINY_MODELS = _Installed({name: tiny for name, tiny in _ALL.items() if _is_marked(tiny.family)})

# Its fp32 norms pass fp32 inputs to products with bf16 weights.
DEEPSEEK_V4_FAILS = (
    "DeepSeek-V4 of transformers 5.17 does not run in bf16"
    if Version(transformers.__version__) < Version("5.18")
    else ""
)

all_families = pytest.mark.skipif(len(TINY_MODELS) < len(_ALL), reason="this transformers has fewer families")

# Models of families whose experts transformers does not mark. The first of each family has the family's name.
UNMARKED_MODELS: dict[str, Tiny] = {
    "llama4": Tiny("llama4", "Llama4TextConfig", "Llama4ForCausalLM", {**_LLAMA4, "num_experts_per_tok": 1}),
    "llama4, three experts a token": Tiny(
        "llama4", "Llama4TextConfig", "Llama4ForCausalLM", {**_LLAMA4, "num_experts_per_tok": 3}
    ),
    "llama4 with vision": Tiny(
        "llama4",
        "Llama4Config",
        "Llama4ForConditionalGeneration",
        {
            "text_config": {**_LLAMA4, "num_experts_per_tok": 1},
            "vision_config": {
                **_SMALL_VISION,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
    ),
    "longcat_flash": Tiny(
        "longcat_flash",
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {
            "num_key_value_heads": 4,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 40,
            "expert_ffn_hidden_size": 40,
            "zero_expert_num": 5,
            "moe_topk": 4,
        },
    ),
    "step3p7": Tiny(
        "step3p7",
        "Step3p7Config",
        "Step3p7ForConditionalGeneration",
        {"text_config": _STEP, "vision_config": {**_SMALL_VISION, "image_size": 56, "patch_size": 14}},
    ),
}

# Decorated classes that have no tiny model here, and why.
SKIPPED: dict[str, str] = {}

# Models with layers whose router has no matrix that ranks experts, and the numbers of these layers.
NO_LOOKAHEAD = {"DeepseekV4Experts": {0, 1}, "MuseSparkExperts": {0, 1, 2}, "ZayaExperts": {0, 1, 2}}


def draw_routers(model: nn.Module) -> None:
    """Draw the biases of routers, large enough to change the choice, and the scales of norms."""
    for layer in find_experts(model):
        block = model.get_submodule(layer.path.rpartition(".")[0])
        for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
            if "correction_bias" in name or name.endswith(("expert_bias", "router.bias")):
                spread = torch.linspace(-1, 1, tensor.numel())[torch.randperm(tensor.numel())]
                tensor.data.copy_(spread.view_as(tensor))
            elif "norm" in name or name.endswith("router.scale"):
                tensor.data.uniform_(0.3, 3.0)


def inputs_for(model: nn.Module) -> dict[str, torch.Tensor]:
    """Two prompts of different length, padded on the left."""
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :4] = 0
    if hasattr(model, "codec_embedding"):  # its inputs are hidden states of another model
        return {"inputs_embeds": torch.randn(2, 11, model.config.hidden_size).bfloat16(), "attention_mask": mask}
    return {"input_ids": torch.randint(3, 100, (2, 11)) * mask, "attention_mask": mask}


def output_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits or hidden states of the tokens that are no padding."""
    with torch.no_grad():
        output = model(**inputs, use_cache=False)
    kept = inputs["attention_mask"].bool()
    return (output.logits if hasattr(output, "logits") else output.last_hidden_state)[kept].float()


def build(name: str = "Qwen3MoeExperts", **fields: Any) -> PreTrainedModel:
    """``TINY_MODELS[name]`` with other ``fields`` of its config."""
    tiny = TINY_MODELS[name]
    return replace(tiny, fields=tiny.fields | fields).build()


def logits_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def decorated_classes() -> Iterator[tuple[str, str]]:
    """(family, class) for every class that the installed transformers marks with use_experts_implementation."""
    for source in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = source.read_text(encoding="utf-8")
        if "use_experts_implementation" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and any(
                "use_experts_implementation" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                yield source.parent.name, node.name
