"""CUDA kernels, and the interface that their bodies are written with.

A kernel takes the arguments of its spec, as the CPU's does, and scratch memory of its own; it is one or several
launches that run one after the other. All sizes are fixed when it is written, grids too: whatever changes from step to
step is in `step`, and blocks without work end at once. So a list of launches never changes, and is captured into a
graph once.

    @body(NegateSpec)
    def negate(spec: NegateSpec, function: CudaFunction) -> None:
        x, y = function["x"], function["y"]
        with function.launch(grid=blocks_for(spec.dim, 256), block=256) as place:
            i = bind(place.block * 256 + place.thread)
            with when(i < spec.dim):
                y[0, i] = -x[0, i]
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from picompile_codegen.cpu.kernel import KernelFunction, WrittenKernel
from picompile_codegen.cpu.tensor import Expr, KernelTensor
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs.arguments import KernelArgument

WARP = 32
_MOST_THREADS = 1024
_MOST_BLOCKS_Y = 65535


@dataclass(frozen=True)
class Grid:
    """The grid of a launch: its blocks, numbered in up to two dimensions, and the threads of a block.

    `resident` blocks at least shall fit a multiprocessor together: a number, or a constant of prelude.cuh where it
    depends on the architecture. 0 leaves that to the compiler, which may prefer more of them to keeping everything in
    registers.
    """

    x: int
    y: int
    threads: int
    resident: int | str = 0


@dataclass(frozen=True)
class ThreadIndex:
    """The place of a thread: its block's numbers and its own."""

    block: Expr
    block_y: Expr
    thread: Expr

    @property
    def lane(self) -> Expr:
        """The thread's number in its warp."""
        return self.thread % WARP

    @property
    def warp(self) -> Expr:
        """The number of the thread's warp in its block."""
        return self.thread // WARP


@dataclass(frozen=True)
class CudaKernel(WrittenKernel):
    """One kernel: a TIR function with as many launches as `grids`, in order.

    Or none, where the copy engine does all: then `copied` has the names of the argument that it copies and of the one
    to which it does.
    """

    grids: tuple[Grid, ...] = ()
    copied: tuple[str, str] | None = None

    @property
    def launches(self) -> int:
        """Number of launches that a call takes: none where the copy engine does all."""
        return len(self.grids)


class CudaFunction(KernelFunction):
    """A CUDA kernel being written: arguments are declared as for the CPU, statements belong to a launch."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)
        self._grids: list[Grid] = []
        self._copied: tuple[str, str] | None = None

    @contextmanager
    def launch(self, *, grid: int | tuple[int, int], block: int, resident: int | str = 0) -> Iterator[ThreadIndex]:
        """Write a launch of `grid` blocks of `block` threads, which are whole warps; the body is the program of a
        thread.

        `resident` as in `Grid`.

        Raises `CodegenError` for more than a GPU has.
        """
        x, y = (grid, 1) if isinstance(grid, int) else grid
        if block % WARP or not WARP <= block <= _MOST_THREADS or not 1 <= y <= _MOST_BLOCKS_Y or x < 1:
            raise CodegenError(f"kernel {self.name}: {x} x {y} blocks of {block} threads cannot be launched")
        self._grids.append(Grid(x, y, block, resident))
        axes = [("blockIdx.x", x), ("blockIdx.y", y), ("threadIdx.x", block)]
        with ExitStack() as stack:
            threads = [T.env_thread(axis) for axis, _ in axes]
            for thread, (_, extent) in zip(threads, axes, strict=True):
                stack.enter_context(T.launch_thread(thread, extent))
            yield ThreadIndex(*threads)

    def tickets(self, count: int) -> KernelTensor:
        """Declare int32 [count] that holds zeros before and after each launch, for `memory.last_block`.

        Launches run one after the other, so all calls of a program share this memory.
        """
        return self._add_own(KernelArgument("tickets", "int32", (count,), "tickets"))

    def copy(self, source: str, target: str) -> None:
        """Let the copy engine copy argument `source` to argument `target`, in the place of all launches."""
        self._copied = source, target

    def kernel(self) -> CudaKernel:
        """Return the finished kernel, once its body has ended."""
        return CudaKernel(
            self.name, self.prim_func(), self.arguments(), **self._bounds, grids=tuple(self._grids), copied=self._copied
        )


def blocks_for(count: int, each: int) -> int:
    """Return how many blocks `count` items take, `each` a block."""
    return -(-count // each)
