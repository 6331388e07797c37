"""Norms on a GPU against float64."""

import numpy as np
import pytest
import torch

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.workbench import assert_close, uniform
from picompile_codegen import cuda
from picompile_codegen.cuda import CudaKernel
from picompile_codegen.specs import LayerNormSpec, RmsNormSpec

CHUNK = 5
EPS = 1e-5
# Less than a warp, several warps with and without a rest, and more than a block has threads for.
DIMS = (5, 96, 100, 131, 4228)
# Columns and groups: heads of half a warp, of no multiple of four, and of several warps.
GROUPED = ((96, 6), (99, 3), (392, 2))
AFFINE = ((True, True), (True, False), (False, False))
# Rows, and how many of them count.
ROWS = [(1, 1), (CHUNK, CHUNK), (CHUNK, 3)]


def rms_norm(dim: int, rows: int, groups: int = 1) -> CudaKernel:
    return cuda.write_kernel(RmsNormSpec(dim=dim, rows=rows, eps=EPS, groups=groups))


def layer_norm(dim: int, rows: int, affine: tuple[bool, bool], groups: int = 1) -> CudaKernel:
    spec = LayerNormSpec(dim=dim, rows=rows, eps=EPS, weight=affine[0], bias=affine[1], groups=groups)
    return cuda.write_kernel(spec)


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    sizes = [(dim, rows) for dim in DIMS for rows in (1, CHUNK)]
    built = [rms_norm(*size) for size in sizes] + [layer_norm(*size, affine) for size in sizes for affine in AFFINE]
    for dim, groups in GROUPED:
        built += [rms_norm(dim, CHUNK, groups), layer_norm(dim, CHUNK, (True, True), groups)]
    return CudaWorkbench(tmp_path_factory.mktemp("norms") / "device.so", built)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
def test_rms_norm(workbench: CudaWorkbench, dim: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng([dim, tokens])
    x, weight = uniform(rng, tokens, dim), uniform(rng, dim)
    result = workbench.run(rms_norm(dim, rows), {"x": x, "weight": weight}, tokens=tokens)
    wide = x.astype(np.float64)
    # The few roundings of float32, 6e-8 each, that an element goes through.
    assert_close(result["y"][:tokens], wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight, 1e-6)
    assert np.isnan(result["y"][tokens:]).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("rows", "tokens"), ROWS)
@pytest.mark.parametrize("affine", AFFINE)
def test_layer_norm(workbench: CudaWorkbench, dim: int, rows: int, tokens: int, affine: tuple[bool, bool]) -> None:
    rng = np.random.default_rng([dim, tokens])
    # Far from zero: a variance as mean of squares less square of mean would be wrong in the third digit.
    x, weight, bias = uniform(rng, tokens, dim) + 30, uniform(rng, dim), uniform(rng, dim)
    result = workbench.run(layer_norm(dim, rows, affine), {"x": x, "weight": weight, "bias": bias}, tokens=tokens)
    given = zip((weight, bias), affine, strict=True)
    parameters = [torch.from_numpy(each).double() if is_given else None for each, is_given in given]
    expected = torch.nn.functional.layer_norm(torch.from_numpy(x).double(), (dim,), *parameters, EPS)
    # The mean is rounded to 2e-6, and deviations from it are about 1.
    assert_close(result["y"][:tokens], expected.numpy(), 1e-5)
    assert np.isnan(result["y"][tokens:]).all()


@pytest.mark.parametrize(("dim", "groups"), GROUPED)
@pytest.mark.parametrize("tokens", [CHUNK, 3])
def test_norms_of_groups(workbench: CudaWorkbench, dim: int, groups: int, tokens: int) -> None:
    rng = np.random.default_rng([dim, tokens])
    x, weight, bias = uniform(rng, tokens, dim), uniform(rng, dim), uniform(rng, dim)
    given = {"x": x, "weight": weight, "bias": bias}
    wide = x.astype(np.float64).reshape(tokens, groups, -1)
    centered = wide - wide.mean(-1, keepdims=True)
    roots = [np.sqrt((each**2).mean(-1, keepdims=True) + EPS) for each in (wide, centered)]
    expected = [(each / root).reshape(tokens, dim) for each, root in zip((wide, centered), roots, strict=True)]
    result = workbench.run(rms_norm(dim, CHUNK, groups), given, tokens=tokens)["y"]
    assert_close(result[:tokens], expected[0] * weight, 1e-6)
    assert np.isnan(result[tokens:]).all()
    result = workbench.run(layer_norm(dim, CHUNK, (True, True), groups), given, tokens=tokens)["y"]
    assert_close(result[:tokens], expected[1] * weight + bias, 1e-5)
    assert np.isnan(result[tokens:]).all()
