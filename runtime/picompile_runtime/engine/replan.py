"""A program for less of a GPU's memory than was planned: the host computes hot neurons that the GPU cannot hold.

Weights that stay with the host are read by the GPU over the bus, which is slow for those of every token. The host's
kernels take the number of their neurons as an argument. So where tokens are decoded, a layer's hot neurons become cold
ones: the host computes them together with those that it has, and the GPU sends it the whole mask. Prompts are computed
as before; the GPU then reads these weights over the bus, once for a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from picompile_runtime.artifact.call_order import Interfaces
from picompile_runtime.artifact.program import (
    ONE_TOKEN_EACH,
    STATS_ROW_BYTES,
    Argument,
    Call,
    FeedForward,
    Program,
)
from picompile_runtime.devices.memory import Tensor
from picompile_runtime.engine.layout import accelerator_need, moved_weights, packed_bytes, weights_of
from picompile_runtime.engine.loaded_program import LoadedProgram, Piece
from picompile_runtime.engine.split_blocks import BlockFinder, SplitBlock, is_of

# Names of weights that no file has begin with this.
_PREFIX = "replan."


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


class _Rewriter:
    """Changes the calls of a program, layer by layer."""

    def __init__(self, program: Program, tensors: Mapping[str, Tensor], kernels: Interfaces) -> None:
        self._program, self._tensors, self._finder = program, tensors, BlockFinder(program, tensors, kernels)
        self.functions = dict(program.functions)
        self.ffn: list[FeedForward] = list(program.ffn)
        self.made: dict[str, tuple[Piece, ...]] = {}
        self.joined: dict[str, tuple[str, ...]] = {}
        self.made_tensors: dict[str, Tensor] = {}

    def move(self, layer: int, names: frozenset[str]) -> None:
        """Let the host compute all neurons of a layer whose hot matrices are among `names`, if its kernels can."""
        functions = [name for name in ONE_TOKEN_EACH if name in self._program.functions]
        found = [block for each in functions if (block := self._finder.movable(each, layer)) is not None]
        # Counts of both functions are those of the same parts.
        if len(found) < len(functions) or {block.bundles for block in found} != {found[0].bundles}:
            return
        if found[0].bundles[1] not in names:
            return
        for function, block in zip(functions, found, strict=True):
            self._rewrite(function, block, layer)
        self._count_together(found[0])

    def _rewrite(self, function: str, block: SplitBlock, layer: int) -> None:
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
        for name in cold.of_neurons:
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

    def _bundle(self, block: SplitBlock, layer: int) -> dict[str, Argument]:
        """Return the views of the matrices of both parts."""
        name, (first, second) = f"{_PREFIX}{layer}.neurons", (self._tensors[each] for each in block.bundles)
        self.joined[name] = block.bundles
        self.made_tensors[name] = Tensor(first.dtype, (first.shape[0] + second.shape[0], *first.shape[1:]))
        found = {}
        for parameter in block.cold.matrices:
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

    def _count_together(self, block: SplitBlock) -> None:
        """Let the cold part's row of the statistics be that of all neurons of the layer."""
        hot, cold = (given.args["stats"].view.offset // STATS_ROW_BYTES for given in (block.hot, block.cold))
        self.ffn = [
            replace(part, part="all", neurons=block.neurons) if part.stats_row == cold else part
            for part in self.ffn
            if part.stats_row != hot
        ]


def _reading(call: Call, y: Argument, instead: Argument) -> Call:
    """Return `call` with `instead` where it reads the buffer of `y`."""
    if not any(is_of(argument, y) for argument in call.args):
        return call
    args = tuple(
        replace(argument, kind=instead.kind, name=instead.name) if is_of(argument, y) else argument
        for argument in call.args
    )
    return replace(call, args=args)
