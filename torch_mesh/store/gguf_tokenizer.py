"""Byte-level tokenizers of GGUF files.

transformers splits texts by GPT-2's rule where it does not know the one that a file names, and splits control tokens
with characters beyond the byte alphabet, such as DeepSeek's: docs/decisions/0041.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are found in a text before it is split
_SPECIAL = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Letters of DeepSeek's first tokenizer: those with two cases in the Unicode version of its time.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}"
    r"\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{1DF1E}]]"
)
_DEEPSEEK_WORD = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
# Kimi's words: letters in capitals, then small ones, and neither Chinese.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Rules by the names of tokenizer.ggml.pre: patterns that split a text in turn.
_RULES: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "refact": (r"\p{N}", _GPT2),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{_CASED}+",
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        r"\s+$",
        r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+",
        r"\p{N}",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
        f"{_DEEPSEEK_WORD}|{_SPACES}",
    ),
    "kimi-k2": (rf"\p{{Han}}+|{_KIMI_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
}
_SAME_AS = {"glm4": "llama-bpe", "chatglm-bpe": "llama-bpe", "hunyuan": "qwen2"}  # in transformers' table


def byte_level_tokenizer(described: Mapping[str, Any], known: Mapping[str, str]) -> Tokenizer:
    """The tokenizer that a file's metadata describe, with the file's ids and no others.

    ``described``: the metadata, as transformers reads them. ``known``: transformers' patterns by the names of rules.
    Raises ValueError for a rule that is neither there nor known here.
    """
    tokens, types = described["tokens"], described.get("token_type") or ()
    special = {tokens[described[key]] for key in _SPECIAL if described.get(key) is not None}
    special |= {token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL}
    added = {token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED} - special
    letters = bytes_to_unicode()
    alphabet = set(letters.values())

    def spelled(token: str) -> str:
        as_it_is = token in special or token in added or alphabet.issuperset(token)
        return token if as_it_is else "".join(letters[byte] for byte in token.encode())

    merges = [tuple(merge.split(" ")) for merge in described["merges"]]
    tokenizer = Tokenizer(models.BPE({spelled(token): number for number, token in enumerate(tokens)}, merges))
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in _rule(described, known)]
    whole_word = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, whole_word])
    tokenizer.decoder = decoders.ByteLevel()
    for found, is_special in ((special, True), (added, False)):
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=is_special) for token in sorted(found)])
    return tokenizer


def _rule(described: Mapping[str, Any], known: Mapping[str, str]) -> tuple[str, ...]:
    name = str(described.get("pre_tokenizer_type", ""))
    if name in _RULES:
        return _RULES[name]
    pattern = known.get(_SAME_AS.get(name, name))
    if pattern is None:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}, and the known rules that split texts are "
            f"{', '.join(sorted({*_RULES, *_SAME_AS, *known}))}"
        )
    return (pattern,)
