"""TVM's passes from kernels to what LLVM compiles: those of its pipeline `tirx`, without what kernels do not need.

Of TVM's pipelines `tirx` is the one that leaves local tensors on the stack, as cpu/tensor.py asks. The default one
makes larger ones allocations from TVM's runtime, which an artifact does not have. Left out are

- the first of two simplifications: the code is the same byte by byte;
- the search for common subexpressions, which LLVM does by itself; for large kernels it takes most of the time;
- what concerns GPUs, bfloat16, 8-bit floats, 64-bit indices, and loops that are marked to be unrolled or vectorized.

Together they are a third of the time and more.
"""

from typing import Any

import tvm
from tvm.tirx import transform
from tvm.tirx.compilation_pipeline import finalize_device_passes, finalize_host_passes, register_tir_pipeline

PIPELINE = "picompile"


def _lower(module: Any, _: Any) -> Any:
    passes = [
        transform.LowerTIRx(),
        transform.LowerTIRxOpaque(),
        transform.FlattenBuffer(),
        transform.StmtSimplify(),
        transform.AnnotateEntryFunc(),
        transform.SplitHostDevice(),
        transform.MakePackedAPI(),
    ]
    return tvm.transform.Sequential(passes)(module)


def _pipeline() -> tuple[Any, Any, Any]:
    return tvm.transform.module_pass(_lower, opt_level=0), finalize_host_passes, finalize_device_passes


# TVM takes pipelines by name only.
register_tir_pipeline(PIPELINE, _pipeline)
