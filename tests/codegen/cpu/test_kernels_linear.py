"""Linear layers and embeddings against products of the same weights and activations, as they see them, in float64."""

import numpy as np
import pytest

from helpers.kernels.workbench import Workbench, as_seen, assert_close, packed, uniform
from picompile_codegen import cpu
from picompile_codegen.cpu import Kernel
from picompile_codegen.specs import EmbeddingSpec, LinearSpec

FORMATS = ("f16", "q8", "q6", "q4m", "q4")
# (n, k): a model's size; neither a multiple of a vector, a group or a block; a vocabulary and a width of many blocks.
SHAPES = ((64, 96), (251, 72), (10, 100), (1009, 1100))
CHUNK = 13
# Cases that are not slow.
FAST = ("(251, 72)-", *(f"{shape}-{name}]" for shape in SHAPES for name in ("f16", "q4")))


def linear(format_name: str, shape: tuple[int, int], rows: int, rowwise: bool = False) -> Kernel:
    # Half of the shapes with a bias.
    bias = shape[0] % 2 == 1
    return cpu.write_kernel(
        LinearSpec(format=format_name, n=shape[0], k=shape[1], rows=rows, bias=bias, rowwise=rowwise)
    )


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("linear") / "host.so")


def embedding(format_name: str, dim: int, rows: int) -> Kernel:
    return cpu.write_kernel(EmbeddingSpec(format=format_name, vocab=50, dim=dim, rows=rows, offset=2))


@pytest.mark.slow(
    "compiles a kernel per case; f16, q4 and one size of the others are fast",
    but=tuple(f"{tokens}-{case}" for tokens in (None, 1, 2, 7, CHUNK) for case in FAST),
)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [None, 1, 2, 7, CHUNK])
def test_linear(workbench: Workbench, format_name: str, shape: tuple[int, int], tokens: int | None) -> None:
    """`tokens` None is the kernel of decode, which has one row and does not look at the step."""
    rng = np.random.default_rng([*shape, tokens or 0])
    kernel = linear(format_name, shape, rows=1 if tokens is None else CHUNK)
    data, weights = packed(rng, format_name, *shape)
    x, bias = uniform(rng, tokens or 1, shape[1]), uniform(rng, shape[0])
    result = workbench.run(kernel, {"x": x, "w": data, "bias": bias}, tokens=-1 if tokens is None else tokens)
    expected = as_seen(x, format_name) @ weights.T + (bias if "bias" in kernel.params else 0)
    assert_close(result["y"][: len(x)], expected)


@pytest.mark.slow("compiles a kernel per case; one size is fast", but=("(251, 72)",))
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_row_has_the_bits_that_it_has_alone(
    workbench: Workbench, format_name: str, shape: tuple[int, int]
) -> None:
    rng = np.random.default_rng(shape)
    data, _ = packed(rng, format_name, *shape)
    x, others = uniform(rng, CHUNK, shape[1]), {"w": data, "bias": uniform(rng, shape[0])}
    one = linear(format_name, shape, rows=1)
    alone = [workbench.run(one, {"x": row[None], **others})["y"].tobytes() for row in x]
    for tokens in (1, 2, 3, 4, 7, CHUNK):
        kernel = linear(format_name, shape, CHUNK, rowwise=True)
        together = workbench.run(kernel, {"x": x[:tokens], **others}, tokens=tokens)["y"][:tokens]
        assert together.tobytes() == b"".join(alone[:tokens])


@pytest.mark.slow("compiles a kernel per case; f16 and q4 are fast", but=("1-f16", "1-q4]", "13-f16", "13-q4]"))
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("rows", [1, CHUNK])
def test_same_bits_for_any_number_of_threads(workbench: Workbench, format_name: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    shape = SHAPES[-1]
    data, _ = packed(rng, format_name, *shape)
    inputs = {"x": uniform(rng, rows, shape[1]), "w": data, "bias": uniform(rng, shape[0])}
    kernel = linear(format_name, shape, rows)
    results = [workbench.run(kernel, inputs, tokens=rows, threads=threads)["y"].tobytes() for threads in (1, 2, 3, 5)]
    assert len(set(results)) == 1


@pytest.mark.slow(
    "compiles a kernel per case; f16, q4 and one size of the others are fast",
    but=("100-", "96-1-1-f16", "96-1-1-q4]", "330-13-3-f16", "330-13-3-q4]"),
)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("dim", "rows", "tokens"), [(96, 1, 1), (100, CHUNK, CHUNK), (330, CHUNK, 3), (96, CHUNK, 1)])
def test_embedding(workbench: Workbench, format_name: str, dim: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng([dim, tokens])
    data, weights = packed(rng, format_name, 50, dim)
    ids = rng.integers(0, 48, tokens).astype(np.int32)
    result = workbench.run(embedding(format_name, dim, rows), {"ids": ids, "w": data}, tokens=tokens)
    assert np.array_equal(result["y"][:tokens], weights[ids + 2].astype(np.float32))
