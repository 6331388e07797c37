"""Transfers of values between host and accelerator: calls on both sides that meet at a flag.

What the host makes for the accelerator lies in shared memory from the start: it signals, and the accelerator copies it
to its own memory. What the accelerator makes for the host it copies to shared memory, where the host reads it. Senders
never wait.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from picompile_codegen.lowering.counted import call_send_mask
from picompile_codegen.lowering.ffn import makes_mask
from picompile_codegen.lowering.function import Bindings, Function, dimension
from picompile_codegen.lowering.program import Arg
from picompile_codegen.specs import (
    KernelSpec,
    ReceiveMaskSpec,
    ReceiveSpec,
    SendMaskSpec,
    SendSpec,
    SignalSpec,
    WaitSpec,
)
from picompile_passes.graph.layers import operator_part
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import SPARSE_FFN

ABANDONED = Arg("buffer", "abandoned")


def publish(node: Node, function: Function) -> None:
    """Append the calls that send the value of `node`, just made on the current device, to the other if it needs it."""
    users = [user for user in node.users if function.devices.get(user, function.device) != function.device]
    if operator_part(node) == "mask" and users and function.device == "accelerator":
        x = arguments(users[0])["x"]
        # A mask that the accelerator makes before what its block reads is sent with that.
        if function.devices[x] == "host" or function.has(x):
            _send_mask(node, users[0], function)
        return
    if any(not _comes_otherwise(user, function) for user in users):
        _send_value(node, function)
    for user in users:
        mask = arguments(user)["mask"] if is_call(user, SPARSE_FFN) and function.device == "accelerator" else None
        if mask is not None and arguments(user)["x"] is node and (mask, "accelerator") in function.values:
            _send_mask(mask, user, function)


def send(function: Function, x: Arg, out: Arg, dim: int) -> Arg:
    """Append the accelerator's copy of x float32 [rows, dim] to shared memory; return the flag behind it."""
    flag = function.flag()
    function.call(SendSpec(dim=dim, rows=function.rows), {"x": x, "out": out, "flag": flag})
    return flag


def signal(function: Function) -> Arg:
    """Append the host's call that sets a flag behind what it has written to shared memory; return the flag."""
    flag = function.flag()
    function.call(SignalSpec(), {"flag": flag})
    return flag


def _comes_otherwise(user: Node, function: Function) -> bool:
    """Return whether `user` needs no value sent: it has no kernel, or its input is sent with its mask."""
    if operator_part(user) == "mask":
        return not makes_mask(user, function.rows)
    if not is_call(user, SPARSE_FFN) or function.device == "host":
        return False
    mask = arguments(user)["mask"]
    return function.devices.get(mask) == "accelerator" and makes_mask(mask, function.rows)


def _send_value(node: Node, function: Function) -> None:
    value, columns = function.values[node, function.device], dimension(node)
    if function.device == "accelerator":
        out = function.buffer(f"{node.name}.sent", "float32", (function.rows, columns), "shared")
        function.arrivals[node] = WaitForValue(out, send(function, value, out, columns))
        return
    flag = signal(function)
    dtype = function.buffers[value.name].dtype
    function.arrivals[node] = Receive(
        value, flag, shape=(function.rows, columns), dtype=dtype, count=_count(node, function)
    )


def _count(node: Node, function: Function) -> Arg | None:
    """Return the buffer with how many neurons `node` computes, if its value is 0 without any; with a bias it is not."""
    if not is_call(node, SPARSE_FFN) or arguments(node)["down_bias"] is not None:
        return None
    return function.counts.get(arguments(node)["mask"])


def _send_mask(mask: Node, block: Node, function: Function) -> None:
    """Append the call that sends the host's part of `mask`, the input of `block`, and how many neurons it names."""
    values, rows = arguments(block), function.rows
    # Where the host has the input, there is nothing to send along: what the mask was made from takes its place.
    x = values["x"] if function.devices[values["x"]] == "accelerator" else arguments(mask)["x"]
    neurons, dim = dimension(mask), dimension(x)
    table = values["neurons"]
    columns = neurons if table is None else int(table.meta["val"].shape[0])
    out = function.buffer("x.sent", "float32", (rows, dim), "shared")
    out_mask = function.buffer("mask.sent", "uint8", (rows, columns), "shared")
    function.counts[mask] = function.buffer("count", "int32", (1,))
    flag = function.flag()
    bindings: Bindings = {
        "x": function.value(x),
        "mask": function.value(mask),
        "table": _all_of(neurons, function) if table is None else function.shared.weights.numbers(table),
        "out": out,
        "out_mask": out_mask,
        "count": function.counts[mask],
        "flag": flag,
    }
    call_send_mask(SendMaskSpec(dim=dim, neurons=neurons, columns=columns, rows=rows), bindings, function)
    function.arrivals[mask] = WaitForValue(out_mask, flag)
    if x is values["x"]:
        # The mask is waited for first, and this comes with it.
        function.arrivals.setdefault(x, lambda _: out)


def _all_of(neurons: int, function: Function) -> Arg:
    """Return the table of all neurons."""
    return function.shared.weights.integers(f"numbers.{neurons}", neurons, lambda _: torch.arange(neurons))


@dataclass(frozen=True)
class WaitForValue:
    """The arrival of a value on the host, which waits and reads it where it is."""

    shared: Arg
    flag: Arg

    def __call__(self, function: Function) -> Arg:
        """Append the call that waits; return where the value is then."""
        function.call(WaitSpec(), {"flag": self.flag, "abandoned": ABANDONED})
        return self.shared


@dataclass(frozen=True)
class Receive:
    """The arrival of a value on the accelerator, which waits and copies it, or takes zeros where `count` is 0."""

    shared: Arg
    flag: Arg
    shape: tuple[int, int]
    dtype: str
    count: Arg | None

    @property
    def bindings(self) -> Bindings:
        """The arguments of a kernel that receives the value."""
        found: Bindings = {"source": self.shared, "flag": self.flag, "abandoned": ABANDONED}
        return found if self.count is None else {**found, "count": self.count}

    def __call__(self, function: Function) -> Arg:
        """Append the call that receives the value; return where it is then."""
        rows, columns = self.shape
        y = function.buffer("received", self.dtype, self.shape)
        spec: KernelSpec = ReceiveSpec(dim=columns, rows=rows, counted=self.count is not None)
        if self.dtype == "uint8":
            spec = ReceiveMaskSpec(neurons=columns, rows=rows)
        function.call(spec, self.bindings | {"y": y})
        return y


def pending_receive(node: Node, function: Function) -> Receive:
    """Return the arrival of numbers of the host that the accelerator has not received yet."""
    arrival = function.arrivals[node]
    assert isinstance(arrival, Receive)
    return arrival
