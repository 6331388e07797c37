"""Finds split feed-forward blocks whose hot neurons the host could compute: its kernels take the number of neurons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from picompile_runtime.artifact.call_order import Interfaces
from picompile_runtime.artifact.interfaces import KernelInterface, KernelParameter
from picompile_runtime.artifact.program import Argument, Call, Program
from picompile_runtime.devices.memory import ALIGNMENT, Tensor

# A block has these for each of its neurons, where it has them at all.
_OF_NEURONS = ("table", "gate_bias", "up_bias", "gate_limits", "output_limits")
_BUNDLE = "neuron_w."
# What the calls of a block that can move are given, besides other arguments.
_HOT = frozenset({"mask", "table", f"{_BUNDLE}data", "stats", "y"})
_COLD = frozenset({"mask", "count", f"{_BUNDLE}data", "stats"})
_SEND = frozenset({"mask", "table", "columns", "out_mask"})


@dataclass(frozen=True)
class GivenCall:
    """A call, and its arguments by the names of its kernel's parameters."""

    call: Call
    interface: KernelInterface
    args: Mapping[str, Argument]

    def parameter(self, name: str) -> KernelParameter:
        """Return what the kernel says of the parameter `name`."""
        return next(each for each in self.interface.parameters if each.name == name)

    @property
    def of_neurons(self) -> list[str]:
        """Parameters that have an element for each neuron."""
        return [name for name in _OF_NEURONS if name in self.args]

    @property
    def matrices(self) -> list[str]:
        """Parameters that are views of the matrices, which have rows for each neuron."""
        return [name for name in self.args if name.startswith(_BUNDLE)]

    def most(self, name: str) -> int:
        """Return the largest number that the kernel takes for the parameter `name`."""
        return (self.parameter(name).below or 1) - 1

    def with_args(self, changed: Mapping[str, Argument], weight_bytes: int) -> Call:
        """Return the call with other arguments for some parameters."""
        args = tuple(changed.get(name, argument) for name, argument in self.args.items())
        return replace(self.call, args=args, weight_bytes=weight_bytes)


@dataclass(frozen=True)
class SplitBlock:
    """The calls of a split block in one function: both parts, and the one that sends the host its part of the mask."""

    hot: GivenCall
    cold: GivenCall
    send: GivenCall

    @property
    def neurons(self) -> int:
        """Number of neurons of both parts."""
        return self.send.args["mask"].view.shape[-1]

    @property
    def bundles(self) -> tuple[str, str]:
        """Names of the weights with the matrices of the cold and of the hot part."""
        return self.cold.args[f"{_BUNDLE}data"].name, self.hot.args[f"{_BUNDLE}data"].name


class BlockFinder:
    """Finds blocks of a program with `tensors` as weights and code that has `kernels`."""

    def __init__(self, program: Program, tensors: Mapping[str, Tensor], kernels: Interfaces) -> None:
        self._program, self._tensors, self._kernels = program, tensors, kernels

    def movable(self, function: str, layer: int) -> SplitBlock | None:
        """Return a layer's block in a function, None unless the host could compute all of its neurons."""
        block = self._split_block(function, layer)
        if block is None or not self._has_room(block) or not self._can_join(block):
            return None
        return block if self._can_miss(function, block) else None

    def _split_block(self, function: str, layer: int) -> SplitBlock | None:
        """Return a layer's block, None unless it is split and its mask is sent to the host."""
        blocks = [call for call in self._program.functions[function] if call.op == "ffn" and call.layer == layer]
        hot, cold = ([call for call in blocks if call.device == device] for device in ("device", "host"))
        if len(hot) != 1 or len(cold) != 1:
            return None
        first, second = self._given(hot[0], _HOT), self._given(cold[0], _COLD)
        if first is None or second is None or "table" in second.args:
            return None
        for call in self._program.calls(function, "device"):
            send = self._given(call, _SEND) if call.op == "send" else None
            if send is not None and is_of(send.args["out_mask"], second.args["mask"]):
                is_whole = is_of(send.args["mask"], first.args["mask"])
                return SplitBlock(first, second, send) if is_whole else None
        return None

    def _given(self, call: Call, needed: frozenset[str] = frozenset()) -> GivenCall | None:
        """Return a call with its arguments by name, None unless its kernel has all parameters of `needed`."""
        interface = self._kernels[call.device].get(call.kernel)
        if interface is None or len(interface.parameters) != len(call.args):
            return None
        names = [parameter.name for parameter in interface.parameters]
        return GivenCall(call, interface, dict(zip(names, call.args, strict=True))) if needed <= set(names) else None

    def _has_room(self, block: SplitBlock) -> bool:
        """Return whether the kernels, and what they write, are for all neurons of the block."""
        hot, cold, send = block.hot, block.cold, block.send
        joined = [send.args["table"], *(each.args[name] for each in (hot, cold) for name in each.of_neurons)]
        can_join = hot.of_neurons == ["table", *cold.of_neurons] and all(each.kind == "weight" for each in joined)
        tables = send.args["table"].view.shape[0], hot.args["table"].view.shape[0]
        is_complete = sum(tables) == block.neurons
        has_kernels = min(send.most("columns"), cold.most("count")) >= block.neurons
        sent = send.args["out_mask"]
        sent_bytes = hot.args["y"].view.shape[0] * block.neurons
        has_room = sent.view.offset + sent_bytes <= self._program.buffers[sent.name].size_bytes
        return can_join and is_complete and has_kernels and has_room

    def _can_join(self, block: SplitBlock) -> bool:
        """Return whether the matrices of both parts are one matrix when they lie one behind the other."""
        names = block.cold.matrices
        if block.hot.matrices != names or any(block.cold.parameter(name).below is not None for name in names):
            return False
        if any(given.args[name].kind != "weight" for given in (block.cold, block.hot) for name in names):
            return False
        first, second = (self._tensors[name] for name in block.bundles)
        for given, tensor in ((block.cold, first), (block.hot, second)):
            views = [given.args[name].view for name in names]
            if any(view.offset or view.size_bytes != tensor.size_bytes for view in views):
                return False
        alike = (first.dtype, first.shape[1:]) == (second.dtype, second.shape[1:])
        return alike and first.size_bytes % ALIGNMENT == 0

    def _can_miss(self, function: str, block: SplitBlock) -> bool:
        """Return whether other calls only read what the hot part makes, which is known without it."""
        y, bias = block.hot.args["y"], block.hot.args.get("down_bias")
        if bias is not None and (bias.kind, bias.view.shape) != ("weight", y.view.shape[1:]):
            return False
        for call in self._program.functions[function]:
            if call is block.hot.call or not any(is_of(argument, y) for argument in call.args):
                continue
            given = self._given(call)
            if given is None or any(
                is_of(argument, y) and given.parameter(name).access != "in" for name, argument in given.args.items()
            ):
                return False
        return True


def is_of(argument: Argument, other: Argument) -> bool:
    """Return whether two arguments are in the same tensor."""
    return (argument.kind, argument.name) == (other.kind, other.name)
