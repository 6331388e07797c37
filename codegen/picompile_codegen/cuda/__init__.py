"""The kernels of compiled models for NVIDIA GPUs: TVM TIR to CUDA C, and from there to machine code."""

from picompile_codegen.cuda.attention import attention
from picompile_codegen.cuda.cache import cache_write
from picompile_codegen.cuda.elementwise import add, take_last
from picompile_codegen.cuda.embedding import embedding
from picompile_codegen.cuda.exchange import copy_words, ping_pong, receive, receive_mask, send, send_mask
from picompile_codegen.cuda.ffn import ffn
from picompile_codegen.cuda.function import CudaKernel
from picompile_codegen.cuda.leading import leading_logits
from picompile_codegen.cuda.linear import linear
from picompile_codegen.cuda.norms import layer_norm, rms_norm
from picompile_codegen.cuda.predict_low_rank import predict_low_rank
from picompile_codegen.cuda.predict_signs import predict_signs
from picompile_codegen.cuda.rotary import rotary
from picompile_codegen.cuda.source import CudaSource, cuda_source

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
