"""What is behind the output head where it runs on the hot device: how the host gets to know of the logits.

They stay on the device, and the runtime copies them when the step is over: a chunk's logits are megabytes, which the
copy engine of a GPU moves at the speed of the bus. Where the next token may be asked for, the highest of them go to the
host within the step, which reads the others only if it needs them.
"""

from torch.fx import Node

from picompile_codegen import kernels
from picompile_codegen.function import Function, dimension
from picompile_codegen.kernels.leading import MOST_LEADING
from picompile_codegen.program import Arg, LeadingBuffers

# The functions behind which a token is chosen.
CHOOSING = ("decode", "prefill_last", "batch")


def hand_over(node: Node, logits: Arg, function: Function) -> None:
    """Append what lets the host choose from `logits`, which the head `node` has made on the hot device."""
    if function.name not in CHOOSING:
        return
    function.leading = leading_buffers(function.logits)
    # The end of the step, which the host waits for, is all the order that these need.
    scores, ids = (Arg("buffer", name) for name in (function.leading.scores, function.leading.ids))
    kernel = function.kernel(kernels.leading_logits, vocab=dimension(node), rows=function.rows)
    function.call(kernel, {"logits": logits, "scores": scores, "ids": ids}, op="leading")


def leading_buffers(logits: str) -> LeadingBuffers:
    """The names for the highest of the logits in the buffer `logits`."""
    name = logits.replace("logits", "leading", 1)
    return LeadingBuffers(f"{name}.scores", f"{name}.ids")


def leading_shapes(logits: str, rows: int, vocab: int) -> list[tuple[str, str, tuple[int, int]]]:
    """Name, dtype and shape of each of these, for `rows` rows of logits."""
    names, shape = leading_buffers(logits), (rows, min(MOST_LEADING, vocab))
    return [(names.scores, "float32", shape), (names.ids, "int32", shape)]
