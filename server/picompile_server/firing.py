"""The share of neurons that fire while answers are generated."""

from __future__ import annotations

from collections import deque

from picompile_runtime.engine.engine import Engine
from picompile_runtime.errors import RequestError

# Reading the counters of an accelerator costs a transfer, which is worth it once in so many steps.
_STEPS_BETWEEN = 16
_READINGS = 64


class FiringMeter:
    """Reads the engine's counters of neurons after decode steps.

    Attributes:
        recent_share: the share of the neurons that fired in the latest steps, from 0 to 1; None if it is not known.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._every = _STEPS_BETWEEN if engine.artifact.program.has_accelerator else 1
        self._last = {name: engine.firing_totals(name) for name in ("decode", "batch") if _is_counted(engine, name)}
        self._steps = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=_READINGS)
        self.recent_share: float | None = None

    def after_step(self) -> float | None:
        """Return the share of the neurons that fired in the step that has just run, over all of its sequences.

        With an accelerator it is the mean of the latest 16 steps after every 16th, and None in between.
        """
        self._steps += 1
        if self._steps % self._every:
            return None
        fired = neurons = 0
        for name, last in self._last.items():
            totals = self._last[name] = self._engine.firing_totals(name)
            if totals[0] > last[0]:  # else no neurons were counted: in no such step, or by no such kernels
                fired += totals[1] - last[1]
                neurons += totals[2] - last[2]
        if not neurons:
            return None
        self._recent.append((fired, neurons))
        self.recent_share = sum(each[0] for each in self._recent) / sum(each[1] for each in self._recent)
        return fired / neurons


def _is_counted(engine: Engine, function: str) -> bool:
    try:
        engine.firing_totals(function)
    except RequestError:
        return False
    return True
