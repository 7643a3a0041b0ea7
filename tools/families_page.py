"""Writes docs/families.md, what of torch_mesh each family of the installed transformers has, from tiny models of them
all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name

from torch_mesh.formats import ROUNDED_FORMATS, in_words
from torch_mesh.lossy.decoding import ROUTING_BIAS_FAMILIES
from torch_mesh.models.families import (
    UNDECORATED,
    UNMARKED,
    ExpertsLayer,
    Router,
    find_experts,
    find_router,
    router_unsupported_reason,
)

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "families.md"
sys.path.append(str(_ROOT / "tests" / "models"))
from tiny_models import TINY_MODELS, UNMARKED_MODELS, Tiny

_HEAD = f"""\
# Families
The families of transformers {transformers.__version__} that torch_mesh runs. Tests compare a tiny random model of each,
patched and unpatched. They fail for a family that is neither listed here nor refused below.

Each family takes every format: {in_words(ROUNDED_FORMATS)}, in groups of 32, 64 or 128, made from
bf16, fp16 or fp32, or from any [quantized checkpoint](checkpoints.md).

- **model types**: those of the family that hold these experts. A model that contains a language model of another
  family, as Kimi K2.5 contains DeepSeek V3, behaves like that family.
- **layout** of the experts' parameters: gate and up are *halves* of one tensor, or *interleaved* row by row; stored as
  [out, in], or *transposed*. Records are the same for all.
- **path**: *kernel* is one fused op per layer, with the given activation. *unfused*: the kernel does not know what the
  module computes between or after its two products. These are two ops with the module's own code around them: somewhat
  slower, on the CPU only (no `gpu.experts`), without a prefill window, `lossy.deferred_experts` and `lossy.fallback`.
- **lookahead**: whether the next layer's router predicts which experts to read, and what it adds for the choice: a
  *bias* to its logits, or to the named function of them. *groups*: it chooses groups of experts first, which the
  prediction ignores. Without lookahead use a [fitted predictor](predictor.md).
- **routing_bias**: whether [`lossy.routing_bias`](lossy.md) works. It does not if the router needs more than hidden
  states (token ids, or a bias of the block around it), takes a single expert, or does not choose by one `topk`.

| family | model types | layout | path | lookahead | routing_bias | remarks |
|---|---|---|---|---|---|---|
"""

_REFUSED = """
## Refused
`patch` and `from_pretrained` refuse these families: their experts do not have the layout that transformers marks with
`use_experts_implementation`.

| family | why |
|---|---|
"""

_TAIL = """
<!-- `python tools/families_page.py` writes this page from `tests/models/tiny_models.py`; a test compares them. -->
"""

# Facts that no tiny model shows; tests/models/test_unpooled.py and test_families.py show them.
_BESIDES = {
    "DiffusionGemmaTextExperts": (
        "encoder and decoder share experts: load it as it is, then `patch`; no `lossy.deferred_experts`"
    ),
    "Dots3NoteExperts": "the vision tower's experts stay in memory",
    "Ernie4_5_VLMoeMoeExperts": "the experts for images stay in memory",
    "Qwen3OmniMoeTalkerTextExperts": "the talker's experts stay in memory",
}


def page() -> str:
    """The text of docs/families.md."""
    models = TINY_MODELS | {name: UNMARKED_MODELS[unmarked.family] for name, unmarked in UNMARKED.items()}
    rows = sorted((tiny.family, name) for name, tiny in models.items())
    parts = [_HEAD, *(_line(_row(name, models[name])) for _, name in rows)]
    refused = (_line([family, UNDECORATED[family]]) for family in sorted(UNDECORATED))
    return "".join([*parts, _REFUSED, *refused, _TAIL])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _row(name: str, tiny: Tiny) -> list[str]:
    model = tiny.outline()
    layers = find_experts(model)
    assert name in {type(layer.module).__name__ for layer in layers}
    types = " ".join(f"`{each}`" for each in _model_types(tiny.family, type(model.config)))
    leans = "yes" if model.config.model_type in ROUTING_BIAS_FAMILIES else "no"
    besides = _BESIDES.get(name, "–")
    return [tiny.family, types, _layout(layers[0]), _path(layers[0]), _lookahead(model, layers), leans, besides]


def _model_types(family: str, config: type[PreTrainedConfig]) -> list[str]:
    """The family's model types that have this config, or a config with it inside."""
    own = [each for each in CONFIG_MAPPING_NAMES if model_type_to_module_name(each) == family]
    return sorted(each for each in own if config in _configs_within(CONFIG_MAPPING[each]))


def _configs_within(config: Any) -> Iterator[Any]:
    yield config
    for part in (getattr(config, "sub_configs", None) or {}).values():
        yield from _configs_within(getattr(part, "config_class", part))


def _layout(layer: ExpertsLayer) -> str:
    parts = ["no gate"] if not layer.has_gate else ["halves" if layer.is_concatenated else "interleaved"]
    parts += ["transposed"] * layer.is_transposed + ["biases"] * layer.has_bias
    return ", ".join(parts)


def _path(layer: ExpertsLayer) -> str:
    if layer.fused_activation is not None:
        return f"kernel, {layer.fused_activation}"
    module: Any = layer.module
    if layer.has_post_expert_norm:
        return "unfused: a norm after each expert"
    return "unfused: a gate of its own" if layer.has_gate else f"unfused: {type(module.act_fn).__name__}"


def _lookahead(model: Any, layers: list[ExpertsLayer]) -> str:
    routers = [find_router(model, layer) for layer in layers]
    reasons = sorted(
        {router_unsupported_reason(model, layer) for layer, router in zip(layers, routers, strict=True) if not router}
    )
    found = sorted({_router_words(router) for router in routers if router})
    return "; ".join([*found, *(f"{'in some layers none' if found else 'none'}: {reason}" for reason in reasons)])


def _router_words(router: Router) -> str:
    bias = "" if router.biased is None else ", bias" if router.scoring == "logits" else f", bias to {router.scoring}"
    return f"yes{bias}{', groups' if hasattr(router.module, 'num_group') else ''}"


if __name__ == "__main__":
    PAGE.write_text(page())
