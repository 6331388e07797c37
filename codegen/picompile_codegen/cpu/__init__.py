"""The kernels of compiled models, as TVM TIR for a CPU with AVX2."""

from picompile_codegen.cpu.attention import attention
from picompile_codegen.cpu.cache import cache_write
from picompile_codegen.cpu.ffn import ffn
from picompile_codegen.cpu.kernel import Kernel, KernelArgument
from picompile_codegen.cpu.linear import linear
from picompile_codegen.cpu.predict import predict_low_rank, predict_signs
from picompile_codegen.cpu.token_ops import add, embedding, layer_norm, rms_norm, rotary, take_last
from picompile_codegen.cpu.top_logits import leading_logits
from picompile_codegen.cpu.transfer import FLAG_SHAPE, copy_words, receive, receive_mask, send, send_mask, signal, wait

__all__ = [
    "FLAG_SHAPE",
    "Kernel",
    "KernelArgument",
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
