"""The goal of a plan: what it is to be best at, and how much memory it leaves free. Imports no solver."""

from dataclasses import dataclass

from picompile.options import check_options, documented, option
from picompile.quantities import parse_share

OBJECTIVES = ("latency", "impact")


@documented
@dataclass(frozen=True, kw_only=True)
class PlanGoal:
    """What a plan is to be best at. Raises `UsageError`."""

    # Tokens in the cache.
    tokens: int | None = option(
        None,
        "Tokens in the cache where speed counts. Default: half the context.",
        metavar="N",
        least=0,
        aliases=("--at",),
    )
    # Pinning takes a part of this margin: 1.6 % of the cold weights' bytes in the host's memory, and 0.2 % of them in
    # the GPU's. The runtime counts both when it loads (artifact/weights.py, engine/layout.py), where less may be free.
    margin: float = option(
        "5%", "How much of either memory to leave free.", metavar="SHARE", parse=parse_share, least=0, below=1
    )
    objective: str = option(
        "latency",
        "latency: least time of a token. impact: most firings on the GPU, as PowerInfer published.",
        choices=OBJECTIVES,
    )

    def __post_init__(self) -> None:
        check_options(self)
