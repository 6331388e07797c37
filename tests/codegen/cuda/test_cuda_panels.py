"""Matrices in panels on a GPU against float64: products of one token and of chunks, look-ups, and whole blocks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_kernels_panels import BLOCKS, TOGETHER, any_matrix, in_panels

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.halves import in_halves, weights_in_halves
from helpers.kernels.workbench import Array, assert_close, assert_rows, uniform
from helpers.products import sampled
from helpers.weight_formats import PANEL_FORMATS
from picompile_codegen.cuda import mma
from picompile_codegen.specs import EmbeddingSpec, LinearAddSpec, LinearSpec, RmsNormSpec, WholeFfnSpec
from picompile_passes.dialect import parse_activation
from picompile_passes.formats import FORMATS

CHUNK = 13
SLOW = "compiles a kernel per case"
# Minima and scales in blocks; two planes and groups of 16; a table. The emulation takes seconds to compile a case.
FAST = ("q4_k", "q3_k", "iq4_xs")
# A group alone; whole blocks of 256; blocks and a part of one, for whole turns of warps and a part; several parts of x.
COLUMNS = (20, 512, 2120, 4133)


def in_chunk(x: Array, weights: Array) -> Array:
    return in_halves(x) @ weights_in_halves(weights).T


@sampled(
    slow=SLOW,
    form=PANEL_FORMATS,
    columns=COLUMNS,
    rows=(1, CHUNK),
    bias=(False, True),
    fast={"form": FAST, "columns": (20, 512, 2120)},
    when=lambda form, columns, rows, bias: rows == 1 or columns < 1000,
)
def test_any_bytes_are_multiplied(workbench: CudaWorkbench, form: str, columns: int, rows: int, bias: bool) -> None:
    rng = np.random.default_rng([columns, rows])
    data, weights = any_matrix(rng, form, 48, columns)
    added = uniform(rng, 48)
    spec = LinearSpec(form, 48, columns, rows, bias=bias, panels=True)
    for tokens in (1,) if rows == 1 else (rows - 2, 3):
        x = uniform(rng, tokens, columns)
        inputs = {"x": x, "w": in_panels(data, form, columns), "bias": added}
        found = workbench.run(spec, inputs, tokens=tokens if rows > 1 else -1)["y"]
        expected = x.astype(np.float64) @ weights.T if rows == 1 else in_chunk(x, weights)
        # One weight in some thousands is between two halves, as its float32 is not.
        assert_rows(found, expected + (added if bias else 0), 1e-5 if rows == 1 else 5e-5)


@pytest.mark.slow(f"{SLOW}; test_cuda_linear.py has a fast one")
@pytest.mark.parametrize("form", PANEL_FORMATS)
@pytest.mark.parametrize("sm", [75, 80])
def test_large_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str, sm: int) -> None:
    """Several tiles of tokens and of rows, the last of both begun."""
    monkeypatch.setattr(mma, "_ENOUGH_BLOCKS", 1)
    n, k, tokens, rng = 144, 68, 131, np.random.default_rng(5)
    data, weights = any_matrix(rng, form, n, k)
    x = uniform(rng, tokens, k)
    spec = LinearSpec(form, n, k, tokens + 2, bias=False, panels=True)
    found = CudaWorkbench(tmp_path, sm).run(spec, {"x": x, "w": in_panels(data, form, k)}, tokens=tokens)["y"]
    assert_rows(found, in_chunk(x, weights), 5e-5)


@pytest.mark.slow(f"{SLOW}; test_cuda_norms.py has fast ones")
@pytest.mark.parametrize("form", PANEL_FORMATS)
def test_with_an_addition_and_a_norm(workbench: CudaWorkbench, form: str) -> None:
    rng, columns = np.random.default_rng(7), 544
    data, weights = any_matrix(rng, form, 64, columns)
    x, added, norm = uniform(rng, 1, columns), uniform(rng, 1, 64), uniform(rng, 64)
    spec = LinearAddSpec(LinearSpec(form, 64, columns, 1, bias=False, panels=True), RmsNormSpec(64, 1, 1e-5))
    inputs = {"x": x, "w": in_panels(data, form, columns), "added": added, "norm_weight": norm}
    found = workbench.run(spec, inputs)
    y = added + x.astype(np.float64) @ weights.T
    assert_close(found["y"], y, 1e-5)
    assert_close(found["normed"], y / np.sqrt((y**2).mean() + 1e-5) * norm, 1e-5)


@sampled(slow=SLOW, form=PANEL_FORMATS, dim=(36, 300, 545), rows=(1, 7), fast={"form": FAST})
def test_embedding(workbench: CudaWorkbench, form: str, dim: int, rows: int) -> None:
    """Each row has the numbers that the format gives it, to the bit but for what is rounded more than once."""
    rng = np.random.default_rng([dim, rows])
    data, weights = any_matrix(rng, form, 48, dim)
    ids = rng.integers(0, 46, rows).astype(np.int32)
    spec = EmbeddingSpec(form, vocab=48, dim=dim, rows=rows, offset=2, panels=True)
    found = workbench.run(spec, {"ids": ids, "w": in_panels(data, form, dim)}, tokens=rows)
    expected = weights[ids + 2].astype(np.float32)
    assert_rows(found["y"], expected, tolerance=3e-7 if FORMATS[form].has_zeros else 0.0)


NEURONS, DIM = 272, 80


@sampled(
    slow=SLOW,
    formats=TOGETHER,
    block=BLOCKS,
    rows=(1, CHUNK),
    counts=(False, True),
    # A chunk with a gate, whose kernel for one token takes longest to emulate.
    seed=12,
    # Formats alike and not; with a gate and without, with all biases and some.
    fast={"formats": (("q4_k",) * 3, ("q4_k", "iq4_xs", "q4_k")), "block": ("geglu", "gelu")},
)
def test_whole_block(workbench: CudaWorkbench, formats: tuple[str, ...], block: str, rows: int, counts: bool) -> None:
    own, rng = BLOCKS[block], np.random.default_rng([len(block), rows])
    gated, biases, tokens = bool(own["gated"]), str(own["biases"]), max(1, rows - 3)
    names = ("gate", "up", "down") if gated else ("up", "down")
    forms = dict(zip(names, formats[-len(names) :], strict=True))
    spec = WholeFfnSpec(
        formats=tuple(forms.values()),
        neurons=NEURONS,
        dim=DIM,
        rows=rows,
        gated=gated,
        activation=str(own["activation"]),
        up_activation=str(own["up_activation"]),
        counts=counts,
        **{f"{name}_bias": name[0] in biases for name in ("gate", "up", "down")},
    )
    shapes = {"gate": (NEURONS, DIM), "up": (NEURONS, DIM), "down": (DIM, NEURONS)}
    matrices = {name: any_matrix(rng, forms[name], *shapes[name]) for name in names}
    offsets = {name: uniform(rng, shapes[name][0]) for name in shapes}
    x = uniform(rng, tokens, DIM) / 16
    inputs = {f"{name}_w": in_panels(data, forms[name], shapes[name][1]) for name, (data, _) in matrices.items()}
    inputs |= {f"{name}_bias": offset for name, offset in offsets.items()}
    inputs |= {"x": x, "stats": np.array([5, 7], np.int64)}

    def product(values: Array, name: str) -> Array:
        weights = matrices[name][1]
        found = values.astype(np.float64) @ weights.T if rows == 1 else in_chunk(values.astype(np.float32), weights)
        return found + (offsets[name] if name[0] in biases else 0.0)

    def activated(name: str, values: Array) -> Array:
        return parse_activation(str(own[name])).function(torch.from_numpy(values)).numpy()

    hidden = activated("activation", product(x, names[0]))
    if gated:
        hidden = hidden * activated("up_activation", product(x, "up"))
    found = workbench.run(spec, inputs, tokens=tokens if rows > 1 else -1)
    # A few hidden values are rounded to another half from float32 than from float64.
    assert_rows(found["y"], product(hidden, "down"), 2e-5 if rows == 1 else 5e-4)
    computed, fired = found["stats"].tolist()
    unsure = int((np.abs(hidden) < 1e-3 * np.abs(hidden).max()).sum())
    if not counts:
        assert (computed, fired) == (5, 7)
    else:
        assert computed == 5 + tokens * NEURONS
        assert abs(fired - 7 - int((hidden != 0).sum())) <= unsure
