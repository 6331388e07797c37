"""The tokens that end an answer: which names they have, and which of a vocabulary's special tokens they are."""

from collections.abc import Iterable, Mapping
from typing import Any

# Special tokens that end an answer wherever a vocabulary has them: the end of a text, of a turn, or of a message that
# goes on after a tool's answer. From llama.cpp's src/llama-vocab.cpp (`special_eog_ids`).
_END_NAMES = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"),
        *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
# Special tokens of models that fill in text between two files, after which such a text ends. From the same place.
_FILL_IN_ENDS = frozenset(
    (
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    )
)
_FILL_IN = frozenset(
    (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
        *("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "<|prefix|>", "<|suffix|>", "<|middle|>"),
    )
)
# In these vocabularies a token of that list stands between parts of one answer. From the same place.
_GO_ON = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),  # gpt-oss
    ({"<|flush|>", "<|call|>"}, "<|end|>"),  # Solar Open
    ({"<|flush|>", "<|calls|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),  # Gemma 4
    ({"<|plamo:eos|>"}, "</s>"),
)


def named_end_tokens(special: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids of the special tokens whose name says that they end an answer, in ascending order.

    Args:
        special: the ids of a vocabulary's special tokens by name. Ordinary tokens of such names do not belong there:
            in a vocabulary that writes HTML, `</s>` ends a tag.
    """
    found = _END_NAMES & special.keys() - goes_on(special)
    return tuple(sorted(special[name] for name in found))


def ends_by_name(name: str) -> bool:
    """Return whether a special token of that name ends an answer in most vocabularies that have it."""
    return name in _END_NAMES


def fills_in_by_name(name: str) -> bool:
    """Return whether a token of that name stands around or between the texts of a model that fills in text."""
    return name in _FILL_IN or name in _FILL_IN_ENDS


def fill_in_end_tokens(special: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids of the special tokens that end a text which a model fills in, in ascending order."""
    return tuple(sorted(special[name] for name in _FILL_IN_ENDS & special.keys()))


def goes_on(special: Iterable[str]) -> set[str]:
    """Return the names of tokens after which an answer goes on, though others end with them."""
    names = set(special)
    return {name for others, name in _GO_ON if others <= names}


def with_end_tokens(generation_config: Mapping[str, Any], ids: Iterable[int]) -> dict[str, Any]:
    """Return the contents of generation_config.json with exactly `ids` as the tokens that end an answer."""
    others = {key: value for key, value in generation_config.items() if key != "eos_token_id"}
    listed = list(dict.fromkeys(ids))
    return {**others, "eos_token_id": listed} if listed else others
