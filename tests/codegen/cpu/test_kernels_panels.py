"""Matrices in panels: their layout, products with them against float64, and the same bits for any company of tokens."""

import numpy as np
import pytest
import torch

from helpers.kernels.workbench import Array, Workbench, as_seen, assert_close, packed, uniform
from picompile_codegen import cpu
from picompile_codegen.cpu import Kernel
from picompile_codegen.specs import LinearSpec, PredictLowRankSpec
from picompile_codegen.weight_panels import PANEL_ROWS, has_panels, to_panels
from picompile_passes.weight_formats import FORMATS

IN_PANELS = ("q8", "q6", "q4m", "q4")
# (n, k): whole groups; neither whole groups nor whole blocks of high bits; one panel; rows longer than a page.
SHAPES = ((64, 96), (48, 72), (16, 100), (208, 1100))
# More than two of the largest tiles, and something left over for each of the smaller ones.
MANY = 37


def linear(format_name: str, shape: tuple[int, int], rows: int) -> Kernel:
    # Half of the shapes with a bias.
    bias = shape[0] % 32 == 16
    return cpu.write_kernel(LinearSpec(format=format_name, n=shape[0], k=shape[1], rows=rows, bias=bias, panels=True))


def in_panels(data: Array, format_name: str, columns: int) -> Array:
    return to_panels(torch.from_numpy(data), format_name, columns).numpy()


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("panels") / "host.so")


@pytest.mark.parametrize("format_name", IN_PANELS)
@pytest.mark.parametrize("columns", [32, 72, 330])
def test_layout(format_name: str, columns: int) -> None:
    """Four bytes of codes, a zero or a scale of each row side by side."""
    form, rows = FORMATS[format_name], 3 * PANEL_ROWS
    data, _ = packed(np.random.default_rng(columns), format_name, rows, columns)
    panels = in_panels(data, format_name, columns)
    assert panels.shape == (3, PANEL_ROWS * form.row_bytes(columns))
    zeros, scales, end = form.zero_offset_bytes(columns), form.scale_offset_bytes(columns), form.row_bytes(columns)
    for row in range(rows):
        panel, place = divmod(row, PANEL_ROWS)
        for byte in range(end):
            start, unit = (0, 4) if byte < zeros else (zeros, 1) if byte < scales else (scales, 2)
            number, inside = divmod(byte - start, unit)
            found = panels[panel, PANEL_ROWS * start + (number * PANEL_ROWS + place) * unit + inside]
            assert found == data[row, byte], (row, byte)


def test_which_matrices_have_panels() -> None:
    assert [name for name in FORMATS if has_panels(name, 64)] == ["q8", "q6", "q4m", "q4"]
    assert not any(has_panels(name, rows) for name in FORMATS for rows in (1, 15, 63))


@pytest.mark.parametrize("format_name", IN_PANELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [None, 1, 3, MANY])
def test_linear(workbench: Workbench, format_name: str, shape: tuple[int, int], tokens: int | None) -> None:
    """`tokens` None is the kernel of decode, which has one row and does not look at the step."""
    rng = np.random.default_rng([*shape, tokens or 0])
    kernel = linear(format_name, shape, 1 if tokens is None else MANY)
    data, weights = packed(rng, format_name, *shape)
    x, bias = uniform(rng, tokens or 1, shape[1]), uniform(rng, shape[0])
    inputs = {"x": x, "w": in_panels(data, format_name, shape[1]), "bias": bias}
    result = workbench.run(kernel, inputs, tokens=-1 if tokens is None else tokens)
    expected = as_seen(x, format_name) @ weights.T + (bias if "bias" in kernel.params else 0)
    assert_close(result["y"][: len(x)], expected)
    assert np.isnan(result["y"][len(x) :]).all()


@pytest.mark.parametrize("format_name", IN_PANELS)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_each_token_has_the_bits_that_it_has_alone(
    workbench: Workbench, format_name: str, shape: tuple[int, int]
) -> None:
    rng = np.random.default_rng(shape)
    data, _ = packed(rng, format_name, *shape)
    others = {"w": in_panels(data, format_name, shape[1]), "bias": uniform(rng, shape[0])}
    x, one, many = uniform(rng, MANY, shape[1]), linear(format_name, shape, 1), linear(format_name, shape, MANY)
    alone = [workbench.run(one, {"x": row[None], **others})["y"].tobytes() for row in x]
    for tokens in (1, 2, 3, 4, 7, 16, 19, MANY):
        together = workbench.run(many, {"x": x[:tokens], **others}, tokens=tokens)["y"][:tokens]
        assert together.tobytes() == b"".join(alone[:tokens])


@pytest.mark.parametrize("format_name", IN_PANELS)
@pytest.mark.parametrize("rows", [1, MANY])
def test_same_bits_for_any_number_of_threads(workbench: Workbench, format_name: str, rows: int) -> None:
    rng, shape = np.random.default_rng(rows), SHAPES[-1]
    data, _ = packed(rng, format_name, *shape)
    inputs = {"x": uniform(rng, rows, shape[1]), "w": in_panels(data, format_name, shape[1])}
    kernel = linear(format_name, shape, rows)
    results = [workbench.run(kernel, inputs, tokens=rows, threads=threads)["y"].tobytes() for threads in (1, 2, 3, 5)]
    assert len(set(results)) == 1


@pytest.mark.parametrize("format_name", IN_PANELS)
@pytest.mark.parametrize(("rows", "panels"), [(1, True), (MANY, True), (1, False), (MANY, False)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_shows(workbench: Workbench, format_name: str, rows: int, panels: bool, value: float) -> None:
    """In panels and in rows, in whichever lane it is."""
    (n, k), rng = (64, 96), np.random.default_rng(rows)
    data, _ = packed(rng, format_name, n, k)
    kernel = cpu.write_kernel(LinearSpec(format=format_name, n=n, k=k, rows=rows, bias=False, panels=panels))
    x = uniform(rng, rows, k)
    x[np.arange(rows), rng.integers(0, k, rows)] = value
    y = workbench.run(kernel, {"x": x, "w": in_panels(data, format_name, k) if panels else data}, tokens=rows)["y"]
    assert np.isnan(y).all()


@pytest.mark.parametrize("formats", [("q8", "q8"), ("q4", "q6"), ("q4m", "q8")], ids=str)
@pytest.mark.parametrize("relu", [False, True])
def test_predictors(workbench: Workbench, formats: tuple[str, str], relu: bool) -> None:
    """Masks are those of the same products in float64, whichever tokens are beside."""
    (neurons, rank, dim), rng = (112, 48, 100), np.random.default_rng([relu, *map(len, formats)])

    def kernel(rows: int) -> Kernel:
        return cpu.write_kernel(
            PredictLowRankSpec(formats=formats, neurons=neurons, rank=rank, dim=dim, relu=relu, rows=rows, panels=True)
        )

    fc1, first = packed(rng, formats[0], rank, dim)
    fc2, second = packed(rng, formats[1], neurons, rank)
    x, bias = uniform(rng, MANY, dim), uniform(rng, neurons)
    hidden = as_seen(x, formats[0]) @ first.T
    hidden = np.maximum(hidden, 0) if relu else hidden
    scores = as_seen(hidden.astype(np.float32), formats[1]) @ second.T + bias
    inputs = {
        "fc1": in_panels(fc1, formats[0], dim),
        "fc2": in_panels(fc2, formats[1], rank),
        "bias": bias,
        "threshold": np.array([0.1], np.float32),
    }
    masks = workbench.run(kernel(MANY), inputs | {"x": x}, tokens=MANY - 3)["mask"]
    assert (masks[-3:] == 255).all()
    clear = np.abs(scores - 0.1) > 1e-3 * np.abs(scores).max()
    assert clear.mean() > 0.95
    assert ((masks == (scores > 0.1)) | ~clear)[:-3].all()
    assert 0.1 < masks[:-3].mean() < 0.9
    alone = [workbench.run(kernel(1), inputs | {"x": row[None]})["mask"][0] for row in x[:-3]]
    assert np.array_equal(masks[:-3], np.stack(alone))
