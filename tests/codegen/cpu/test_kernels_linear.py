"""Linear layers, with matrices in rows and in panels, against products in float64 of what they see."""

from itertools import product

import numpy as np
import pytest
import torch

from helpers.kernels.workbench import Array, Workbench, as_seen, assert_close, packed, uniform
from helpers.products import sampled
from helpers.weight_formats import PANEL_FORMATS, ROW_FORMATS, panels_of, random_rows
from picompile_codegen import cpu
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.specs import LinearSpec
from picompile_passes.formats import FORMATS
from picompile_passes.formats.panels import PANEL_ROWS, has_panels, to_panels

# (n, k): a model's size; neither a multiple of a vector, a group or a block; a vocabulary and a width of many blocks.
SHAPES = ((64, 96), (251, 72), (10, 100), (1009, 1100))
# Neither whole groups nor whole blocks of high bits; one panel; rows longer than a page.
PANELS = ((48, 72), (16, 100), (208, 1100))
# More than two of the largest tiles, and something left over for each of the smaller ones.
CHUNK = 37


def linear(
    form: str,
    shape: tuple[int, int],
    rows: int,
    rowwise: bool = False,
    panels: bool | None = None,
    activation_bytes: int = 1,
) -> Kernel:
    """A kernel for a matrix in panels, if its shape is one of `PANELS`."""
    panels = shape in PANELS if panels is None else panels
    # About half of the shapes with a bias.
    bias = shape[0] % 32 == 16 or shape[0] % 2 == 1
    return cpu.write_kernel(
        LinearSpec(form, *shape, rows, bias, rowwise=rowwise, panels=panels, activation_bytes=activation_bytes)
    )


def stored(data: Array, form: str, shape: tuple[int, int], panels: bool | None = None) -> Array:
    """The bytes of a matrix as its kernel reads them."""
    panels = shape in PANELS if panels is None else panels
    return to_panels(torch.from_numpy(data), form, shape[1]).numpy() if panels else data


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("linear") / "host.so")


def is_stored(form: str, shape: tuple[int, int], activation_bytes: int = 1, **_: object) -> bool:
    return form in PANEL_FORMATS if shape in PANELS else FORMATS[form].rows and activation_bytes == 1


@sampled(
    form=FORMATS.builtin,
    shape=(*SHAPES, *PANELS),
    tokens=(None, 1, 2, 3, 7, CHUNK),
    activation_bytes=(1, 2),
    when=is_stored,
    # test_kernels_panels.py has every format in panels.
    fast={"form": ROW_FORMATS},
    slow="compiles a kernel per case",
)
def test_linear(
    workbench: Workbench, form: str, shape: tuple[int, int], tokens: int | None, activation_bytes: int
) -> None:
    """`tokens` None is the kernel of decode, which has one row and does not look at the step. Threads change no bit."""
    rng = np.random.default_rng([*shape, tokens or 0])
    kernel = linear(form, shape, rows=1 if tokens is None else CHUNK, activation_bytes=activation_bytes)
    data, weights = packed(rng, form, *shape)
    x, bias = uniform(rng, tokens or 1, shape[1]), uniform(rng, shape[0])
    inputs, step = {"x": x, "w": stored(data, form, shape), "bias": bias}, -1 if tokens is None else tokens
    results = [workbench.run(kernel, inputs, tokens=step, threads=threads)["y"] for threads in (1, 2, 3, 5)]
    expected = as_seen(x, form, activation_bytes) @ weights.T + (bias if "bias" in kernel.params else 0)
    assert_close(results[0][: len(x)], expected)
    assert np.isnan(results[0][len(x) :]).all()
    assert len({result.tobytes() for result in results}) == 1


@pytest.mark.slow(
    "compiles a kernel per case; f16, q4 and one in panels are fast",
    but=("(251, 72)-f16", "(10, 100)-q4]", "(48, 72)-q8"),
)
@pytest.mark.parametrize(
    ("shape", "form"),
    [each for each in product((*SHAPES, *PANELS), FORMATS.builtin) if is_stored(*reversed(each))],
    ids=str,
)
def test_each_row_has_the_bits_that_it_has_alone(workbench: Workbench, form: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape)
    data, _ = packed(rng, form, *shape)
    x, others = uniform(rng, CHUNK, shape[1]), {"w": stored(data, form, shape), "bias": uniform(rng, shape[0])}
    one, many = linear(form, shape, 1), linear(form, shape, CHUNK, rowwise=shape not in PANELS)
    alone = [workbench.run(one, {"x": row[None], **others})["y"].tobytes() for row in x]
    for tokens in (1, 2, 3, 4, 7, 16, 19, CHUNK):
        together = workbench.run(many, {"x": x[:tokens], **others}, tokens=tokens)["y"][:tokens]
        assert together.tobytes() == b"".join(alone[:tokens])


@sampled(
    form=PANEL_FORMATS,
    rows=(1, CHUNK),
    panels=(True, False),
    when=lambda form, panels, **_: panels or FORMATS[form].rows,
    # Codes and a scale; zeros; minima in blocks; a table; floats.
    fast={"form": ("q8", "q4m", "q4_k", "iq2", "fp8")},
    slow="compiles a kernel per case",
)
def test_what_is_no_number_shows(workbench: Workbench, form: str, rows: int, panels: bool) -> None:
    """In panels and in rows, in whichever lane it is. Products of floats with infinity may be infinite as well."""
    shape, rng = SHAPES[0], np.random.default_rng(rows)
    data, _ = packed(rng, form, *shape)
    for value in (np.nan, np.inf):
        x = uniform(rng, rows, shape[1])
        x[np.arange(rows), rng.integers(0, shape[1], rows)] = value
        inputs = {"x": x, "w": stored(data, form, shape, panels)}
        found = workbench.run(linear(form, shape, rows, panels=panels), inputs, tokens=rows)["y"]
        assert np.isnan(found).all() or (FORMATS[form].has_floats and not np.isfinite(found).any())


@pytest.mark.parametrize("form", PANEL_FORMATS)
@pytest.mark.parametrize("columns", [32, 72, 330])
def test_layout_of_panels(form: str, columns: int) -> None:
    """Four bytes of codes, a zero, a scale or a factor of each row lie side by side."""
    rows = random_rows(np.random.default_rng(columns), form, 3 * PANEL_ROWS, columns)
    panels = stored(rows, form, (len(rows), columns), panels=True)
    assert np.array_equal(panels, panels_of(form, rows, columns))


def test_which_matrices_have_panels() -> None:
    assert tuple(name for name in FORMATS if has_panels(name, 64)) == PANEL_FORMATS == FORMATS.builtin[1:]
    assert not any(has_panels(name, rows) for name in FORMATS for rows in (1, 15, 63))
