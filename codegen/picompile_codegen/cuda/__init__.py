"""The kernels of compiled models for NVIDIA GPUs: TVM TIR to CUDA C, and from there to machine code."""

from picompile_codegen.cuda.attention import attention
from picompile_codegen.cuda.build import CudaSource, cuda_source
from picompile_codegen.cuda.ffn import ffn
from picompile_codegen.cuda.function import CudaKernel
from picompile_codegen.cuda.linear import linear
from picompile_codegen.cuda.predict import predict_low_rank, predict_signs
from picompile_codegen.cuda.token_ops import add, cache_write, embedding, layer_norm, rms_norm, rotary, take_last
from picompile_codegen.cuda.top_logits import leading_logits
from picompile_codegen.cuda.transfer import copy_words, ping_pong, receive, receive_mask, send, send_mask

__all__ = [
    "CudaKernel",
    "CudaSource",
    "add",
    "attention",
    "cache_write",
    "copy_words",
    "cuda_source",
    "embedding",
    "ffn",
    "layer_norm",
    "leading_logits",
    "linear",
    "ping_pong",
    "predict_low_rank",
    "predict_signs",
    "receive",
    "receive_mask",
    "rms_norm",
    "rotary",
    "send",
    "send_mask",
    "take_last",
]
