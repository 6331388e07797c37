"""The outline of a GGUF file: all that may decide what is compiled, but the numbers of weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.gguf_files import save_example, write_file
from picompile.frontend.gguf.outline import metadata_digest, outline_of
from picompile.frontend.gguf.parts import MOST_MODEL_ELEMENTS, read_model_header


def outline(file: Path) -> str:
    return outline_of(read_model_header(file, MOST_MODEL_ELEMENTS))


def written(folder: Path, name: str, **more: Any) -> Path:
    (folder / name).mkdir()
    return save_example(folder / name, **more)


@pytest.mark.parametrize(
    "changes",
    [
        {"general.name": "another", "general.tags": ["a", "b"]},
        {"tokenizer.chat_template": "{{ 1 }}"},
        {"tokenizer.ggml.tokens": ["c", "b"]},
    ],
    ids=["prose", "template", "tokens"],
)
def test_words_for_people_and_tokens_are_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    one = written(tmp_path, "one", **({"tokenizer.ggml.tokens": ["a", "b"]} if "tokens" in str(changes) else {}))
    other = written(tmp_path, "other", **changes)
    assert outline(one) == outline(other)
    digests = {metadata_digest(read_model_header(file, MOST_MODEL_ELEMENTS)) for file in (one, other)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"general.type": "adapter"},
        {"llama.rope.freq_base": 5000.0},
        {"llama.rope.scaling.type": "yarn"},
        {"tokenizer.ggml.eos_token_id": 7},
        {"tokenizer.ggml.tokens": ["a", "b", "c"]},
        {"llama.some.numbers": [1, 2]},
        {"type_name": "Q8_0"},
    ],
    ids=["kind", "number", "text", "named token", "more tokens", "array", "type"],
)
def test_all_else_is_in_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert outline(written(tmp_path, "one")) != outline(written(tmp_path, "other", **changes))


@pytest.mark.parametrize("name", ["rope_freqs.weight", "rope_factors_long.weight"])
def test_numbers_that_a_config_is_made_of_are_in_it(tmp_path: Path, name: str) -> None:
    one, again, other = (
        written(tmp_path, folder, tensors={name: np.full(8, value, np.float32)})
        for folder, value in (("one", 1.0), ("again", 1.0), ("other", 8.0))
    )
    assert outline(one) == outline(again) != outline(other)


def test_whether_embedding_and_head_are_equal_is_in_it(tmp_path: Path) -> None:
    """Converters write both of Falcon's, of which a config says whether they are one."""
    values = np.arange(64, dtype=np.float32).reshape(4, 16)
    found = []
    for name, head in (("one", values), ("other", values + 1)):
        tensors = {"token_embd.weight": values, "output.weight": head}
        write_file(tmp_path / name, "falcon", {}, tensors)
        found.append(outline(tmp_path / name))
    assert found[0] != found[1]
