"""The least time that decoding can take: the bytes that it must move over the memory's bandwidth, kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from picompile_runtime.artifact import Artifact
from picompile_runtime.firing import Firing
from picompile_runtime.program import STATS_ROW_BYTES, WAITS, Call

# What operators are to who reads a table of times; all others are small.
_KINDS = {
    "linear": "projections",
    "attention": "attention",
    "predict": "predictor",
    "ffn": "feed-forward",
    **dict.fromkeys(("head", "leading"), "head"),
    # Where there is a hot device: what brings values from one side to the other, and what waits for them. What is
    # received is copied as well, by the same kernel.
    **dict.fromkeys(("inputs", "send", "signal"), "exchange"),
    **dict.fromkeys(WAITS, "waits"),
}
_STATISTICS = tuple(f"stats{function}{device}" for function in ("", ".batch") for device in ("", ".device"))
REST = "norms and rest"
KINDS = (*dict.fromkeys(_KINDS.values()), REST)


@dataclass(frozen=True)
class KernelTime:
    """What the kernels of one kind on one device do for a token. `floor_s` is what `bytes` take at the bandwidth of
    its memory, None where that is not known.
    """

    kind: str
    device: str
    calls: int
    bytes: float
    seconds: float
    floor_s: float | None

    @property
    def bytes_per_s(self) -> float:
        """What they read; 0 where they take no time."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def floor_share(self) -> float | None:
        """How near they are to the floor: 1 is there."""
        if self.floor_s is None:
            return None
        return self.floor_s / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The form in `bench --json`."""
        return {
            "kind": self.kind,
            "device": self.device,
            "calls": self.calls,
            "bytes_per_token": round(self.bytes),
            "s_per_token": self.seconds,
            "bytes_per_s": self.bytes_per_s,
            "floor_s_per_token": self.floor_s,
            "floor_share": self.floor_share,
        }


def kind(call: Call) -> str:
    """Which of KINDS a call is."""
    return _KINDS.get(call.op, REST)


def statistics_rows(call: Call) -> list[int]:
    """Where a feed-forward call counts its neurons: the row of the statistics, of the host's or of the hot device's."""
    statistics = (arg for arg in call.args if arg.kind == "buffer" and arg.name in _STATISTICS)
    return [arg.view.offset // STATS_ROW_BYTES for arg in statistics]


def step_bytes(
    artifact: Artifact, function: str, firing: Sequence[Firing], cached: float, rows: int = 1
) -> list[float]:  # fmt: skip
    """Bytes that each call of a step of `function` must move: of weights those that `firing` asks for, of the KV cache
    the `cached` positions of each of `rows` sequences.
    """
    shares = {row.part.stats_row: row.computed_share for row in firing}
    return [
        call.weight_bytes - _idle_bytes(artifact, call, shares) + rows * _cache_bytes(artifact, call, cached)
        for call in artifact.program.functions[function]
    ]


def bytes_per_token(artifact: Artifact, firing: Sequence[Firing], cached: float) -> float:
    """Bytes of weights and of KV cache that `decode` must move when `cached` tokens are in the cache."""
    return sum(step_bytes(artifact, "decode", firing, cached))


def _idle_bytes(artifact: Artifact, call: Call, shares: dict[int, float]) -> float:
    """What a feed-forward call leaves unread: of its last matrix argument, the rows that it does not need."""
    rows = statistics_rows(call)
    matrices = [arg.name for arg in call.args if arg.kind == "weight" and len(arg.view.shape) == 2]
    if not rows or not matrices:
        return 0.0
    return artifact.tensors[matrices[-1]].size_bytes * (1 - shares.get(rows[0], 1.0))


def _cache_bytes(artifact: Artifact, call: Call, cached: float) -> float:
    """What an attention reads of one sequence's cache."""
    if call.op != "attention":
        return 0.0
    program = artifact.program
    seen = min(cached, call.window or cached)
    names = {arg.name for arg in call.args if arg.kind == "state"}
    return sum(program.state[name].size_bytes for name in names) / program.sequences * seen / program.context
