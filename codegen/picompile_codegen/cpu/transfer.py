"""Transfers between host and accelerator: the bodies for the host, and for an accelerator that is part of the CPU.

`picompile_codegen.specs.transfer` says which side calls which kernel; `picompile_codegen.cuda.transfer` has the bodies
for a GPU. Waiting is implemented in native/host.c.
"""

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from picompile_codegen.backend import body
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, counter, loop, parallel, when, worth_a_region
from picompile_codegen.cpu.vector import at, blocks, load, splat, store
from picompile_codegen.specs import (
    BorrowCacheSpec,
    CopyWordsSpec,
    LendCacheSpec,
    ReceiveMaskSpec,
    ReceiveSpec,
    SendMaskSpec,
    SendSpec,
    SignalSpec,
    UploadSpec,
    WaitSpec,
)
from picompile_codegen.specs.arguments import ITEM_BYTES

# Bytes that are copied as one vector.
_COPIED_BYTES = 64


@body(SendSpec)
def send(spec: SendSpec, function: KernelFunction) -> None:
    """Write the body of a `SendSpec`."""
    x, out = function["x"], function["out"]
    _copy_rows(x, out, function.tokens(spec.rows), spec.dim)
    _signal(function, out, out)


@body(SendMaskSpec)
def send_mask(spec: SendMaskSpec, function: KernelFunction) -> None:
    """Write the body of a `SendMaskSpec`."""
    x, mask, table = function["x"], function["mask"], function["table"]
    out, out_mask = function["out"], function["out_mask"]
    tokens = function.tokens(spec.rows)
    total = counter()
    with loop(0, tokens) as t, loop(0, spec.columns) as i:
        bit = bind(mask[t, table[i]])
        out_mask[t, i] = bit
        total[0] = total[0] + tirx.Cast("int32", bit)
    function["count"][0] = total[0]
    _copy_rows(x, out, tokens, spec.dim)
    _signal(function, out, out_mask)


@body(ReceiveSpec)
def receive(spec: ReceiveSpec, function: KernelFunction) -> None:
    """Write the body of a `ReceiveSpec`."""
    source, y, count = function["source"], function["y"], function.get("count")
    tokens = function.tokens(spec.rows)
    if count is None:
        _wait(function, source)
        _copy_rows(source, y, tokens, spec.dim)
        return
    with when(count[0] == 0), loop(0, tokens) as t:
        blocks(spec.dim, lambda c, valid: store(y, t, c, value=splat(0.0), valid=valid))
    with when(count[0] != 0):
        _wait(function, source)
        _copy_rows(source, y, tokens, spec.dim)


@body(ReceiveMaskSpec)
def receive_mask(spec: ReceiveMaskSpec, function: KernelFunction) -> None:
    """Write the body of a `ReceiveMaskSpec`."""
    source, y = function["source"], function["y"]
    _wait(function, source)
    with loop(0, function.tokens(spec.rows)) as t, loop(0, spec.neurons) as i:
        y[t, i] = source[t, i]


@body(CopyWordsSpec)
def copy_words(spec: CopyWordsSpec, function: KernelFunction) -> None:
    """Write the body of a `CopyWordsSpec`."""
    source, y = function["source"], function["y"]
    with loop(0, spec.words) as i:
        y[i] = source[i]


@body(UploadSpec)
def upload(spec: UploadSpec, function: KernelFunction) -> None:
    """Write the body of an `UploadSpec`: for an accelerator that is part of the CPU, a copy."""
    source, y = function["source"], function["y"]
    full, rest = divmod(spec.size, _COPIED_BYTES)
    with parallel(full, when_worth=worth_a_region(spec.size)) as part:
        y[at(part * _COPIED_BYTES, _COPIED_BYTES)] = source[at(part * _COPIED_BYTES, _COPIED_BYTES)]
    with loop(0, rest) as i:
        y[full * _COPIED_BYTES + i] = source[full * _COPIED_BYTES + i]


@body(LendCacheSpec)
def lend_cache(spec: LendCacheSpec, function: KernelFunction) -> None:
    """Write the body of a `LendCacheSpec`."""
    cache, y = function["cache"], function["y"]
    slot = 0 if spec.sequences == 1 else function.slot(spec.sequences)
    count = bind(function.position(spec.context) * spec.width)
    cache_bytes = spec.kv_heads * spec.context * spec.width * ITEM_BYTES[spec.dtype]
    with parallel(spec.kv_heads, when_worth=worth_a_region(cache_bytes)) as head:
        _copy_elements(cache, from_row=(slot, head), target=y, to_row=(head,), count=count)


@body(BorrowCacheSpec)
def borrow_cache(spec: BorrowCacheSpec, function: KernelFunction) -> None:
    """Write the body of a `BorrowCacheSpec`."""
    source, y = function["source"], function["y"]
    _wait(function, source)
    count = bind(function.position(spec.context) * spec.width)
    with loop(0, spec.kv_heads) as head:
        _copy_elements(source, from_row=(head,), target=y, to_row=(head,), count=count)


@body(WaitSpec)
def wait(_: WaitSpec, function: KernelFunction) -> None:
    """Write the body of a `WaitSpec`."""
    _wait(function, function["flag"])


@body(SignalSpec)
def signal(_: SignalSpec, function: KernelFunction) -> None:
    """Write the body of a `SignalSpec`."""
    _signal(function, function["flag"], function["flag"])


def _copy_elements(
    source: KernelTensor, from_row: tuple[Expr, ...], target: KernelTensor, to_row: tuple[Expr, ...], count: Expr
) -> None:
    """Copy the first `count` elements of a row."""
    lanes = _COPIED_BYTES // ITEM_BYTES[source.dtype]
    full = bind(count // lanes)
    with loop(0, full) as part:
        target[(*to_row, at(part * lanes, lanes))] = source[(*from_row, at(part * lanes, lanes))]
    with loop(full * lanes, count) as i:
        target[(*to_row, i)] = source[(*from_row, i)]


def _copy_rows(source: KernelTensor, target: KernelTensor, tokens: Expr, dim: int) -> None:
    with loop(0, tokens) as t:
        blocks(dim, lambda c, valid: store(target, t, c, value=load(source, t, c, valid=valid), valid=valid))


def _signal(function: KernelFunction, *written: KernelTensor) -> None:
    arguments = _start(function["flag"]), function.step_number(), *map(_start, written)
    T.evaluate(tirx.call_extern("void", "pi_signal", *arguments))


def _wait(function: KernelFunction, awaited: KernelTensor) -> None:
    flags = _start(function["flag"]), _start(function["abandoned"])
    T.evaluate(tirx.call_extern("void", "pi_wait", *flags, function.step_number(), _start(awaited)))


def _start(tensor: KernelTensor) -> Expr:
    return tirx.address_of(tensor.first)
