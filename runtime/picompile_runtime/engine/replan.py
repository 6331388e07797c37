"""A program for less of a GPU's memory than was planned: the host computes hot neurons that the GPU cannot hold.

Weights that stay with the host are read by the GPU over the bus, which is slow for those of every token. The host's
kernels take the number of their neurons as an argument. So where tokens are decoded, a layer's hot neurons become cold
ones: the host computes them together with those that it has, and the GPU sends it the whole mask. Prompts are computed
as before; the GPU then reads these weights over the bus, once for a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.call_order import Interfaces
from picompile_runtime.artifact.interfaces import KernelInterface, KernelParameter
from picompile_runtime.artifact.program import (
    ONE_TOKEN_EACH,
    STATS_ROW_BYTES,
    Argument,
    Call,
    FeedForward,
    Program,
)
from picompile_runtime.devices.memory import ALIGNMENT, Tensor, aligned_zeros
from picompile_runtime.engine.layout import accelerator_need, moved_weights, packed_bytes, weights_of

Piece = Argument | bytes
"""A part of a weight that is made: a view of a weight of the file, or its content."""

# Names of weights that no file has begin with this.
_PREFIX = "replan."
# A block has these for each of its neurons, where it has them at all.
_OF_NEURONS = ("gate_bias", "up_bias", "gate_limits", "output_limits")
_BUNDLE = "neuron_w."


@dataclass(frozen=True)
class LoadedProgram:
    """A program as it is loaded.

    Attributes:
        program: the program.
        tensors: its weights by name, with those that the artifact's file does not have.
        made: of these the small ones, each as pieces that follow one another without gaps.
        joined: of these the large ones, each as the names of weights that lie one behind the other with the host.
        computed_bytes: the size of the weights that were planned for the GPU and whose neurons the host computes.
    """

    program: Program
    tensors: Mapping[str, Tensor]
    made: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    computed_bytes: int = 0

    def contents(self, weight: Callable[[Argument], NDArray[Any]]) -> dict[str, NDArray[np.uint8]]:
        """Return the bytes of each weight in `made`; `weight` returns what the file has of a weight."""
        found = {}
        for name, pieces in self.made.items():
            parts = [each if isinstance(each, bytes) else weight(each).tobytes() for each in pieces]
            found[name] = aligned_zeros((self.tensors[name].size_bytes,), np.uint8)
            found[name][:] = np.frombuffer(b"".join(parts), np.uint8)
        return found

    def loading_order(self, names: Iterable[str]) -> list[str]:
        """Return those of the weights `names` that are in the file, weights that are to be joined one after another."""
        parts = [part for parts in self.joined.values() for part in parts]
        return [name for name in dict.fromkeys([*parts, *names]) if name not in self.made and name not in self.joined]


def split_anew(
    program: Program,
    moved: Program,
    tensors: Mapping[str, Tensor],
    kernels: Interfaces,
    free_bytes: int,
    graph_bytes: int = 0,
) -> LoadedProgram:
    """Return a version of `program` that fits the accelerator's memory, in which the host computes what it can.

    Args:
        program: the program as it was planned, which does not fit.
        moved: the version of it that `fit_accelerator` has made.
        tensors: the weights.
        kernels: the kernels of host and accelerator.
        free_bytes: free memory of the accelerator.
        graph_bytes: memory that the driver keeps for graphs.

    Returns:
        The program, or `moved` where the host can compute nothing of what does not fit.
    """
    kept = LoadedProgram(moved, tensors)
    if any(name.startswith(_PREFIX) for name in tensors):
        return kept
    lacking = accelerator_need(program, tensors, graph_bytes).total - free_bytes
    before = frozenset[str]()
    while (names := moved_weights(program, tensors, lacking)) > before:
        found = compute_on_host(program, tensors, kernels, names)
        excess = accelerator_need(found.program, found.tensors, graph_bytes).total - free_bytes
        if excess <= 0:
            return found if found.joined else kept
        # What the accelerator needs for this takes memory as well.
        before, lacking = names, max(lacking + excess, packed_bytes(tensors[name] for name in names) + 1)
    return kept


def compute_on_host(
    program: Program, tensors: Mapping[str, Tensor], kernels: Interfaces, names: frozenset[str]
) -> LoadedProgram:
    """Return `program` with the weights `names` left with the host, which computes hot neurons that are among them.

    A layer whose kernels cannot do that is computed as before, with weights that the accelerator reads over the bus.
    """
    rewriter = _Rewriter(program, tensors, kernels)
    for layer in sorted({part.layer for part in program.ffn}):
        rewriter.move(layer, names)
    new = replace(
        program,
        functions=rewriter.functions,
        ffn=tuple(rewriter.ffn),
        streamed=program.streamed | names,
    )
    used = set(weights_of(new, "device"))
    return LoadedProgram(
        replace(new, streamed=new.streamed & used),
        {**tensors, **rewriter.made_tensors},
        rewriter.made,
        rewriter.joined,
        sum(tensors[parts[-1]].size_bytes for parts in rewriter.joined.values()),
    )


@dataclass(frozen=True)
class _Given:
    """A call, and its arguments by the names of its kernel's parameters."""

    call: Call
    interface: KernelInterface
    args: Mapping[str, Argument]

    def parameter(self, name: str) -> KernelParameter:
        return next(each for each in self.interface.parameters if each.name == name)

    def most(self, name: str) -> int:
        """Return the largest number that the kernel takes for the parameter `name`."""
        return (self.parameter(name).below or 1) - 1

    def with_args(self, changed: Mapping[str, Argument], weight_bytes: int) -> Call:
        """Return the call with other arguments for some parameters."""
        args = tuple(changed.get(name, argument) for name, argument in self.args.items())
        return replace(self.call, args=args, weight_bytes=weight_bytes)


@dataclass(frozen=True)
class _SplitBlock:
    """The calls of a split block in one function: both parts, and the one that sends the host its part of the mask."""

    hot: _Given
    cold: _Given
    send: _Given

    @property
    def neurons(self) -> int:
        """Number of neurons of both parts."""
        return self.send.args["mask"].view.shape[-1]

    @property
    def bundles(self) -> tuple[str, str]:
        """Names of the weights with the matrices of the cold and of the hot part."""
        return self.cold.args[f"{_BUNDLE}data"].name, self.hot.args[f"{_BUNDLE}data"].name

    @property
    def parts(self) -> list[str]:
        """Parameters of the kernels of both parts that have something for each neuron, but for matrices."""
        return [name for name in _OF_NEURONS if name in self.cold.args]

    @property
    def matrices(self) -> list[str]:
        """Parameters of the kernels of both parts that are views of the matrices."""
        return [name for name in self.cold.args if name.startswith(_BUNDLE)]


class _Rewriter:
    """Changes the calls of a program, layer by layer."""

    def __init__(self, program: Program, tensors: Mapping[str, Tensor], kernels: Interfaces) -> None:
        self._program, self._tensors, self._kernels = program, tensors, kernels
        self.functions = dict(program.functions)
        self.ffn: list[FeedForward] = list(program.ffn)
        self.made: dict[str, tuple[Piece, ...]] = {}
        self.joined: dict[str, tuple[str, ...]] = {}
        self.made_tensors: dict[str, Tensor] = {}

    def move(self, layer: int, names: frozenset[str]) -> None:
        """Let the host compute all neurons of a layer whose hot matrices are among `names`, if its kernels can."""
        functions = [name for name in ONE_TOKEN_EACH if name in self._program.functions]
        blocks = [self._block(function, layer) for function in functions]
        found = [block for block in blocks if block is not None and self._can_move(block)]
        # Counts of both functions are those of the same parts.
        if len(found) < len(functions) or len({block.bundles for block in found}) > 1:
            return
        if found[0].bundles[1] not in names or not self._readers_allow(functions, found):
            return
        for function, block in zip(functions, found, strict=True):
            self._rewrite(function, block, layer)
        self._count_together(found[0])

    def _block(self, function: str, layer: int) -> _SplitBlock | None:
        """Return the calls of a layer's block, None unless it is split and its mask is sent to the host."""
        blocks = [call for call in self._program.functions[function] if call.op == "ffn" and call.layer == layer]
        hot, cold = ([call for call in blocks if call.device == device] for device in ("device", "host"))
        if len(hot) != 1 or len(cold) != 1:
            return None
        first, second = self._given(hot[0]), self._given(cold[0])
        if first is None or second is None or not {"mask", "table"} <= set(first.args):
            return None
        if "table" in second.args or not {"mask", "count"} <= set(second.args):
            return None
        for call in self._program.calls(function, "device"):
            send = self._given(call) if call.op == "send" else None
            if send is not None and "columns" in send.args and _is_of(send.args["out_mask"], second.args["mask"]):
                is_whole = _is_of(send.args["mask"], first.args["mask"])
                return _SplitBlock(first, second, send) if is_whole else None
        return None

    def _given(self, call: Call) -> _Given | None:
        interface = self._kernels[call.device].get(call.kernel)
        if interface is None or len(interface.parameters) != len(call.args):
            return None
        names = [parameter.name for parameter in interface.parameters]
        return _Given(call, interface, dict(zip(names, call.args, strict=True)))

    def _can_move(self, block: _SplitBlock) -> bool:
        """Return whether the kernels, and what they write, are for all neurons of the block."""
        hot, cold, send = block.hot, block.cold, block.send
        has_both = set(block.parts) == {name for name in _OF_NEURONS if name in hot.args}
        tables = send.args["table"].view.shape[0], hot.args["table"].view.shape[0]
        is_complete = sum(tables) == block.neurons
        has_kernels = min(send.most("columns"), cold.most("count")) >= block.neurons
        sent = send.args["out_mask"]
        sent_bytes = block.hot.args["y"].view.shape[0] * block.neurons
        has_room = sent.view.offset + sent_bytes <= self._program.buffers[sent.name].size_bytes
        return has_both and is_complete and has_kernels and has_room and self._can_join(block)

    def _can_join(self, block: _SplitBlock) -> bool:
        """Return whether the matrices of both parts are one matrix when they lie one behind the other."""
        if [name for name in block.hot.args if name.startswith(_BUNDLE)] != block.matrices:
            return False
        if any(block.cold.parameter(name).below is not None for name in block.matrices):
            return False
        first, second = (self._tensors[name] for name in block.bundles)
        for given, tensor in ((block.cold, first), (block.hot, second)):
            views = [given.args[name].view for name in block.matrices]
            if any(view.offset or view.size_bytes != tensor.size_bytes for view in views):
                return False
        alike = (first.dtype, first.shape[1:]) == (second.dtype, second.shape[1:])
        return alike and first.size_bytes % ALIGNMENT == 0

    def _readers_allow(self, functions: Sequence[str], blocks: Sequence[_SplitBlock]) -> bool:
        """Return whether all other calls only read what the hot parts make, and whether it is known without them."""
        for function, block in zip(functions, blocks, strict=True):
            y, bias = block.hot.args["y"], block.hot.args.get("down_bias")
            if y.kind != "buffer" or (bias is not None and bias.view.shape != y.view.shape[1:]):
                return False
            for call in self.functions[function]:
                given = self._given(call)
                if call is block.hot.call or not any(_is_of(argument, y) for argument in call.args):
                    continue
                if given is None or any(
                    _is_of(argument, y) and given.parameter(name).access != "in"
                    for name, argument in given.args.items()
                ):
                    return False
        return True

    def _rewrite(self, function: str, block: _SplitBlock, layer: int) -> None:
        """Leave out the call of the hot part, whose neurons the host computes behind its own."""
        hot, cold, send, neurons = block.hot, block.cold, block.send, block.neurons
        y = hot.args["y"]
        absent = self._absent(y, hot.args.get("down_bias"), layer)
        count = self._number(neurons)
        table = self._join(f"{layer}.table", send.args["table"], hot.args["table"])
        flat = replace(cold.args["mask"].view, shape=(y.view.shape[0] * neurons,))
        of_send = {
            "columns": count,
            "table": table,
            "out_mask": replace(send.args["out_mask"], view=replace(send.args["out_mask"].view, shape=flat.shape)),
        }
        of_cold = {"count": count, "mask": replace(cold.args["mask"], view=flat)} | self._bundle(block, layer)
        for name in block.parts:
            of_cold[name] = self._join(f"{layer}.{name}", cold.args[name], hot.args[name])
        changed = {
            id(send.call): send.with_args(of_send, send.call.weight_bytes),
            id(cold.call): cold.with_args(of_cold, cold.call.weight_bytes + hot.call.weight_bytes),
        }
        calls = (
            changed.get(id(call)) or _reading(call, y, absent)
            for call in self.functions[function]
            if call is not hot.call
        )
        self.functions[function] = tuple(calls)

    def _bundle(self, block: _SplitBlock, layer: int) -> dict[str, Argument]:
        """Return the views of the matrices of both parts."""
        name, (first, second) = f"{_PREFIX}{layer}.neurons", (self._tensors[each] for each in block.bundles)
        self.joined[name] = block.bundles
        self.made_tensors[name] = Tensor(first.dtype, (first.shape[0] + second.shape[0], *first.shape[1:]))
        found = {}
        for parameter in block.matrices:
            one, other = block.cold.args[parameter].view, block.hot.args[parameter].view
            found[parameter] = Argument(
                "weight", name, Tensor(one.dtype, (one.shape[0] + other.shape[0], *one.shape[1:]))
            )
        return found

    def _absent(self, y: Argument, bias: Argument | None, layer: int) -> Argument:
        """Return what the hot part makes of no neurons: zeros, or the bias in each row."""
        if bias is not None:
            return self._make(f"{layer}.bias.{y.view.shape[0]}", y.view, (bias,) * y.view.shape[0])
        shape = "x".join(map(str, y.view.shape))
        return self._make(f"zeros.{shape}", y.view, (bytes(y.view.size_bytes),))

    def _number(self, count: int) -> Argument:
        return self._make(f"count.{count}", Tensor("int32", (1,)), (np.int32(count).tobytes(),))

    def _join(self, name: str, one: Argument, other: Argument) -> Argument:
        shape = (one.view.shape[0] + other.view.shape[0],)
        return self._make(name, Tensor(one.view.dtype, shape), (one, other))

    def _make(self, name: str, tensor: Tensor, pieces: tuple[Piece, ...]) -> Argument:
        """Return a weight of `pieces`, with the dtype and shape of `tensor`."""
        full, view = f"{_PREFIX}{name}", replace(tensor, offset=0)
        self.made[full], self.made_tensors[full] = pieces, view
        return Argument("weight", full, view)

    def _count_together(self, block: _SplitBlock) -> None:
        """Let the cold part's row of the statistics be that of all neurons of the layer."""
        hot, cold = (given.args["stats"].view.offset // STATS_ROW_BYTES for given in (block.hot, block.cold))
        self.ffn = [
            replace(part, part="all", neurons=block.neurons) if part.stats_row == cold else part
            for part in self.ffn
            if part.stats_row != hot
        ]


def _is_of(argument: Argument, other: Argument) -> bool:
    """Return whether two arguments are in the same tensor."""
    return (argument.kind, argument.name) == (other.kind, other.name)


def _reading(call: Call, y: Argument, instead: Argument) -> Call:
    """Return `call` with `instead` where it reads the buffer of `y`."""
    if not any(_is_of(argument, y) for argument in call.args):
        return call
    args = tuple(
        replace(argument, kind=instead.kind, name=instead.name) if _is_of(argument, y) else argument
        for argument in call.args
    )
    return replace(call, args=args)
