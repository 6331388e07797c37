"""Explains a step in which host and hot device have waited for each other in vain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.program import WAITS, Call

# Words of `abandoned` in which a side that gives up says how far behind `abandoned` the flag is that it waited for, and
# what that held: codegen's native/host.c and cuda/prelude.cuh.
_RECORDS = (1, 3)
_FLAG_BYTES = 64
_SETS = ("send", "signal")
_NAMES = {"host": "host", "device": "hot device"}


def waited_in_vain(
    calls: Sequence[Call],
    step: int,
    flags: NDArray[np.int32],
    abandoned: NDArray[np.int32],
    distance_bytes: int,
) -> str:
    """Return why step number `step` of a function failed: who waited in which call, and which flags were set.

    `calls` are the function's, `flags` int32 [flags, 16] and `abandoned` int32 [16] as the step has left them.
    `distance_bytes` is how far `flags` are behind `abandoned`.
    """
    of_step = sorted(flag for call in calls if call.op in _SETS and (flag := _flag(call)) is not None)
    records = [(int(abandoned[word]), int(abandoned[word + 1])) for word in _RECORDS if abandoned[word]]
    waits = [_wait(calls, (place - distance_bytes) // _FLAG_BYTES, held) for place, held in records]
    first = "; ".join(waits) or "one device waited in vain for the other"
    is_set = [str(flag) for flag in of_step if flags[flag, 0] == step]
    seen = f"flags set in step {step}: {', '.join(is_set) or 'none'}, of {len(of_step)}"
    return f"{first}, and gave up; {seen}"


def _wait(calls: Sequence[Call], flag: int, held: int) -> str:
    waiting = next((call for call in calls if call.op in WAITS and _flag(call) == flag), None)
    setting = next((call for call in calls if call.op in _SETS and _flag(call) == flag), None)
    if waiting is None or setting is None:
        return f"one device waited in vain for flag {flag}, which held {held}"
    number = [call for call in calls if call.device == waiting.device].index(waiting)
    return (
        f"the {_NAMES[waiting.device]} waited in vain in its call {number}, {waiting.kernel}{_layer(calls, waiting)}, "
        f"for flag {flag}, which held {held} and is set by {setting.kernel} on the {_NAMES[setting.device]}"
    )


def _layer(calls: Sequence[Call], waiting: Call) -> str:
    """Return which layer a call is in: that of the last call before it, on the same device, that says so."""
    before: Iterator[Call] = (call for call in calls[: calls.index(waiting) + 1] if call.device == waiting.device)
    layers = [call.layer for call in before if call.layer is not None]
    return f" behind layer {layers[-1]}" if layers else ""


def _flag(call: Call) -> int | None:
    """Return the number of the flag that a call sets or waits for."""
    offsets = [arg.view.offset for arg in call.args if (arg.kind, arg.name) == ("buffer", "flags")]
    return offsets[0] // _FLAG_BYTES if offsets else None
