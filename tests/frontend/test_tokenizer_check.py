"""A tokenizer held to a list of tokens."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from picompile.frontend.tokenizer_check import ListedTokens, first_disagreement

LISTED = ListedTokens(
    ids={"a": 0, "b": 1, "Ã": 2, "<s>": 3, "<t>": 4},
    special={3: "<s>", 4: "<t>"},
    control=frozenset({3}),
    texts={0: b"a", 1: b"b", 2: b"\xc3"},
)


def tokenizer(**changes: Any) -> Tokenizer:
    found = Tokenizer(models.BPE({"a": 0, "b": 1, "Ã": 2, "<s>": 3, "<t>": 4}, []))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found.add_special_tokens(changes.get("control", [AddedToken("<s>", normalized=False)]))
    found.add_tokens(changes.get("user_defined", [AddedToken("<t>", normalized=False)]))
    return found


def test_no_disagreement() -> None:
    assert first_disagreement(tokenizer(), LISTED) is None


@pytest.mark.parametrize(
    ("changes", "listed", "says"),
    [
        ({"user_defined": []}, LISTED, r"the token '<t>' \(4\) is cut into the tokens \[\]"),
        (
            {"control": [], "user_defined": [AddedToken("<s>"), AddedToken("<t>")]},
            LISTED,
            "decodes to '<s>', not to ''",
        ),
        ({"user_defined": [AddedToken("<t>", special=True)]}, LISTED, "the token 4 decodes to '', not to '<t>'"),
        (
            {"control": [AddedToken("<more>"), AddedToken("<s>")]},
            LISTED,
            r"the token '<more>' \(5\) .* is not in the file",
        ),
        ({}, ListedTokens(ids={**LISTED.ids, "c": 5}), "the token 'c' has the id 5 in the file, and None"),
        ({}, ListedTokens(ids=LISTED.ids, texts={0: b"b"}), "the token 0 decodes to 'a', not to 'b'"),
    ],
)
def test_disagreements(changes: dict[str, Any], listed: ListedTokens, says: str) -> None:
    import re

    found = first_disagreement(tokenizer(**changes), listed)
    assert found is not None and re.search(says, found) and "\n" not in found
