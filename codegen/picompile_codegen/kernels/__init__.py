"""The kernels of compiled models, as TVM TIR for a CPU with AVX2."""

from picompile_codegen.kernels.attention import attention
from picompile_codegen.kernels.cache import cache_write
from picompile_codegen.kernels.elementwise import add, take_last
from picompile_codegen.kernels.embedding import embedding
from picompile_codegen.kernels.exchange import (
    FLAG_SHAPE,
    copy_words,
    receive,
    receive_mask,
    send,
    send_mask,
    signal,
    wait,
)
from picompile_codegen.kernels.ffn import ffn
from picompile_codegen.kernels.kernel import Argument, Kernel
from picompile_codegen.kernels.leading import leading_logits
from picompile_codegen.kernels.linear import linear
from picompile_codegen.kernels.norms import layer_norm, rms_norm
from picompile_codegen.kernels.predict_low_rank import predict_low_rank
from picompile_codegen.kernels.predict_signs import predict_signs
from picompile_codegen.kernels.rotary import rotary

__all__ = [
    "FLAG_SHAPE",
    "Argument",
    "Kernel",
    "add",
    "attention",
    "cache_write",
    "copy_words",
    "embedding",
    "ffn",
    "layer_norm",
    "leading_logits",
    "linear",
    "predict_low_rank",
    "predict_signs",
    "receive",
    "receive_mask",
    "rms_norm",
    "rotary",
    "send",
    "send_mask",
    "signal",
    "take_last",
    "wait",
]
