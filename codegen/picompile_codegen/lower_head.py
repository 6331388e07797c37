"""What is behind the output head where it runs on the hot device: how the host gets to know of the logits.

Where the next token may be asked for they stay on the device, and the highest of them go to the host, which reads the
others only if it needs them. Where all of them are wanted, in `score`, they are sent.
"""

from torch.fx import Node

from picompile_codegen import kernels
from picompile_codegen.exchange import send
from picompile_codegen.function import Function, dimension
from picompile_codegen.kernels.leading import MOST_LEADING
from picompile_codegen.program import Arg, LeadingBuffers

# The functions behind which a token is chosen.
CHOOSING = ("decode", "prefill_last", "batch")


def logits_place(node: Node, function: Function) -> Arg:
    """Where the head `node` writes: to the function's logits, unless they are sent there."""
    if function.device == "device" and function.name not in CHOOSING:
        return function.result(node)
    return Arg("buffer", function.logits)


def hand_over(node: Node, logits: Arg, function: Function) -> None:
    """Appends what lets the host have `logits`, which the head `node` has made on the hot device."""
    vocab = dimension(node)
    if function.name not in CHOOSING:
        send(function, logits, Arg("buffer", function.logits), vocab)
        return
    function.leading = leading_buffers(function.logits)
    # The end of the step, which the host waits for, is all the order that these need.
    scores, ids = (Arg("buffer", name) for name in (function.leading.scores, function.leading.ids))
    kernel = function.kernel(kernels.leading_logits, vocab=vocab, rows=function.rows)
    function.call(kernel, {"logits": logits, "scores": scores, "ids": ids}, op="leading")


def leading_buffers(logits: str) -> LeadingBuffers:
    """The names for the highest of the logits in the buffer `logits`."""
    name = logits.replace("logits", "leading", 1)
    return LeadingBuffers(f"{name}.scores", f"{name}.ids")


def leading_shapes(logits: str, rows: int, vocab: int) -> list[tuple[str, str, tuple[int, int]]]:
    """Name, dtype and shape of each of these, for `rows` rows of logits."""
    names, shape = leading_buffers(logits), (rows, min(MOST_LEADING, vocab))
    return [(names.scores, "float32", shape), (names.ids, "int32", shape)]
