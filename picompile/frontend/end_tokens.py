"""The tokens that end an answer: which names they have, and which of a vocabulary's special tokens they are."""

from collections.abc import Iterable, Mapping
from typing import Any

# Special tokens that end an answer wherever a vocabulary has them: the end of a text, of a turn, or of a message that
# goes on after a tool's answer. From llama.cpp's src/llama-vocab.cpp (`special_eog_ids`).
_END_NAMES = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"),
        *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    )
)
# In these vocabularies a token of that list stands between parts of one answer. From the same place.
_GO_ON = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),  # gpt-oss
    ({"<|flush|>", "<|call|>"}, "<|end|>"),  # Solar Open
    ({"<|flush|>", "<|calls|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),  # Gemma 4
)


def named_end_tokens(special: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids of the special tokens whose name says that they end an answer, in ascending order.

    Args:
        special: the ids of a vocabulary's special tokens by name. Ordinary tokens of such names do not belong there:
            in a vocabulary that writes HTML, `</s>` ends a tag.
    """
    found = _END_NAMES & special.keys() - goes_on(special)
    return tuple(sorted(special[name] for name in found))


def goes_on(special: Iterable[str]) -> set[str]:
    """Return the names of tokens after which an answer goes on, though others end with them."""
    names = set(special)
    return {name for others, name in _GO_ON if others <= names}


def with_end_tokens(generation_config: Mapping[str, Any], ids: Iterable[int]) -> dict[str, Any]:
    """Return the contents of generation_config.json with exactly `ids` as the tokens that end an answer."""
    others = {key: value for key, value in generation_config.items() if key != "eos_token_id"}
    listed = list(dict.fromkeys(ids))
    return {**others, "eos_token_id": listed} if listed else others
