"""Open models whose config.json names a type that transformers does not know, but whose architecture it has.

Imported with transformers' reader of config.json, before any model is opened, so it imports nothing slow.
"""

from __future__ import annotations

from typing import Any

import transformers

from torch_mesh.hf.wrapping import wrap

# Model types of published configs that transformers does not know, their only architecture, and the type of that.
SAME_MODELS = {"kimi_k2": ("DeepseekV3ForCausalLM", "deepseek_v3")}


def with_known_type(config: dict[str, Any]) -> dict[str, Any]:
    """The table of a config.json with the model type that transformers has for its architecture (``SAME_MODELS``), and
    without the checkpoint's own code for it."""
    model_type = config.get("model_type")
    architecture, known = SAME_MODELS.get(model_type if isinstance(model_type, str) else "", (None, None))
    if known is None or config.get("architectures") != [architecture] or model_type in transformers.CONFIG_MAPPING:
        return config
    config = {**config, "model_type": known}
    if isinstance(code := config.pop("auto_map", None), dict):  # with trust_remote_code=True it would replace the class
        kept = {name: each for name, each in code.items() if not name.startswith(("AutoConfig", "AutoModel"))}
        config |= {"auto_map": kept} if kept else {}
    return config


def _config_with_known_type(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' reader of config.json."""
    table, unused = theirs(*args, **kwargs)
    return with_known_type(table), unused


wrap("transformers.configuration_utils.PreTrainedConfig", "get_config_dict", _config_with_known_type)
