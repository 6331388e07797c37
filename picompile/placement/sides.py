"""On which side each stage is, where prices and the transfers between stages are all that counts."""

import numpy as np
from numpy.typing import NDArray


class CheapestSides:
    """The cheapest sides by how many stages are on the GPU, found stage by stage.

    `host` and `gpu` float64 [stages]: what a stage costs on either side, infinite where it cannot be there. Whoever is
    on the other side than the stage before costs `switch_cost` more; with `from_host` the stream begins and ends on the
    host.
    """

    def __init__(
        self, host: NDArray[np.float64], gpu: NDArray[np.float64], switch_cost: float, *, from_host: bool
    ) -> None:
        stages, at_ends = len(host), switch_cost if from_host else 0.0
        # By the side of the last stage and the number on the GPU so far.
        costs = np.full((2, stages + 1), np.inf)
        costs[0, 0] = 0.0
        self._crossed = np.zeros((stages, 2, stages + 1), dtype=bool)
        for stage in range(stages):
            over = costs[::-1] + (switch_cost if stage else at_ends)
            self._crossed[stage] = over < costs
            costs = np.minimum(costs, over)
            costs[0] += host[stage]
            costs[1, 1:] = costs[1, :-1] + gpu[stage]
            costs[1, 0] = np.inf
        self._costs = costs + np.asarray([[0.0], [at_ends]])

    def of(self, count: int) -> tuple[float, list[bool]] | None:
        """(cost, whether each stage is on the GPU) with `count` on it; None where there cannot be so many."""
        if not 0 <= count < self._costs.shape[1]:
            return None
        side, left = int(np.argmin(self._costs[:, count])), count
        cost = float(self._costs[side, count])
        if not np.isfinite(cost):
            return None
        found = []
        for crossed in self._crossed[::-1]:
            found.append(side == 1)
            left -= side
            side ^= int(crossed[side, left])
        return cost, found[::-1]
