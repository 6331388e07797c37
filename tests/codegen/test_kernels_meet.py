"""What kernels of the CPU, and of a GPU in the emulation, send to the other side, receive from it and copy."""

import numpy as np
import pytest

from helpers.kernels.cuda_workbench import EITHER, CudaWorkbench
from helpers.kernels.workbench import Array, Workbench, assert_rows, uniform
from helpers.products import sampled
from picompile_codegen.specs import (
    CopyWordsSpec,
    CountedSendMaskSpec,
    KernelSpec,
    ReceiveMaskSpec,
    ReceiveSpec,
    SendMaskSpec,
    SendSpec,
)

# A part of a block's turn; rows that are no multiple of four; more than a turn.
DIMS = (96, 99, 4228)
# Rows, and how many of them count.
ROWS = ((1, 1), (5, 5), (5, 3))
# Neurons and how many the host computes: four at a time, one at a time, one alone, and more than a turn of one row.
MASKS = ((200, 60), (77, 55), (9, 1), (5000, 4500), (5000, 4503))
STEP = 7
# What the other side has set in the step before.
EARLIER = STEP - 1
SLOW = "compiles a kernel per case"


def step(tokens: int, position: int = -1) -> Array:
    return np.array([tokens, position, -1, STEP, -1, -1, -1, -1], np.int32)


def flag(value: int) -> Array:
    return np.array([value], np.int32)


@sampled(slow=SLOW, fixtures=EITHER, dim=DIMS, counts=ROWS)
def test_send(either: Workbench, dim: int, counts: tuple[int, int]) -> None:
    rows, tokens = counts
    x = uniform(np.random.default_rng([dim, tokens]), tokens, dim)
    found = either.same(SendSpec(dim=dim, rows=rows), {"step": step(tokens), "x": x, "flag": flag(EARLIER)})
    assert_rows(found["out"], x)
    assert found["flag"].tolist() == [STEP] + [-1] * 15


@sampled(
    slow=SLOW,
    fixtures=EITHER,
    dim=(96, 99),
    sizes=MASKS,
    counts=ROWS,
    share=(0.0, 0.3, 1.0),
    # Columns that a kernel has room for beside those of the mask, whose number is an argument then, and whether they
    # are sent in words.
    room=(None, (300, True), (0, True), (22, False)),
    when=lambda room, sizes, **_: not (room and room[1]) or sizes[1] % 4 == 0,
)
def test_send_mask(
    either: Workbench,
    dim: int,
    sizes: tuple[int, int],
    counts: tuple[int, int],
    share: float,
    room: tuple[int, bool] | None,
) -> None:
    # The CPU knows its columns.
    room = room if isinstance(either, CudaWorkbench) else None
    (neurons, columns), (rows, tokens) = sizes, counts
    rng = np.random.default_rng([*sizes, tokens])
    x, mask = uniform(rng, tokens, dim), (rng.random((tokens, neurons)) < share).astype(np.uint8)
    table = rng.permutation(neurons)[:columns].astype(np.int32)
    inputs = {"step": step(tokens), "x": x, "mask": mask, "table": table, "flag": flag(EARLIER)}
    if room is None:
        spec: KernelSpec = SendMaskSpec(dim=dim, neurons=neurons, columns=columns, rows=rows)
    else:
        inputs["columns"] = flag(columns)
        spec = CountedSendMaskSpec(dim=dim, neurons=neurons, columns=columns + room[0], rows=rows, in_words=room[1])
    found = either.same(spec, inputs)
    assert_rows(found["out"], x)
    assert_rows(found["out_mask"].reshape(rows, columns), mask[:, table])
    assert found["count"][0] == mask[:, table].sum()
    assert found["flag"].tolist() == [STEP] + [-1] * 15


@sampled(slow=SLOW, fixtures=EITHER, dim=DIMS, counts=ROWS, count=(None, 0, 1, 900))
def test_receive(either: Workbench, dim: int, counts: tuple[int, int], count: int | None) -> None:
    """Nobody waits for a host without work: its flag is not set, and what it shares is NaN."""
    rows, tokens = counts
    source = uniform(np.random.default_rng([dim, tokens]), tokens, dim)
    inputs = {"step": step(tokens), "flag": flag(EARLIER if count == 0 else STEP), "abandoned": flag(0)}
    inputs |= {} if count is None else {"count": flag(count)}
    inputs |= {} if count == 0 else {"source": source}
    found = either.same(ReceiveSpec(dim=dim, rows=rows, counted=count is not None), inputs)
    assert_rows(found["y"], 0 * source if count == 0 else source)
    assert (found["flag"][0], found["abandoned"][0]) == (inputs["flag"][0], 0)
    if count is None:
        # One mask takes fewer neurons than a block has threads, one more.
        mask = (source > 0).astype(np.uint8)
        found = either.same(ReceiveMaskSpec(neurons=dim, rows=rows), inputs | {"source": mask})
        assert_rows(found["y"], mask)


@pytest.mark.parametrize("words", [8, 13, 300])
def test_copy_words(either: Workbench, words: int) -> None:
    source = np.random.default_rng(words).integers(-(2**31), 2**31, words).astype(np.int32)
    assert np.array_equal(either.same(CopyWordsSpec(words=words), {"source": source})["y"], source)
