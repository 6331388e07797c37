"""Objects of kernels: what TVM and LLVM make of one.

All that decides what comes out is in this file, whose text is part of the key by which objects are cached.
"""

import os
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.target import Target
from tvm.target.codegen import llvm_get_cpu_features, llvm_is_valid_cpu, llvm_version_major
from tvm.tirx import transform
from tvm.tirx.compilation_pipeline import finalize_device_passes, finalize_host_passes, register_tir_pipeline

from picompile_codegen.build.isa import Isa
from picompile_codegen.build.object_cache import cached_object, object_key
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.errors import BuildError

# TVM's pipeline `tirx` lowers kernels to LLVM's input here, without the passes that kernels do not need.
#
# `tirx` leaves local tensors on the stack, as cpu/tensor.py asks. TVM's default pipeline allocates larger ones by TVM's
# runtime, which an artifact does not have. The passes that are left out:
#
# - the first of two simplifications: the code is the same, byte by byte;
# - the elimination of common subexpressions, which LLVM does by itself; for large kernels it takes most of the time;
# - the passes for GPUs, bfloat16, 8-bit floats, 64-bit indices, and loops marked to be unrolled or vectorized.


PIPELINE = "picompile"

# Memory of the task that runs, for which no runtime is asked.
_ON_STACK = {"disable_lower_builtin": tirx.IntImm("bool", 1)}


def keep_on_stack(function: Any, *_: Any) -> Any:
    """Store each float and each vector that a kernel binds to a buffer of one element, on the stack.

        v: T.let[T.float32x8] = x[0:8]              v = T.alloc_buffer((1,), "float32x8")
        y[0:8] = v * v                       →      v[0] = x[0:8]
                                                    y[0:8] = v[0] * v[0]

    LLVM keeps both in a register. But TVM's simplifier, and its code generator with it, put what a variable is bound to
    in the place of the variable and simplify the whole again, so that a value is visited as often as there are ways to
    it: for a feed-forward block of q4 nine tenths of the compilation. Whole numbers stay variables: TVM derives from
    them which addresses are aligned.
    """
    buffers: dict[Any, Any] = {}

    def replace_bind(bind: Any) -> Any:
        dtype = str(bind.var.ty)
        if "x" not in dtype and not dtype.startswith(("float", "bfloat")):
            return bind
        buffer = buffers[bind.var] = tirx.decl_buffer((1,), dtype, bind.var.name)
        return tirx.SeqStmt([tirx.AllocBuffer(buffer, _ON_STACK), tirx.BufferStore(buffer, bind.value, [0])])

    def replace_use(var: Any, kind: Any) -> Any:
        buffer = buffers.get(var) if kind == tvm_ffi.DefRegionKind.NONE else None
        return var if buffer is None else tirx.BufferLoad(buffer, [0])

    def flatten(sequence: Any) -> Any:
        # Declarations end with their sequence, so those of a nested one move into the one around it.
        inner = (statement if isinstance(statement, tirx.SeqStmt) else [statement] for statement in sequence)
        return tirx.SeqStmt([statement for statements in inner for statement in statements])

    callbacks = ((tirx.Bind, replace_bind), (tirx.SeqStmt, flatten))
    body = tvm_ffi.structural_map(function.body, callbacks, with_def_region_kind=(tirx.Var, replace_use))
    return function.with_body(body)


def _lower(module: Any, _: Any) -> Any:
    passes = [
        transform.prim_func_pass(keep_on_stack, opt_level=0, name="picompile.KeepOnStack"),
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


def llvm_target(isa: Isa) -> Target:
    """Return TVM's target for `isa`.

    Raises `BuildError` if this LLVM does not know it: TVM would merely log that, and compile for a generic machine.
    """
    target = Target(isa.llvm)
    known = llvm_is_valid_cpu(isa.mcpu, isa.triple)
    lacking = {name.removeprefix("+") for name in isa.mattr} - set(map(str, llvm_get_cpu_features(target)))
    if not known or lacking:
        what = ", ".join(sorted(lacking)) if known else isa.mcpu
        raise BuildError(f"this TVM's LLVM cannot compile for {isa.name}: it does not know {what}")
    return target


def kernel_object(kernel: Kernel, isa: Isa, target: Target) -> bytes:
    """Return the object of `kernel`, from the cache where it was compiled before. Raises `BuildError` as TVM says."""

    def compile_kernel() -> bytes:
        try:
            module = tvm.IRModule({kernel.name: kernel.prim_func})
            return _object_of(tvm.compile(module, target=target, tir_pipeline=PIPELINE).mod)
        except Exception as error:  # TVM raises many types, none of them its own
            raise BuildError(f"TVM cannot compile the kernel {kernel.name}: {error}") from error

    return cached_object(object_key(kernel.digest, repr(isa.llvm), *_compiler()), compile_kernel)


def _object_of(module: Any) -> bytes:
    """Return the object file of a compiled module. It is made in memory: LLVM ends the process where a disk is full."""
    handle = os.memfd_create("object")
    try:
        module.write_to_file(f"/proc/self/fd/{handle}", "o")
        return os.pread(handle, os.fstat(handle).st_size, 0)
    finally:
        os.close(handle)


@cache
def _compiler() -> tuple[str, ...]:
    """Return what identifies the compiler of kernels: the versions of TVM and LLVM, and the text of this file."""
    pipeline = Path(__file__).read_text(encoding="utf-8")
    return version("apache-tvm"), str(llvm_version_major()), pipeline
