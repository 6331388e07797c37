"""What a kernel is, and how one is written.

A kernel is a TIR function of nothing but tensors, all of static shape. What changes from step to step comes in `step`
(int32 [8]: tokens in this step, position of the first, slot of their sequence, number of the step). So the arguments of
a call never change, and equal kernels are shared by all the layers that need them: a kernel's name encodes every
parameter that it was built with.

    function = KernelFunction("negate", dim)
    with function:
        function.step()
        x, y = function.floats("x", 1, dim), function.floats("y", 1, dim)
        with loop(0, dim) as i:
            y[0, i] = -x[0, i]
    return function.kernel()
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from math import prod
from types import TracebackType
from typing import Any, Literal

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from picompile_codegen.build.isa import DEFAULT_ISA, current
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind
from picompile_codegen.errors import CodegenError

STEP_SHAPE = (8,)
# What a kernel does with an argument: it reads `in`, fills `out` and uses `scratch`, adds to the counters of `adds`,
# reads and writes the KV `cache`, `sets` a flag, `awaits` one, and says in `abandons` that it gave up.
Access = Literal["in", "out", "scratch", "adds", "cache", "sets", "awaits", "abandons"]
_STEP_TOKENS = 0
_STEP_POSITION = 1
_STEP_SLOT = 2
_STEP_NUMBER = 3
_MAX_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class KernelArgument:
    """One argument: `name`, `dtype` and static `shape`, what the kernel does with it, and what may be in it.

    Integers that the kernel takes for indices must be less than `below`, and not negative; those that it writes are.
    `copies` names the argument of which this one becomes a copy.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    access: Access = "in"
    below: int | None = None
    copies: str | None = None

    @property
    def scratch(self) -> bool:
        """Whether it is memory for the kernel's own use during a call."""
        return self.access == "scratch"


@dataclass(frozen=True)
class WrittenKernel:
    """A kernel of any device: a TIR function, its arguments, and the largest steps that it is made for.

    `tokens` is how many rows it takes at most where it has rows, `positions` and `slots` how many there may be where it
    reads them from the step; 0 where it does not.
    """

    name: str
    prim_func: Any
    arguments: tuple[KernelArgument, ...]
    tokens: int = 0
    positions: int = 0
    slots: int = 0

    @cached_property
    def digest(self) -> str:
        """A hash of the function, the same for all that are written alike: the sha256 of TVM's text."""
        return sha256(self.prim_func.script().encode()).hexdigest()

    @property
    def params(self) -> tuple[str, ...]:
        """Argument names in order."""
        return tuple(argument.name for argument in self.arguments)

    @property
    def scratch(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of each argument that the caller must allocate and nobody else reads."""
        return {argument.name: (argument.dtype, argument.shape) for argument in self.arguments if argument.scratch}


@dataclass(frozen=True)
class Kernel(WrittenKernel):
    """One compiled function of an artifact, under the symbol `__tvm_ffi_<name>`.

    A packed matrix `w` is one argument `w.data` in f16 and two, `w.data` and `w.scale`, in q8 and q4: views of the same
    bytes, typed as the data and as the scales. `isa` names the instruction set that it was written for.
    """

    isa: str = DEFAULT_ISA


def symbol(*parts: object) -> str:
    """A C identifier that tells `parts` apart: `symbol("norm", 64, 1e-05)` is `norm_64_1em05`."""
    text = "_".join(str(part) for part in parts if part != "")
    return re.sub(r"[^0-9A-Za-z_]", "", text.replace(".", "p").replace("-", "m"))


class KernelFunction:
    """A kernel being written: a context whose body declares arguments, in order, and makes statements."""

    def __init__(self, *parts: object) -> None:
        self.name = symbol(*parts)
        self._arguments: list[tuple[KernelArgument, KernelTensor]] = []
        self._bounds = {"tokens": 0, "positions": 0, "slots": 0}
        self._builder = IRBuilder()
        self._frame = T.prim_func()
        self._step: KernelTensor | None = None

    def __enter__(self) -> None:
        self._builder.__enter__()
        self._frame.__enter__()
        T.func_name(self.name)
        # "noalias" promises LLVM that no written tensor overlaps another argument.
        T.func_attr({"tirx.noalias": True, "global_symbol": self.name})
        self._step = self.argument("step", "int32", *STEP_SHAPE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._frame.__exit__(kind, error, trace)
        self._builder.__exit__(kind, error, trace)

    def argument(
        self,
        name: str,
        dtype: str,
        *shape: int,
        access: Access = "in",
        below: int | None = None,
        copies: str | None = None,
    ) -> KernelTensor:
        """Declare the next argument.

        An argument that is read first and then written becomes `out`; if its elements are bytes, it becomes a mask of
        zeros and ones.

        Raises `CodegenError` for more elements than TVM's 32-bit indices can count.
        """
        if prod(shape) > _MAX_ELEMENTS:
            raise CodegenError(f"kernel {self.name}: {name} {list(shape)} has more than {_MAX_ELEMENTS} elements")
        tensor = KernelTensor(T.arg(name.replace(".", "_"), T.buffer(shape, dtype)))
        self._arguments.append((KernelArgument(name, dtype, shape, access, below, copies), tensor))
        return tensor

    def floats(self, name: str, *shape: int) -> KernelTensor:
        """Declares a float32 argument."""
        return self.argument(name, "float32", *shape)

    def optional_floats(self, name: str, size: int, present: bool) -> KernelTensor | None:
        """Declares a float32 vector that only some variants of a kernel have, a bias for instance."""
        return self.floats(name, size) if present else None

    def scratch(self, name: str, dtype: str, *shape: int) -> KernelTensor:
        """Declares memory for the kernel's own use, of unknown contents."""
        return self.argument(name, dtype, *shape, access="scratch")

    def tokens(self, rows: int) -> Expr:
        """How many of `rows` rows count in this step. With one row there is no choice, and nothing is read."""
        self._bounds["tokens"] = rows
        return 1 if rows == 1 else bind(self._read_step(_STEP_TOKENS))

    def position(self, context: int) -> Expr:
        """The position of this step's first token. The kernel is made for positions below `context`."""
        self._bounds["positions"] = context
        return bind(self._read_step(_STEP_POSITION))

    def slot(self, sequences: int) -> Expr:
        """The place in the caches of the sequence that this step is of, one of `sequences`."""
        self._bounds["slots"] = sequences
        return bind(self._read_step(_STEP_SLOT))

    def step_number(self) -> Expr:
        """Which step this is: no two in a row have the same number."""
        return bind(self._read_step(_STEP_NUMBER))

    def _read_step(self, index: int) -> Expr:
        if self._step is None:
            raise CodegenError(f"kernel {self.name} is not being written")
        return self._step[index]

    def kernel(self) -> Kernel:
        """The finished kernel, once its body has ended."""
        return Kernel(self.name, self._builder.get(), self.arguments(), **self._bounds, isa=current().name)

    def arguments(self) -> tuple[KernelArgument, ...]:
        """The arguments of the finished kernel."""
        return tuple(_settled(argument, tensor) for argument, tensor in self._arguments)


def _settled(argument: KernelArgument, tensor: KernelTensor) -> KernelArgument:
    """`argument`, now that the body has shown whether it is written."""
    if not tensor.is_written or argument.access != "in":
        return argument
    return replace(argument, access="out", below=2 if argument.dtype == "uint8" else argument.below)
