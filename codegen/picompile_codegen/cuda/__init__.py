"""The bodies of kernels for NVIDIA GPUs, TVM TIR to CUDA C, and the registry that finds them by the type of a spec."""

from collections.abc import Callable, Mapping
from typing import Any

from picompile_codegen import specs
from picompile_codegen.cuda import attention, ffn, linear, predict, sparse_linear, sums, token_ops, top_logits, transfer
from picompile_codegen.cuda.build import CudaSource, cuda_source
from picompile_codegen.cuda.function import CudaFunction, CudaKernel
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs import KernelSpec

__all__ = ["BODIES", "CudaKernel", "CudaSource", "cuda_source", "write_kernel"]

# body(spec, function): writes the launches of the kernel of `spec`.
BODIES: Mapping[type[KernelSpec], Callable[[Any, CudaFunction], None]] = {
    specs.AddSpec: token_ops.add,
    specs.AttentionSpec: attention.attention,
    specs.BorrowCacheSpec: transfer.borrow_cache,
    specs.CacheWriteSpec: token_ops.cache_write,
    specs.CopyWordsSpec: transfer.copy_words,
    specs.CountedFfnSpec: ffn.ffn,
    specs.CountedSendMaskSpec: transfer.send_mask,
    specs.DivideByRmsSpec: token_ops.divide_by_rms,
    specs.ElementwiseSpec: token_ops.elementwise,
    specs.EmbeddingSpec: token_ops.embedding,
    specs.FfnSpec: ffn.ffn,
    specs.JoinColumnsSpec: token_ops.join_columns,
    specs.LayerNormSpec: token_ops.norm,
    specs.LinearAddSpec: linear.linear_add,
    specs.LinearSpec: linear.linear,
    specs.PingPongSpec: transfer.ping_pong,
    specs.PredictLowRankSpec: predict.predict_low_rank,
    specs.PredictSignsSpec: predict.predict_signs,
    specs.ReceiveMaskSpec: transfer.receive_mask,
    specs.ReceiveSpec: transfer.receive,
    specs.RmsNormSpec: token_ops.norm,
    specs.RotarySpec: token_ops.rotary,
    specs.SendMaskSpec: transfer.send_mask,
    specs.SendSpec: transfer.send,
    specs.SparseLinearSpec: sparse_linear.sparse_linear,
    specs.SumNormSpec: sums.sum_norm,
    specs.TakeLastSpec: token_ops.take_last,
    specs.TopLogitsSpec: top_logits.top_logits,
    specs.UploadSpec: transfer.upload,
}


def write_kernel(spec: KernelSpec) -> CudaKernel:
    """Return the CUDA kernel of `spec`.

    Raises:
        CodegenError: For a spec that has no body for GPUs.
    """
    body = BODIES.get(type(spec))
    if body is None:
        raise CodegenError(f"there is no GPU kernel for {type(spec).__name__}")
    function = CudaFunction(spec)
    with function:
        body(spec, function)
    return function.cuda_kernel()
