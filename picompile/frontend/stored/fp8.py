"""FP8: matrices of float8 numbers with a float scale for each block, row or matrix.

A weight is number × scale. DeepSeek's, Qwen's and transformers' checkpoints call the scale `weight_scale_inv`, one for
each block of `weight_block_size`; AutoFP8's have one `weight_scale` a matrix and FBGEMM's one a row. It multiplies
under both names.
"""

from collections.abc import Callable

import torch

from picompile.errors import UnsupportedModelError
from picompile.frontend.stored.blocks import (
    F8_DTYPES,
    ScaledBlocks,
    codes_of,
    fitting_block,
    grid_shape,
    matrix_shape,
    numbers_of,
)
from picompile.frontend.stored.record import (
    FLOAT_DTYPES,
    Found,
    Method,
    Settings,
    StoredFiles,
    StoredMatrix,
    activation_scales,
)

_SCALES = ("weight_scale_inv", "weight_scale")
_DEFAULT_BLOCK = (128, 128)
_MODELOPT = "modelopt"


def _open(settings: Settings) -> Callable[[StoredFiles], Found]:
    algorithm = settings.get("quant_algo")
    if settings.method == _MODELOPT and not str(algorithm).startswith("FP8"):
        settings.refuse(f"with quant_algo {algorithm!r:.40}")
    sizes = settings.get("weight_block_size", default=list(_DEFAULT_BLOCK))
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 2:
        settings.refuse(f"with weight_block_size {sizes!r:.40}")
    rows, columns = (settings.whole("with blocks of %s", size, lambda value: 1 <= value <= 1 << 20) for size in sizes)
    # Scales of a matrix and of a row have other shapes.
    candidates = [(-1, -1), (1, -1), (rows, columns)]

    def find(files: StoredFiles) -> Found:
        modules = [module for module in files.modules("weight") if files.headers[f"{module}.weight"].dtype in F8_DTYPES]
        matrices = {module: _matrix(files, module, candidates) for module in modules}
        unused = activation_scales(files)
        return Found(matrices, unused, left_out(unused))

    return find


def left_out(unused: frozenset[str]) -> tuple[str, ...]:
    """Return a note on scales of activations, where there are any."""
    if not unused:
        return ()
    return (f"activations are not rounded, as {len(unused)} tensors such as {min(unused)} would have it",)


def _matrix(files: StoredFiles, module: str, candidates: list[tuple[int, int]]) -> StoredMatrix:
    shape = matrix_shape(files, module, "weight")
    part = next((part for part in _SCALES if files.part(module, part) is not None), _SCALES[0])
    if all(files.part(module, part) is not None for part in _SCALES):
        file = files.headers[f"{module}.weight"].file
        raise UnsupportedModelError(f"{file}: holds {module}.{_SCALES[0]} and {module}.{_SCALES[1]}: two scales")
    files.needed(module, part, "weight", (*FLOAT_DTYPES, "F8_E8M0"))
    block = fitting_block(files, module, shape, part, candidates)

    def numbers() -> ScaledBlocks:
        scales = files.scales(module, part).to(torch.float32).view(grid_shape(shape, block))
        numbers = numbers_of(files, module, "weight")
        return ScaledBlocks(numbers, shape, scales, block, coded=codes_of(files, module))

    return files.matrix(module, ("weight", part), shape, numbers)


METHOD = Method(
    names=("fp8", "fbgemm_fp8", _MODELOPT),
    title="FP8",
    summary="fp8 (scales of blocks, rows or matrices), fbgemm_fp8 and modelopt's FP8",
    marks=(".weight_scale_inv", ".weight_scale"),
    open=_open,
)
