"""Special tokens of a vocabulary: which tokens a text has as a whole, and how they are written and decoded."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from picompile.frontend.end_tokens import ends_by_name, fills_in_by_name, goes_on
from picompile.frontend.vocabulary.vocabulary import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary

# Ids of tokens that have no text of their own, whatever type the file gives them.
_OF_NO_TEXT = ("bos", "eos", "eot", "eom")


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that are found in a text before it is split.

    Attributes:
        control: the names of the tokens without a text, by id.
        user_defined: the names of those that are their own text, by id.
        left: ids of tokens that take the spaces before them.
        right: ids of tokens that take the spaces behind them.
    """

    control: Mapping[int, str]
    user_defined: Mapping[int, str]
    left: frozenset[int] = frozenset()
    right: frozenset[int] = frozenset()

    @property
    def names(self) -> dict[int, str]:
        """All names by id."""
        return {**self.control, **self.user_defined}

    def to_json(self) -> list[dict[str, Any]]:
        """Return the added tokens of a tokenizer.json, by ascending id."""
        return [
            {
                "id": number,
                "content": name,
                "single_word": False,
                "lstrip": number in self.left,
                "rstrip": number in self.right,
                "normalized": False,
                "special": number in self.control,
            }
            for number, name in sorted(self.names.items())
        ]


def find_special(vocabulary: Vocabulary, merges: Iterable[tuple[str, str]]) -> SpecialTokens:
    """Return the special tokens of a vocabulary whose pieces `merges` join.

    A normal token is one, too, where the file names its id as the end or the beginning of a text, or where llama.cpp
    knows its name (`special_eog_ids` in its src/llama-vocab.cpp): converters mark such tokens wrongly. It is none where
    merges make it, since then it is ordinary text: `</s>` in a vocabulary that writes HTML.
    """
    named = {vocabulary.ids[name] for name in _OF_NO_TEXT if name in vocabulary.ids}
    candidates = {
        number
        for number, (name, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == NORMAL and len(name) > 1 and (number in named or ends_by_name(name) or fills_in_by_name(name))
    }
    names = {vocabulary.tokens[number] for number in candidates}
    made = {left + right for left, right in merges if left + right in names} if names else set()
    made |= goes_on(name for name, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind != UNUSED)
    control, user_defined = {}, {}
    for number, (name, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if not vocabulary.is_used(number):
            continue
        if kind in (CONTROL, UNKNOWN) or (number in candidates and name not in made):
            control[number] = name
        elif kind == USER_DEFINED:
            user_defined[number] = name
    return SpecialTokens(control, user_defined, *_stripping(vocabulary, control, user_defined))


def _stripping(
    vocabulary: Vocabulary, control: Mapping[int, str], user_defined: Mapping[int, str]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the tokens that take the spaces before them, and those that take the spaces behind them.

    Files do not say which; from llama.cpp's src/llama-vocab.cpp ("Handle per token attributes"). It knows Phi-3 by a
    name that newer files write as "Phi 3"; all models of that architecture with pieces have these tokens.
    """
    names = {**control, **user_defined}
    name, pre = vocabulary.name.lower(), vocabulary.pre or ""
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
        return _numbers(names, ("<mask>",)), frozenset()
    if "phi-3" in name or "phi3" in name or (vocabulary.architecture, vocabulary.model) == ("phi3", "llama"):
        return frozenset(), frozenset(names) - _numbers(names, ("<unk>", "<s>", "<|endoftext|>"))
    return _numbers(names, ("[MASK]",)) if "modern-bert" in name else frozenset(), frozenset()


def _numbers(names: Mapping[int, str], chosen: Sequence[str]) -> frozenset[int]:
    return frozenset(number for number, name in names.items() if name in chosen)
