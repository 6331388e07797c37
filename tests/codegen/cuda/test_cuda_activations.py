"""Activations of single numbers on a GPU against PyTorch's in float64."""

from pathlib import Path

import numpy as np
import torch

from helpers.kernels.cuda_workbench import CudaWorkbench
from picompile_codegen.cpu.tensor import bind, when
from picompile_codegen.cuda.function import CudaFunction
from picompile_codegen.cuda.memory import activate
from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.activations import ACTIVATIONS

NAMES = [*ACTIVATIONS, "fatrelu(0.25)"]


def test_activations(tmp_path: Path) -> None:
    """Also of numbers whose exponential is infinite, of zero, and of a threshold itself."""
    x = np.concatenate([np.linspace(-12, 12, 97), [-1e4, -100, -0.25, -1e-8, 0, 1e-8, 0.25, 100, 1e4]])
    x = x.astype(np.float32)
    function = CudaFunction("activations")
    with function:
        given, y = function.floats("x", len(x)), function.floats("y", len(NAMES), len(x))
        with function.launch(grid=1, block=128) as place, when(place.thread < len(x)):
            for i, name in enumerate(NAMES):
                y[i, place.thread] = bind(activate(name, given[place.thread]))
    kernel = function.cuda_kernel()
    result = CudaWorkbench(tmp_path / "device.so", [kernel]).run(kernel, {"x": x})["y"]
    for name, row in zip(NAMES, result, strict=True):
        expected = parse_activation(name).function(torch.from_numpy(x).double()).numpy()
        # A few roundings of float32; gelu takes a difference from 1, which is rounded to 6e-8, times x.
        assert np.allclose(row, expected, rtol=1e-6, atol=1e-6), name
