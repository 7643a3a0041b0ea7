"""Comparing generated tokens where rounding may differ, and so may decide between two nearly equal logits."""

from __future__ import annotations

from typing import Any

import torch


def assert_same_tokens(tokens: torch.Tensor, plain: Any) -> None:
    """Check that each text of ``tokens`` [texts, length] is that of ``plain``, up to a near tie.

    ``plain`` is from ``generate(return_dict_in_generate=True, output_logits=True)``.
    """
    expected = plain.sequences
    prompt = expected.shape[1] - len(plain.logits)
    both = min(tokens.shape[1], expected.shape[1])
    for text in range(len(expected)):
        same = int((tokens[text, :both] == expected[text, :both]).int().cumprod(0).sum())
        if same < both:
            largest, next_ = plain.logits[same - prompt][text].float().topk(2).values
            assert largest - next_ <= largest.abs() / 16, f"text {text} differs from token {same} on"
        else:
            assert tokens.shape == expected.shape
