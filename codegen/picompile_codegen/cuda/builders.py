"""Which builder of CUDA kernels is the twin of which builder of CPU kernels: the one of the same name."""

from collections.abc import Callable, Mapping
from typing import Any

from picompile_codegen import cpu as kernels
from picompile_codegen import cuda

_NAMES = (
    "add", "attention", "cache_write", "copy_words", "embedding", "ffn", "layer_norm", "leading_logits", "linear",
    "predict_low_rank", "predict_signs", "receive", "receive_mask", "rms_norm", "rotary", "send", "send_mask",
    "take_last",
)  # fmt: skip

# They take the same parameters and declare the same arguments, but for scratch memory.
CUDA_BUILDERS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    getattr(kernels, name): getattr(cuda, name) for name in _NAMES
}
