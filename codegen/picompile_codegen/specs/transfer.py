"""Transfers between host and accelerator: kernels that send and receive, and the flags between the sides.

Transferred data are in memory that both sides see. The accelerator calls `send`, `send_mask`, `receive` and
`receive_mask`. The host calls `wait` before it reads data that were sent, and `signal` when the accelerator may receive
its data. A flag holds the number of the last step, step[3], in which it was set. `abandoned` is not 0 once either side
has failed; then neither side waits any longer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from picompile_codegen.specs.arguments import (
    Declaration,
    KernelArgument,
    KernelSpec,
    count_up_to,
    counted,
    flag,
    floats,
    floats_out,
    indices,
    mask,
)


@dataclass(frozen=True)
class SendSpec(KernelSpec):
    """out = x, then the flag is set. x float32 [rows, dim] → out [rows, dim], shared."""

    named = "send_{dim}_r{rows}"
    op = "send"

    dim: int
    rows: int

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.dim)
        yield floats_out("out", self.rows, self.dim)
        yield flag("sets")


@dataclass(frozen=True)
class SendMaskSpec(KernelSpec):
    """out = x and out_mask[t, i] = mask[t, table[i]], then the flag is set; `count` is how many ones out_mask has.

    x float32 [rows, dim], mask uint8 [rows, neurons], table int32 [columns] → out like x and out_mask uint8 [rows,
    columns], both shared; count int32 [1].
    """

    named = "send_mask_{neurons}to{columns}x{dim}_r{rows}"
    op = "send"

    dim: int
    neurons: int
    columns: int
    rows: int

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield floats("x", self.rows, self.dim)
        yield mask("mask", self.rows, self.neurons)
        yield indices("table", self.columns, self.neurons)
        yield floats_out("out", self.rows, self.dim)
        yield mask("out_mask", self.rows, self.columns, "out")
        yield KernelArgument("count", "int32", (1,), "out")
        yield flag("sets")


@dataclass(frozen=True)
class CountedSendMaskSpec(SendMaskSpec):
    """A `SendMaskSpec` for `columns` columns or fewer: `columns` int32 [1] says how many there are.

    out_mask is uint8 [rows · columns] without gaps. With `in_words` the columns are a multiple of four. Only a GPU has
    it.
    """

    named = "counted_send_mask_{neurons}to{columns}x{dim}_r{rows}_{in_words:words}"

    in_words: bool = False

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        for declaration in super().declare():
            if declaration.name == "table":
                yield count_up_to(self.columns, "columns")
                yield counted(declaration, "columns")
            elif declaration.name == "out_mask":
                flat = KernelArgument("out_mask", "uint8", (self.rows * self.columns,), "out", below=2)
                yield counted(flat, "columns")
            else:
                yield declaration


@dataclass(frozen=True)
class ReceiveSpec(KernelSpec):
    """y = source, once the flag is set. source float32 [rows, dim], shared → y [rows, dim].

    With `counted`, count int32 [1] says how much the host had to do; for nothing y is 0, and nobody waits.
    """

    named = "receive_{dim}_r{rows}_{counted:counted}"
    op = "receive"

    dim: int
    rows: int
    counted: bool

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield from received(self.rows, self.dim, counted=self.counted)
        yield floats_out("y", self.rows, self.dim)


def received(rows: int, dim: int, *, counted: bool) -> Iterator[KernelArgument]:
    """Yield arguments of a kernel that receives float32 [rows, dim]: `source`, its flag and, if `counted`, `count`."""
    yield floats("source", rows, dim)
    yield flag("awaits")
    yield flag("abandons", "abandoned")
    if counted:
        yield KernelArgument("count", "int32", (1,))


@dataclass(frozen=True)
class ReceiveMaskSpec(KernelSpec):
    """y = source, once the flag is set. source uint8 [rows, neurons], shared → y [rows, neurons]."""

    named = "receive_mask_{neurons}_r{rows}"
    op = "receive"

    neurons: int
    rows: int

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield mask("source", self.rows, self.neurons)
        yield flag("awaits")
        yield flag("abandons", "abandoned")
        yield mask("y", self.rows, self.neurons, "out")


@dataclass(frozen=True)
class UploadSpec(KernelSpec):
    """y = source, weights on their way to the accelerator. source uint8 [size], of the host → y uint8 [size].

    A GPU has no kernel for it: its copy engine moves the bytes, while kernels run that do not use `y`.
    """

    named = "upload_{size}"
    op = "upload"

    size: int

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield KernelArgument("source", "uint8", (self.size,))
        yield KernelArgument("y", "uint8", (self.size,), "out")


@dataclass(frozen=True)
class CopyWordsSpec(KernelSpec):
    """y = source, int32 [words]: the variables of a step, from shared memory to the accelerator's."""

    named = "copy_words_{words}"
    op = "inputs"

    words: int

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield KernelArgument("source", "int32", (self.words,))
        yield KernelArgument("y", "int32", (self.words,), "out", copies="source")


@dataclass(frozen=True)
class WaitSpec(KernelSpec):
    """Return when the flag is set: the host's turn. Only the host has this kernel."""

    named = "wait"
    op = "wait"

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield flag("awaits")
        yield flag("abandons", "abandoned")


@dataclass(frozen=True)
class SignalSpec(KernelSpec):
    """Set the flag: the accelerator may go on. Only the host has this kernel."""

    named = "signal"
    op = "signal"

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield flag("sets")


@dataclass(frozen=True)
class PingPongSpec(KernelSpec):
    """Answer the host step[0] times: it measures a round trip, and that each side sees what the other writes.

    ping, pong and abandoned are flags; sent int32 [1024] → echoed int32 [1024], 32 words a round; all are shared. Only
    a GPU has this kernel: the other side is `pi_ping_pong` of native/host.c, which says more.
    """

    named = "ping_pong"

    def declare(self) -> Iterator[Declaration]:
        """Yield the arguments in order."""
        yield flag("awaits", "ping")
        yield flag("sets", "pong")
        yield flag("abandons", "abandoned")
        yield KernelArgument("sent", "int32", (1024,))
        yield KernelArgument("echoed", "int32", (1024,), "out")
