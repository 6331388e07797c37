"""Kernels, and how one is written.

A kernel is a TIR function of nothing but tensors, all of static shape. What changes from step to step comes in `step`
(int32 [8]: tokens in this step, position of the first, slot of their sequence, number of the step). So the arguments of
a call never change, and equal kernels are shared by all the layers that need them: a kernel's name encodes every
parameter that it was built with.

A kernel's name and arguments are declared by its spec (`picompile_codegen.specs`); its body takes them by name:

    @body(NegateSpec)
    def negate(spec: NegateSpec, function: KernelFunction) -> None:
        x, y = function["x"], function["y"]
        with loop(0, spec.dim) as i:
            y[0, i] = -x[0, i]

`cpu.write_kernel(spec)` runs the body that is marked with the type of `spec` (`picompile_codegen.backend`).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from math import prod
from types import TracebackType
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from picompile_codegen.build.isa import DEFAULT_ISA, current
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs.arguments import (
    SCRATCH,
    STEP,
    Access,
    Declaration,
    KernelArgument,
    KernelSpec,
    MatrixArgument,
    symbol,
)

_STEP_TOKENS = 0
_STEP_POSITION = 1
_STEP_SLOT = 2
_STEP_NUMBER = 3
_MAX_ELEMENTS = 2**31 - 1


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
        """A hash of the function, the same for all that are written alike: sha256 of TVM's text with its metadata."""
        return sha256(self.prim_func.script(show_meta=True).encode()).hexdigest()

    @property
    def params(self) -> tuple[str, ...]:
        """Argument names in order."""
        return tuple(argument.name for argument in self.arguments)

    @property
    def scratch(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of each argument that the caller must allocate and nobody else reads."""
        return {argument.name: (argument.dtype, argument.shape) for argument in self.arguments if argument.scratch}

    @property
    def tickets(self) -> int:
        """Number of tickets: blocks of a GPU count each other with them, and all calls share them."""
        return sum(argument.shape[0] for argument in self.arguments if argument.access == "tickets")

    @property
    def launches(self) -> int:
        """Number of launches that a call takes."""
        return 1


@dataclass(frozen=True)
class Kernel(WrittenKernel):
    """One compiled function of an artifact, under the symbol `__tvm_ffi_<name>`.

    A packed matrix `w` is one argument `w.data` in f16 and two in other formats, `w.data` and `w.scale`: views of the
    same bytes, typed as the data and as the scales. `isa` names the instruction set that it was written for.
    """

    isa: str = DEFAULT_ISA


@dataclass(frozen=True)
class _Parameter:
    """An argument of the kernel that is being written. `number` is its place among TVM's parameters."""

    argument: KernelArgument
    tensor: KernelTensor
    number: int


class KernelFunction:
    """A kernel being written: a context whose body makes statements.

    It is made of a spec, whose arguments the body gets by name and adds scratch memory to; or of the parts of a name,
    and then the body declares all arguments.
    """

    def __init__(self, *parts: object) -> None:
        self._spec = parts[0] if parts and isinstance(parts[0], KernelSpec) else None
        self.name = symbol(*parts) if self._spec is None else self._spec.name
        self._parameters: list[_Parameter] = []
        self._scratch_at: int | None = None
        self._declared: dict[str, Declaration] = {}
        self._tensors: dict[str, KernelTensor] = {}
        self._bounds = {"tokens": 0, "positions": 0, "slots": 0}
        self._builder = IRBuilder()
        self._frame = T.prim_func()
        self._imports: list[Any] = []

    def __enter__(self) -> None:
        self._builder.__enter__()
        self._frame.__enter__()
        T.func_name(self.name)
        # "noalias" promises LLVM that no written tensor overlaps another argument.
        T.func_attr({"tirx.noalias": True, "global_symbol": self.name})
        self._add(STEP)
        for declaration in () if self._spec is None else self._spec.declare():
            self._declared[declaration.name] = declaration
            for part in declaration.parts:
                self._add(part)
            if declaration is SCRATCH:
                self._scratch_at = len(self._parameters)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for frame in reversed(self._imports):
            frame.__exit__(kind, error, trace)
        self._frame.__exit__(kind, error, trace)
        self._builder.__exit__(kind, error, trace)

    def __getitem__(self, name: str) -> KernelTensor:
        """The argument of that name."""
        return self._tensors[name]

    def get(self, name: str) -> KernelTensor | None:
        """Return the argument of that name, or None in a variant of the kernel that has none."""
        return self._tensors.get(name)

    def declared_matrix(self, name: str) -> MatrixArgument | None:
        """Return the packed matrix that the spec declares under that name, or None."""
        found = self._declared.get(name)
        return found if isinstance(found, MatrixArgument) else None

    def argument(
        self,
        name: str,
        dtype: str,
        *shape: int,
        access: Access = "in",
        below: int | None = None,
        copies: str | None = None,
    ) -> KernelTensor:
        """Declare the next argument of a kernel without a spec.

        An argument that is read first and then written becomes `out`; if its elements are bytes, it becomes a mask of
        zeros and ones.

        Raises:
            CodegenError: For more elements than TVM's 32-bit indices can count, or in the kernel of a spec.
        """
        if self._spec is not None:
            raise CodegenError(f"kernel {self.name}: {name} belongs into its spec")
        return self._add(KernelArgument(name, dtype, shape, access, below, copies))

    def floats(self, name: str, *shape: int) -> KernelTensor:
        """Declare the next argument of a kernel without a spec, of float32."""
        return self.argument(name, "float32", *shape)

    def scratch(self, name: str, dtype: str, *shape: int) -> KernelTensor:
        """Declare memory for the kernel's own use, of unknown contents.

        Raises:
            CodegenError: If the kernel's spec has no place for it.
        """
        return self._add_own(KernelArgument(name, dtype, shape, "scratch"))

    def _add_own(self, argument: KernelArgument) -> KernelTensor:
        """Declare memory that the spec does not declare, where it has a place for it."""
        if self._spec is None:
            return self._add(argument)
        if self._scratch_at is None:
            raise CodegenError(f"kernel {self.name}: its spec has no place for scratch memory")
        self._scratch_at += 1
        return self._add(argument, self._scratch_at - 1)

    def _add(self, argument: KernelArgument, place: int | None = None) -> KernelTensor:
        """Declare an argument, the last one or the one at `place`."""
        name, shape = argument.name, argument.shape
        if prod(shape) > _MAX_ELEMENTS:
            raise CodegenError(f"kernel {self.name}: {name} {list(shape)} has more than {_MAX_ELEMENTS} elements")
        symbol_of = name.replace(".", "_")
        # TVM compares each array that it is given with this shape, on the CPU.
        sizes = shape if argument.counted is None else (tirx.Var(f"{symbol_of}_rows", "int32"), *shape[1:])
        tensor = KernelTensor(T.arg(symbol_of, T.buffer(sizes, argument.dtype)))
        parameter = _Parameter(argument, tensor, len(self._parameters))
        self._parameters.insert(len(self._parameters) if place is None else place, parameter)
        self._tensors[name] = tensor
        return tensor

    def import_llvm(self, functions: str) -> None:
        """Make functions in LLVM's language known to the statements that follow, and inline them where they are called.

        All arguments and scratch memory must be declared by then.
        """
        frame = T.attr(tirx.IntImm("int32", 0), "pragma_import_llvm", functions)
        frame.__enter__()
        self._imports.append(frame)

    def tokens(self, rows: int) -> Expr:
        """Return how many of `rows` rows count in this step. With one row there is no choice, and nothing is read."""
        self._bounds["tokens"] = rows
        return 1 if rows == 1 else bind(self["step"][_STEP_TOKENS])

    def position(self, context: int) -> Expr:
        """The position of this step's first token. The kernel is made for positions below `context`."""
        self._bounds["positions"] = context
        return bind(self["step"][_STEP_POSITION])

    def slot(self, sequences: int) -> Expr:
        """The place in the caches of the sequence that this step is of, one of `sequences`."""
        self._bounds["slots"] = sequences
        return bind(self["step"][_STEP_SLOT])

    def step_number(self) -> Expr:
        """Which step this is: no two in a row have the same number."""
        return bind(self["step"][_STEP_NUMBER])

    def kernel(self) -> WrittenKernel:
        """Return the finished kernel, once its body has ended."""
        return Kernel(self.name, self.prim_func(), self.arguments(), **self._bounds, isa=current().name)

    def prim_func(self) -> Any:
        """Return the finished TIR function: its parameters are in the order of the arguments."""
        written = self._builder.get()
        numbers = [parameter.number for parameter in self._parameters]
        if numbers == sorted(numbers):
            return written
        params = [written.params[number] for number in numbers]
        return tirx.PrimFunc(params, written.body, written.ret_type, written.attrs)

    def arguments(self) -> tuple[KernelArgument, ...]:
        """Return the arguments of the finished kernel.

        Raises:
            CodegenError: If the body writes what the spec says it reads.
        """
        if self._spec is None:
            return tuple(_settled(parameter.argument, parameter.tensor) for parameter in self._parameters)
        for parameter in self._parameters:
            if parameter.tensor.is_written and parameter.argument.access == "in":
                raise CodegenError(f"kernel {self.name} writes {parameter.argument.name}, which its spec has it read")
        return tuple(parameter.argument for parameter in self._parameters)


def _settled(argument: KernelArgument, tensor: KernelTensor) -> KernelArgument:
    """Return `argument`, now that the body has shown whether it is written."""
    if not tensor.is_written or argument.access != "in":
        return argument
    return replace(argument, access="out", below=2 if argument.dtype == "uint8" else argument.below)
