"""Parameters that are read by what is known of their tensors, without a model of transformers."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.gguf_blocks import save_llama_of_blocks
from helpers.gguf_files import save_example
from helpers.gguf_mixtures import save_mixture
from picompile.frontend.gguf.model import GgufModel, open_gguf
from picompile.frontend.gguf.parts import MOST_MODEL_ELEMENTS, read_model_header
from picompile.frontend.gguf.tensors import GgufTensor, TensorReader

TYPES = {
    "token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "attn_output": "IQ4_NL",
    "ffn_gate": "MXFP4", "ffn_up": "Q4_K", "ffn_down": "Q6_K", "output": "Q8_0",
}  # fmt: skip


def same(one: Callable[[], Tensor | None], other: Callable[[], Tensor | None]) -> bool:
    first, second = one(), other()
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and torch.equal(first, second)


def reader(opened: GgufModel, file: Path) -> TensorReader:
    """Return a reader of all that needs no transformers, by records that went through JSON, and the file alone."""
    header, orders, tensors = read_model_header(file, MOST_MODEL_ELEMENTS), list[list[int]](), {}
    for name, tensor in opened.tensors.items():
        if tensor.convert is None and {*tensor.sources} <= header.tensors.keys():
            if tensor.order is not None:
                orders.append(tensor.order.tolist())
            record = json.loads(json.dumps(tensor.to_record(None if tensor.order is None else len(orders) - 1)))
            tensors[name] = GgufTensor.from_record(file, record, [np.array(order) for order in orders])
    return TensorReader(header, tensors)


def check(file: Path) -> TensorReader:
    """Compare both ways to read a file, and return the short one."""
    opened = open_gguf(file)
    plain = reader(opened, file)
    for name in plain.names():
        assert plain.shape(name) == opened.shape(name) and plain.is_turned(name) == opened.is_turned(name)
        assert same(lambda name=name: plain.load(name), lambda name=name: opened.load(name)), name
        forms = sorted({form for form in (opened.stored_format(name), "f16", "q4_1") if form is not None})
        rows = torch.arange(opened.shape(name)[0]).flip(0)[::2]
        for form in forms:
            for transposed in (False, True):
                for given in (None, rows if not transposed else rows[:0]):
                    asked = (name, form, transposed, given)
                    assert same(lambda: plain.packed(*asked), lambda: opened.packed(*asked)), asked  # noqa: B023
        if len(opened.shape(name)) > 1:
            assert same(lambda: plain.load_rows(name, rows), lambda: opened.load_rows(name, rows)), name  # noqa: B023
    return plain


def test_a_file_of_blocks_is_read_in_the_same_way(tmp_path: Path) -> None:
    save_llama_of_blocks(tmp_path / "model.gguf", TYPES)
    found = open_gguf(tmp_path / "model.gguf")
    assert check(tmp_path / "model.gguf").tensors.keys() == found.tensors.keys()


@pytest.mark.parametrize("type_name", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gemma3", "nemotron", "gpt2", "falcon-40b", "phi3"])
def test_examples_are_read_in_the_same_way(tmp_path: Path, name: str, type_name: str) -> None:
    """Some have rows in another order, changed numbers, or parameters that several tensors make."""
    found = check(save_example(tmp_path, name, type_name))
    offsets = {tensor.offset for key, tensor in found.tensors.items() if key.endswith("norm.weight")}
    assert offsets <= {-1.0 if name in ("gemma2", "gemma3", "nemotron") else 0.0}


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_mixtures_are_read_in_the_same_way(tmp_path: Path, name: str) -> None:
    found = check(save_mixture(tmp_path, name, type_name="Q8_0"))
    stacks = [tensor.stack for tensor in found.tensors.values() if tensor.stack is not None]
    assert stacks and {each.transposed for each in stacks} == {False} | ({True} if name == "gpt-oss" else set())


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    save_llama_of_blocks(tmp_path / "model.gguf", TYPES)
    opened = open_gguf(tmp_path / "model.gguf")
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(Exception, match="has become shorter"):
        TensorReader(opened.header, opened.tensors)
