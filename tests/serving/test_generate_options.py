"""Options of generate: values that transformers accepts, and clear errors for all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from torch_mesh.serving.generate_options import _KINDS, OptionError, check_options, normalize_options

# A valid value of each option, and invalid ones.
RIGHT: dict[str, Any] = {
    **dict.fromkeys(_KINDS, 1),
    **{name: True for name, kind in _KINDS.items() if kind.words == "True or False"},
    **{name: [3, 4] for name in ("suppress_tokens", "begin_suppress_tokens")},
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0.5),
    "stop_strings": ["a", "b"],
}
WRONG = ("maybe", -2, 1.5, float("nan"), [[1]], {"a": 1}, True)


def test_each_option_is_one_of_transformers() -> None:
    assert set(_KINDS) <= set(vars(GenerationConfig()))


@pytest.mark.parametrize("name", sorted(_KINDS))
def test_invalid_values_of_an_option_are_refused(name: str) -> None:
    check_options({name: RIGHT[name], "something_newer": object()})
    check_options({name: None})
    refused = []
    for value in WRONG:
        try:
            check_options({name: value})
        except OptionError as error:
            assert error.name == name and repr(value) in str(error) and _KINDS[name].words in str(error)
            refused.append(value)
    assert len(refused) >= 4


@pytest.mark.parametrize(
    "given", [{"temperature": 2}, {"temperature": 0}, {"repetition_penalty": 2}, {"top_k": 0}, {"top_p": 0}]
)
def test_generate_can_run_with_allowed_values(given: dict[str, Any], rng: np.random.Generator) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50}
    experts = {"intermediate_size": 16, "moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=1, pad_token_id=0))
    prompt = torch.from_numpy(rng.integers(1, 50, (1, 5)))

    def made(**options: Any) -> torch.Tensor:
        config = GenerationConfig(max_new_tokens=4, pad_token_id=0, **options)
        normalize_options(config, model.generation_config)
        return model.generate(prompt, generation_config=config)

    tokens = made(do_sample=True, **given)
    assert tokens.shape == (1, 9)
    if given == {"temperature": 0}:
        assert torch.equal(tokens, made(do_sample=False))


def test_greedy_options_give_transformers_nothing_to_warn_of() -> None:
    model = GenerationConfig(do_sample=True, top_k=7, top_p=0.9, max_new_tokens=3)
    for asked in (
        GenerationConfig(temperature=0),
        GenerationConfig(do_sample=False, top_k=3, typical_p=0.5, min_p=0.1),
    ):
        normalize_options(asked, model)
        assert asked.do_sample is False and asked.temperature == 1
        asked.validate(strict=True)
    drawn = GenerationConfig(temperature=0.5, top_k=3)
    normalize_options(drawn, model)
    assert (drawn.temperature, drawn.top_k) == (0.5, 3)


def test_invalid_defaults_of_the_model_are_not_the_clients_error() -> None:
    makers, asked = (GenerationConfig(do_sample=False, top_k=-7, max_new_tokens=new) for new in (None, 3))
    normalize_options(asked, makers)
    asked.top_k = -6
    with pytest.raises(OptionError, match="top_k is -6"):
        normalize_options(asked, makers)
