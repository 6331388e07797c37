"""mma, ldmatrix and cp.async of the emulation do what the PTX ISA says.

Where the elements of a fragment are is told here twice, in ways that have nothing in common with the emulation's: as
the rows of the ISA's figures name threads and registers, and as CUTLASS's layouts have it in strides.
"""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.kernels.emulator import ORDERS, Emulated, EmulationError

HERE = Path(__file__).parent
LANES = range(32)
Place = tuple[int, int]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    source = (HERE / "matrices.cu").read_text()
    return Emulated(source, tmp_path_factory.mktemp("matrices") / "matrices.so")


def drawn(rows: list[str]) -> dict[Place, Place]:
    """(row, column) -> (lane, element), from rows of "lane:element", or "lane:elements" for neighbouring columns."""
    places = {}
    for row, text in enumerate(rows):
        column = 0
        for entry in text.split():
            lane, elements = entry.split(":")
            for element in elements:
                places[row, column] = int(lane), int(element)
                column += 1
    return places


def _rows_of_a(columns: str) -> list[str]:
    """Figure "MMA .m16n8k16 fragment layout for matrix A": rows 0 to 7, and 8 to 15; `columns` the pairs in each."""
    upper, lower = columns.split("/")
    return [
        " ".join(f"{4 * g + t}:{pair}" for pair in half.split() for t in range(4))
        for half in (upper, lower)
        for g in range(8)
    ]


A16 = drawn(_rows_of_a("01 45/23 67"))
A8 = drawn(_rows_of_a("01/23"))
D = drawn(_rows_of_a("01/23"))
# Figure "... fragment layout for matrix B": a column for each group of four lanes.
B16 = drawn([" ".join(f"{4 * n + k % 8 // 2}:{k % 2 + k // 8 * 2}" for n in range(8)) for k in range(16)])
B8 = {(row, column): place for (row, column), place in B16.items() if row < 8}


def strided(threads: Place, strides: Place, values: list[int], steps: list[int], rows: int) -> dict[Place, Place]:
    """CUTLASS's thread-value layout: (row, column) -> (lane, element), of an index row + rows · column."""
    places = {}
    for lane in LANES:
        at = lane % threads[0] * strides[0] + lane // threads[0] * strides[1]
        for element, digits in enumerate(product(*[range(count) for count in reversed(values)])):
            index = at + sum(digit * step for digit, step in zip(reversed(digits), steps, strict=True))
            places[index % rows, index // rows] = lane, element
    return places


def test_figures_and_strides_agree() -> None:
    """include/cute/atom/mma_traits_sm80.hpp: SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x8_F32F16F16F32_TN."""
    assert strided((4, 8), (32, 1), [2, 2, 2], [16, 8, 128], 16) == A16
    assert strided((4, 8), (32, 1), [2, 2], [16, 8], 16) == A8
    assert D == A8
    # Those of B are of B transposed: n + 8 k.
    assert {(k, n): place for (n, k), place in strided((4, 8), (16, 1), [2, 2], [8, 64], 8).items()} == B16
    assert {(k, n): place for (n, k), place in strided((4, 8), (16, 1), [2], [8], 8).items()} == B8


def fragments(matrix: NDArray[np.generic], places: dict[Place, Place]) -> NDArray[np.uint32]:
    """[register, lane] of 32 bits: two halves in a register, or one float."""
    elements = len(places) // 32
    of_lanes = np.zeros((32, elements), matrix.dtype)
    for (row, column), (lane, element) in places.items():
        of_lanes[lane, element] = matrix[row, column]
    return np.ascontiguousarray(of_lanes.view(np.uint32).T)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("depth", [8, 16])
def test_mma(kernels: Emulated, depth: int, order: int) -> None:
    rng = np.random.default_rng(depth)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, depth), (depth, 8)))
    # Subnormal halves, and the largest ones.
    a[3, :4], b[:2, 5] = [6e-8, -6e-5, 65504, -65504], [65504, 6e-8]
    d = rng.standard_normal((16, 8)).astype(np.float32)
    of_a, of_b, of_d = (
        fragments(a, A16 if depth == 16 else A8),
        fragments(b, B16 if depth == 16 else B8),
        fragments(d, D),
    )
    kernels.launch(f"multiply_k{depth}", (1, 1, 1), (32, 1, 1), [of_a, of_b, of_d.view(np.float32)], order)
    expected = a.astype(np.float64) @ b.astype(np.float64) + d
    np.testing.assert_array_equal(of_d, fragments(expected.astype(np.float32), D))


@pytest.mark.parametrize("order", ORDERS)
def test_ldmatrix(kernels: Emulated, order: int) -> None:
    halves = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    loaded = np.zeros((2, 4, 32), np.uint32)
    kernels.launch("load_matrices", (1, 1, 1), (32, 1, 1), [halves.view(np.uint32).reshape(-1), loaded], order)
    for number, matrix in enumerate(halves):
        for lane in LANES:
            row, column = lane // 4, lane % 4 * 2
            plain, transposed = (loaded[i, number, lane : lane + 1].view(np.uint16).tolist() for i in range(2))
            assert plain == matrix[row, column : column + 2].tolist()
            assert transposed == matrix.T[row, column : column + 2].tolist()


@pytest.mark.parametrize("order", [*ORDERS, 99])
def test_copies_arrive_with_zeros_behind_them(kernels: Emulated, order: int) -> None:
    x = np.random.default_rng(1).integers(1, 2**32, (64, 4), dtype=np.uint32)
    bytes_ = np.random.default_rng(2).choice([0, 4, 8, 16], 64).astype(np.int32)
    y = np.full_like(x, 7)
    kernels.launch("copy", (1, 1, 1), (64, 1, 1), [x, bytes_, y], order)
    np.testing.assert_array_equal(y, np.where(np.arange(4) * 4 < bytes_[:, None], x, 0))


MISTAKES = {
    "mma_that_some_skip": "ends|waits at mma.m16n8k16 in line",
    "misaligned_row": "not aligned to 16 bytes",
    "misaligned_copy": "starts a copy that is not aligned",
    "copy_to_global_memory": "starts a copy that is not to shared memory",
    "copy_without_a_wait": "ends while copies to shared memory are under way",
    "copy_without_a_barrier": "nothing orders the two",
    "copy_over_what_others_read": "nothing orders the two",
}


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    source = (HERE / "matrix_mistakes.cu").read_text()
    return Emulated(source, tmp_path_factory.mktemp("mistakes") / "mistakes.so")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("symbol", MISTAKES)
def test_mistakes_are_reported(mistakes: Emulated, symbol: str, order: int) -> None:
    with pytest.raises(EmulationError, match=MISTAKES[symbol]):
        mistakes.launch(symbol, (1, 1, 1), (64, 1, 1), [np.zeros(256, np.uint32), np.zeros(256, np.uint32)], order)


def test_what_has_not_arrived_is_not_read_as_if_it_had(mistakes: Emulated) -> None:
    """Some copies arrive at once and some late: a thread that does not wait for its own sees the difference."""
    x, found = np.full(256, 5, np.uint32), []
    for order in ORDERS:
        y = np.zeros(256, np.uint32)
        mistakes.launch("copy_read_before_the_wait", (1, 1, 1), (64, 1, 1), [x, y], order)
        found.append(int(y[0]))
    assert sorted(set(found)) == [5, 2**32 - 1]
