"""Products and look-ups with matrices in panels, and blocks that compute every neuron, against the same in float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from helpers.kernels.workbench import Array, Workbench, as_seen, assert_close, assert_rows, packed, uniform
from helpers.products import sampled
from helpers.weight_formats import PANEL_FORMATS, random_rows, weights_of_row
from picompile_codegen import cpu
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.specs import EmbeddingSpec, LinearSpec, WholeFfnSpec
from picompile_passes.dialect import parse_activation
from picompile_passes.formats import FORMATS
from picompile_passes.formats.panels import to_panels

# More than a tile of tokens.
CHUNK = 37
SLOW = "compiles a kernel per case"


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("panels") / "host.so")


def in_panels(data: Array, form: str, columns: int) -> Array:
    return to_panels(torch.from_numpy(data), form, columns).numpy()


def any_matrix(rng: np.random.Generator, form: str, rows: int, columns: int) -> tuple[Array, Array]:
    """Return a matrix of any bytes, those too that no rounding makes, and its weights, float64 [rows, columns]."""
    data = random_rows(rng, form, rows, columns)
    return data, np.stack([weights_of_row(form, row, columns) for row in data])


@sampled(form=PANEL_FORMATS, columns=(72, 544), tokens=(None, 7), activation_bytes=(1, 2), slow=SLOW)
def test_any_bytes_are_multiplied(
    workbench: Workbench, form: str, columns: int, tokens: int | None, activation_bytes: int
) -> None:
    """`tokens` None is the kernel of decode."""
    rng = np.random.default_rng([columns, tokens or 0])
    data, weights = any_matrix(rng, form, 32, columns)
    x, rows = uniform(rng, tokens or 1, columns), tokens or 1
    spec = LinearSpec(form, 32, columns, rows, bias=False, panels=True, activation_bytes=activation_bytes)
    inputs, step = {"x": x, "w": in_panels(data, form, columns)}, -1 if tokens is None else tokens
    found = workbench.run(cpu.write_kernel(spec), inputs, tokens=step)["y"]
    assert_close(found, as_seen(x, form, activation_bytes) @ weights.T)


def embedding(form: str, dim: int, rows: int) -> Kernel:
    return cpu.write_kernel(EmbeddingSpec(format=form, vocab=48, dim=dim, rows=rows, offset=2, panels=True))


@sampled(
    form=PANEL_FORMATS,
    dim=(72, 300, 544),
    rows=(1, 7),
    # One of each layout of codes; a product above has every format.
    fast={"form": ("q8", "q4", "q6", "q4m", "q4_k", "q3_k", "mxfp4", "nf4", "iq2")},
    slow=SLOW,
)
def test_embedding(workbench: Workbench, form: str, dim: int, rows: int) -> None:
    """Each row has the numbers that the format gives it, to the bit but for what is rounded more than once."""
    rng = np.random.default_rng([dim, rows])
    data, weights = any_matrix(rng, form, 48, dim)
    ids = rng.integers(0, 46, rows).astype(np.int32)
    found = workbench.run(embedding(form, dim, rows), {"ids": ids, "w": in_panels(data, form, dim)}, tokens=rows)
    expected = weights[ids + 2].astype(np.float32)
    assert_rows(found["y"], expected, tolerance=3e-7 if FORMATS[form].minimum else 0.0)


# Formats of gate, up and down: alike; each with other sums of inputs; and each of those with zeros or minima.
TOGETHER = [(form,) * 3 for form in PANEL_FORMATS]
TOGETHER += [(a, b, a) for a, b in pairwise(("q4", "q6_k", "q4_k", "iq4_xs", "q4m", "q2_k", "q5", "q8"))]
# Codes and a scale, and other ones beside them; minima in blocks; floats. Tests of single matrices have every format.
FAST = [("q4",) * 3, ("q4", "q6_k", "q4"), ("q4_k",) * 3, ("fp8",) * 3]
BLOCKS = {
    "swiglu": {"gated": True, "activation": "silu", "up_activation": "identity", "biases": ""},
    "gelu": {"gated": False, "activation": "gelu", "up_activation": "identity", "biases": "ud"},
    "geglu": {"gated": True, "activation": "gelu_tanh", "up_activation": "relu", "biases": "gud"},
}


NEURONS, DIM = 208, 80


def whole_block(formats: tuple[str, ...], block: str, tokens: int | None, activation_bytes: int) -> Kernel:
    own = BLOCKS[block]
    spec = WholeFfnSpec(
        formats=formats if own["gated"] else formats[1:],
        neurons=NEURONS,
        dim=DIM,
        rows=1 if tokens is None else CHUNK,
        gated=bool(own["gated"]),
        activation=str(own["activation"]),
        up_activation=str(own["up_activation"]),
        activation_bytes=activation_bytes,
        **{f"{name}_bias": name[0] in str(own["biases"]) for name in ("gate", "up", "down")},
    )
    return cpu.write_kernel(spec)


@sampled(
    formats=TOGETHER,
    block=BLOCKS,
    tokens=(None, 3, CHUNK),
    activation_bytes=(1, 2),
    fast={"formats": FAST},
    slow=SLOW,
)
def test_whole_block(
    workbench: Workbench, formats: tuple[str, ...], block: str, tokens: int | None, activation_bytes: int
) -> None:
    """`tokens` None is the kernel of decode. Threads change no bit, and each token has the bits that it has alone."""
    own, rng = BLOCKS[block], np.random.default_rng([len(block), tokens or 0])
    gated, biases = bool(own["gated"]), str(own["biases"])
    names = ("gate", "up", "down") if gated else ("up", "down")
    kernel = whole_block(formats, block, tokens, activation_bytes)
    x, stats = uniform(rng, tokens or 1, DIM), np.array([5, 7], np.int64)
    shapes = {"gate": (NEURONS, DIM), "up": (NEURONS, DIM), "down": (DIM, NEURONS)}
    forms = dict(zip(names, formats[-len(names) :], strict=True))
    matrices = {name: packed(rng, forms[name], *shapes[name]) for name in names}
    inputs = {f"{name}_w": in_panels(data, forms[name], shapes[name][1]) for name, (data, _) in matrices.items()}
    offsets = {name: uniform(rng, shapes[name][0]) for name in ("gate", "up", "down")}
    inputs |= {f"{name}_bias": offset for name, offset in offsets.items()} | {"x": x, "stats": stats}

    def product(values: Array, name: str) -> Array:
        seen = as_seen(values.astype(np.float32), forms[name], activation_bytes) @ matrices[name][1].T
        return seen + (offsets[name] if name[0] in biases else 0.0)

    def activated(name: str, values: Array) -> Array:
        return parse_activation(str(own[name])).function(torch.from_numpy(values)).numpy()

    hidden = activated("activation", product(x, names[0]))
    if gated:
        hidden = hidden * activated("up_activation", product(x, "up"))
    step = -1 if tokens is None else tokens
    results = [workbench.run(kernel, inputs, tokens=step, threads=threads) for threads in (1, 2, 5)]
    # One byte of an output of the neurons may be rounded to another: a 254th of a group's largest.
    assert_close(results[0]["y"][: len(x)], product(hidden, "down"), 2e-3 if activation_bytes == 1 else 2e-5)
    assert len({result["y"].tobytes() for result in results}) == 1
    computed, fired = results[0]["stats"].tolist()
    # An output near 0 may be one or not.
    least, unsure = int((np.abs(hidden) >= 1e-3).sum()), int((np.abs(hidden) < 1e-3).sum())
    assert computed == 5 + len(x) * NEURONS
    assert 7 + least <= fired <= 7 + least + unsure
    if tokens is not None:
        for row, value in zip(x, results[0]["y"], strict=False):
            alone = workbench.run(kernel, inputs | {"x": row[None]}, tokens=1)["y"][0]
            assert alone.tobytes() == value.tobytes()


@pytest.mark.parametrize("form", ["q4_k", "q4"])
@pytest.mark.parametrize("activation_bytes", [1, 2])
def test_what_is_no_number_shows(workbench: Workbench, form: str, activation_bytes: int) -> None:
    spec = WholeFfnSpec(
        formats=(form,) * 3,
        neurons=32,
        dim=48,
        rows=1,
        gated=True,
        activation="silu",
        up_activation="identity",
        gate_bias=False,
        up_bias=False,
        down_bias=False,
        activation_bytes=activation_bytes,
    )
    rng = np.random.default_rng(3)
    shapes = {"gate_w": (32, 48), "up_w": (32, 48), "down_w": (48, 32)}
    inputs = {name: in_panels(packed(rng, form, *shape)[0], form, shape[1]) for name, shape in shapes.items()}
    for value in (np.nan, np.inf):
        x = uniform(rng, 1, 48)
        x[0, 17] = value
        given = inputs | {"x": x, "stats": np.zeros(2, np.int64)}
        assert np.isnan(workbench.run(cpu.write_kernel(spec), given)["y"]).all()
