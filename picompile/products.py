"""This chooses how PyTorch multiplies matrices on the CPU: by which library, and from float32 or bfloat16.

PyTorch multiplies float32 matrices with MKL. Where a processor has AVX-512 and is not Intel's, MKL takes code for AVX2;
oneDNN, which PyTorch has as well, is then twice as fast (455 against 210 GFLOP/s on two cores of Zen 5). PyTorch turns
to oneDNN where its setting allows products of bfloat16. oneDNN makes use of that permission only with AMX, and
multiplies in float32 otherwise: this is tried before it is relied on.
"""

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from picompile.errors import UsageError
from picompile_runtime.devices.machine import cpu_features, missing_features

# Any of these gives a processor products of bfloat16, by the names that Linux has for them.
_BF16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")

_lock = threading.Lock()
_inside: list[str] = []  # PyTorch's setting before the outermost of the blocks that are being run


@contextmanager
def fast_products() -> Iterator[None]:
    """Multiply float32 matrices with the faster library in the block; results differ in the order of sums alone.

    PyTorch's setting holds for all threads, and is put back when the last such block ends. The function that this
    returns decorates functions, too.
    """
    if not _onednn_is_faster():
        yield
        return
    matrices = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _lock:
        _inside.append(_inside[0] if _inside else matrices.fp32_precision)
        matrices.fp32_precision = "bf16"
    try:
        yield
    finally:
        with _lock:
            before = _inside.pop()
            if not _inside:
                matrices.fp32_precision = before


@cache
def _onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies faster than MKL here, to float32's precision."""
    features = cpu_features()
    if platform.machine() != "x86_64" or "avx512f" not in features or "amx_bf16" in features:
        return False
    return not _made_by_intel() and _allowed_bf16_is_float32()


def _made_by_intel() -> bool:
    return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")


def _allowed_bf16_is_float32() -> bool:
    """Return whether a product that may round to bfloat16 does not."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(256, 512, generator=generator), torch.randn(512, 256, generator=generator)
    matrices = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matrices.fp32_precision
    matrices.fp32_precision = "bf16"
    try:
        found = x @ w
    finally:
        matrices.fp32_precision = before
    # In float32 it is off by some 1e-4, from bfloat16 by 0.2.
    return bool((found - x.double() @ w.double()).abs().max() < 2e-3)


def require_bf16() -> None:
    """Raise `UsageError` unless this machine's processor multiplies bfloat16."""
    if len(missing_features(_BF16_FEATURES)) == len(_BF16_FEATURES):
        raise UsageError("--bf16: this machine's processor has no products of bfloat16; leave the option out")


@contextmanager
def products_in_bf16(wanted: bool) -> Iterator[None]:
    """Round the factors of float32 matrix products to bfloat16 in the block, on this thread alone, if `wanted`.

    That holds for what multiplies with weights (`linear`, `mm` and `addmm`); attention stays in float32. Results are
    rounded to bfloat16 once, and are float32 tensors.
    """
    if not wanted:
        yield
        return
    with _bf16_mode()():
        yield


@cache
def _bf16_mode() -> type[TorchDispatchMode]:

    mm, addmm = torch.ops.aten.mm.default, torch.ops.aten.addmm.default

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rounded: torch.Tensor = mm(a.bfloat16(), b.bfloat16())
        return rounded.float()

    def is_float32(*tensors: torch.Tensor) -> bool:
        return all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)

    class Bf16Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Multiplies in bfloat16 what is asked for in float32."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is mm and not kwargs and is_float32(*args):
                return product(*args)
            if func is addmm and not kwargs and is_float32(*args):
                bias, a, b = args
                return product(a, b).add_(bias)
            return func(*args, **kwargs)

    return Bf16Products
