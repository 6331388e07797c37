"""How much of a GPU's memory a program needs, and which weights move to the host first."""

from dataclasses import replace

import pytest

from picompile_runtime.artifact.program import Argument, Call, FeedForward, Program
from picompile_runtime.devices.memory import Tensor
from picompile_runtime.engine import layout as device_memory
from picompile_runtime.engine.layout import accelerator_need, fit_accelerator
from picompile_runtime.errors import DoesNotFitError

ROWS = {"table": 1000, "norm": 1, "query": 40, "hot0": 100, "hot1": 80, "cold0": 500, "head": 300}
TENSORS = {name: Tensor("uint8", (rows, 64), 0) for name, rows in ROWS.items()}


@pytest.fixture(autouse=True)
def _pieces_of_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count single bytes: each tensor here is small, and would otherwise count as 2 MiB."""
    monkeypatch.setattr(device_memory, "_PIECE_BYTES", 1)


def call(op: str, *names: str, layer: int | None = None, read: int | None = None, device: str = "accelerator") -> Call:
    stored = sum(TENSORS[name].size_bytes for name in names)
    arguments = tuple(Argument("weight", name, TENSORS[name]) for name in names)
    return Call("k", arguments, op, layer, stored if read is None else read, device=device)


def program() -> Program:
    decode = (
        call("embedding", "table", read=64),
        call("rms_norm", "norm"),
        call("linear", "query", layer=0),
        call("ffn", "hot0", layer=0),
        call("ffn", "cold0", layer=0, device="host"),
        call("ffn", "hot1", layer=1),
        call("head", "head"),
    )
    return Program(
        context=8,
        chunk=4,
        vocab=1000,
        layers=2,
        sequences=1,
        batch_rows=1,
        arena_bytes=77,
        accelerator_arena_bytes=640,
        shared_arena_bytes=99,
        buffers={},
        state={"k": Tensor("float16", (1, 2, 8, 4), 0), "v": Tensor("float16", (1, 2, 8, 4), 0)},
        functions={"decode": decode, "prefill": (), "prefill_last": (), "score": ()},
        logits={},
        ffn=tuple(FeedForward(layer, "hot", 10, "exact", layer) for layer in (0, 1)),
        memories={("state", "k"): "accelerator", ("state", "v"): "host"},
        top_logits={},
        streamed=frozenset(),
    )


def own_bytes(*names: str) -> int:
    return sum(TENSORS[name].size_bytes for name in names)


ALL = own_bytes("table", "norm", "query", "hot0", "hot1", "head")
REST = 128 + 640  # one of two caches, and the arena


def test_addresses_of_pinned_memory_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 KiB of the accelerator's for 2 MiB of the host's."""
    monkeypatch.setattr(device_memory, "_SPARED_BYTES", 0)
    large = {name: Tensor("uint8", (2**30,)) for name in TENSORS}
    assert accelerator_need(program(), large, 1000).driver == 1000
    streaming = replace(program(), streamed=frozenset({"table", "norm"}))
    assert accelerator_need(streaming, large, 1000).driver == 1000 + 2**22
    # One weight less would be enough if its addresses took nothing.
    free_bytes = accelerator_need(program(), large).total - 2**30
    smaller = fit_accelerator(program(), large, free_bytes, may_move=True)
    assert len(smaller.streamed) == 2
    assert accelerator_need(smaller, large).total <= free_bytes


def test_memory_comes_in_large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights are in one, and each cache is in one of its own."""
    need = accelerator_need(program(), TENSORS)
    assert (need.weights, need.kv_cache, need.workspace) == (ALL, 128, 640)
    # What the device reads from the host anyway takes nothing.
    need = accelerator_need(replace(program(), streamed=frozenset({"table"})), TENSORS)
    assert need.weights == ALL - own_bytes("table")
    monkeypatch.setattr(device_memory, "_PIECE_BYTES", 1000)
    whole = replace(program(), memories={("state", "k"): "accelerator", ("state", "v"): "accelerator"})
    need = accelerator_need(whole, TENSORS)
    assert (need.weights, need.kv_cache, need.workspace) == (-(-ALL // 1000) * 1000, 2000, 1000)


def test_too_little_memory_raises() -> None:
    with pytest.raises(
        DoesNotFitError, match=r"needs 64\.1 MiB of GPU memory \(weights 0\.1 MiB, KV cache 0\.0 MiB, .*--replan"
    ):
        fit_accelerator(program(), TENSORS, ALL + REST - 1, may_move=False)
    with pytest.raises(DoesNotFitError, match="even if its weights stay with the host"):
        fit_accelerator(program(), TENSORS, REST - 1, may_move=True)


def test_weights_of_which_a_step_reads_least_move_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads one row of the embedding, and a part of sparse blocks; among equals the last weight moves first."""
    monkeypatch.setattr(device_memory, "_SPARED_BYTES", 0)
    whole, order = program(), ["table", "hot1", "hot0", "head", "query", "norm"]
    for may_move in (False, True):
        assert fit_accelerator(whole, TENSORS, ALL + REST, may_move) is whole
    for count in range(1, len(order) + 1):
        for lacking in (own_bytes(*order[: count - 1]) + 1, own_bytes(*order[:count])):
            smaller = fit_accelerator(whole, TENSORS, ALL + REST - lacking, may_move=True)
            assert smaller.streamed == set(order[:count])
            assert accelerator_need(smaller, TENSORS).total <= ALL + REST - lacking
    # A dense block is read whole.
    dense = replace(whole, ffn=tuple(replace(part, predictor="none") for part in whole.ffn))
    smaller = fit_accelerator(dense, TENSORS, ALL + REST - own_bytes("table") - 1, may_move=True)
    assert smaller.streamed == {"table", "head"}


def test_memory_is_left_for_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not weights may move: graphs and the module come on top of what the program takes."""
    spared = own_bytes("table")
    monkeypatch.setattr(device_memory, "_SPARED_BYTES", spared)
    fit_accelerator(program(), TENSORS, ALL + REST + spared, may_move=False)
    fit_accelerator(program(), TENSORS, ALL + REST + 2 * spared, may_move=False, graph_bytes=2 * spared)
    with pytest.raises(DoesNotFitError, match="even if its weights stay"):
        fit_accelerator(program(), TENSORS, REST + spared, may_move=True, graph_bytes=2 * spared)
    with pytest.raises(DoesNotFitError, match=r"needs 0\.154602 MiB .*driver 0\.1 MiB\) and 0\.154601 MiB are"):
        fit_accelerator(program(), TENSORS, ALL + REST + spared - 1, may_move=False)
    assert fit_accelerator(program(), TENSORS, ALL + REST + spared, may_move=True).streamed == frozenset()
    assert fit_accelerator(program(), TENSORS, ALL + REST + spared - 1, may_move=True).streamed == {"table"}
    assert fit_accelerator(program(), TENSORS, ALL + REST - 1, may_move=True).streamed == {"table", "hot1"}
