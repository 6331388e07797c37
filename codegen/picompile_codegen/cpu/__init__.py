"""The bodies of kernels as TVM TIR for a CPU, and the registry that finds them by the type of a spec."""

from collections.abc import Callable, Mapping
from typing import Any

from picompile_codegen import specs
from picompile_codegen.cpu import attention, cache, ffn, linear, predict, sparse_linear, token_ops, transfer
from picompile_codegen.cpu.kernel import Kernel, KernelFunction
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs import KernelSpec, PackageSpec

__all__ = ["BODIES", "Kernel", "write_kernel"]

# body(spec, function): writes the statements of the kernel of `spec`.
BODIES: Mapping[type[KernelSpec], Callable[[Any, KernelFunction], None]] = {
    specs.AddSpec: token_ops.add,
    specs.AttentionSpec: attention.attention,
    specs.BorrowCacheSpec: transfer.borrow_cache,
    specs.CacheWriteSpec: cache.cache_write,
    specs.CopyWordsSpec: transfer.copy_words,
    specs.CountedFfnSpec: ffn.ffn,
    specs.DivideByRmsSpec: token_ops.divide_by_rms,
    specs.ElementwiseSpec: token_ops.elementwise,
    specs.EmbeddingSpec: token_ops.embedding,
    specs.FfnSpec: ffn.ffn,
    specs.JoinColumnsSpec: token_ops.join_columns,
    specs.LayerNormSpec: token_ops.layer_norm,
    specs.LendCacheSpec: transfer.lend_cache,
    specs.LinearSpec: linear.linear,
    specs.PredictLowRankSpec: predict.predict_low_rank,
    specs.PredictSignsSpec: predict.predict_signs,
    specs.ReceiveMaskSpec: transfer.receive_mask,
    specs.ReceiveSpec: transfer.receive,
    specs.RmsNormSpec: token_ops.rms_norm,
    specs.RotarySpec: token_ops.rotary,
    specs.SendMaskSpec: transfer.send_mask,
    specs.SendSpec: transfer.send,
    specs.SignalSpec: transfer.signal,
    specs.SparseLinearSpec: sparse_linear.sparse_linear,
    specs.TakeLastSpec: token_ops.take_last,
    specs.TopLogitsSpec: token_ops.top_logits,
    specs.UploadSpec: transfer.upload,
    specs.WaitSpec: transfer.wait,
}


def write_kernel(spec: KernelSpec) -> Kernel:
    """Return the kernel of `spec` for the current instruction set.

    Raises:
        CodegenError: For a spec that has no body for the CPU.
    """
    function = KernelFunction(spec)
    with function:
        if isinstance(spec, PackageSpec):
            spec.write(function)
        elif type(spec) in BODIES:
            BODIES[type(spec)](spec, function)
        else:
            raise CodegenError(f"there is no CPU kernel for {type(spec).__name__}")
    return function.kernel()
