"""Weights read by the places that a model of transformers gave them, without one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.gguf_blocks import save_llama_of_blocks
from helpers.gguf_files import EXAMPLES, save_example
from picompile.frontend.gguf.model import open_gguf
from picompile.frontend.gguf.parts import MOST_MODEL_ELEMENTS, read_model_header
from picompile.frontend.gguf.plain import PlainWeights
from picompile.frontend.gguf.weights import GgufWeights

TYPES = {
    "token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "attn_output": "IQ4_NL",
    "ffn_gate": "MXFP4", "ffn_up": "Q4_K", "ffn_down": "Q6_K", "output": "Q8_0",
}  # fmt: skip


def same(one: Callable[[], Tensor | None], other: Callable[[], Tensor | None]) -> bool:
    first, second = one(), other()
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and torch.equal(first, second)


def check(file: Path) -> int:
    """Compare both sources of a file; return how many parameters lie plainly."""
    opened = open_gguf(file)
    weights = GgufWeights(opened, {name: name for name in opened.tensors})
    places = {name: found for name in weights.names() if (found := opened.plain_place(name)) is not None}
    plain = PlainWeights(read_model_header(file, MOST_MODEL_ELEMENTS), places)
    assert set(plain.names()) == places.keys()
    for name in places:
        assert plain.shape(name) == weights.shape(name)
        assert same(lambda name=name: plain.load(name), lambda name=name: weights.load(name)), name
        rows = torch.arange(weights.shape(name)[0]).flip(0)[::2]
        forms = sorted({form for form in (opened.stored_format(name), "f16", "q4_1") if form is not None})
        for form in forms:
            for transposed in (False, True):
                for given in (None, rows if not transposed else rows[:0]):
                    asked = (name, form, transposed, given)
                    assert same(lambda: plain.packed(*asked), lambda: weights.packed(*asked)), asked  # noqa: B023
    return len(places)


def test_a_file_of_blocks_is_read_in_the_same_way(tmp_path: Path) -> None:
    save_llama_of_blocks(tmp_path / "model.gguf", TYPES)
    found = open_gguf(tmp_path / "model.gguf")
    assert check(tmp_path / "model.gguf") == len(found.tensors)


@pytest.mark.parametrize("type_name", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt2", "falcon", "phi3"])
def test_examples_are_read_in_the_same_way(tmp_path: Path, name: str, type_name: str) -> None:
    """Of some, rows are in another order, numbers are changed, or several tensors make a parameter."""
    if name not in EXAMPLES:
        pytest.skip(f"there is no example {name}")
    assert check(save_example(tmp_path, name, type_name)) > 0


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    save_llama_of_blocks(tmp_path / "model.gguf", TYPES)
    opened = open_gguf(tmp_path / "model.gguf")
    places = {name: opened.plain_place(name) for name in opened.tensors}
    header = read_model_header(tmp_path / "model.gguf", MOST_MODEL_ELEMENTS)
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(Exception, match="has become shorter"):
        PlainWeights(header, places)  # type: ignore[arg-type]
