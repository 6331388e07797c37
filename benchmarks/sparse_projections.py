"""Measure decoding where projections of attention leave out a given share of their inputs, beside one that reads all.

    python benchmarks/sparse_projections.py build/bench/reglu-1.3b-10 --share 0 0.4 --work build/bench-projections

`compile --skip` looks for the limits that a bound of perplexity allows. Here they are those of the first price at which
the share is left out, whatever that costs: random weights allow any share, or none. Artifacts are measured in turn.
Those that are in the work folder are taken as they are.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from _tools import picompile_json
from numpy.typing import NDArray

import picompile.skipping.calibration as calibration
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.skipping.limits import no_limits
from picompile.skipping.search import FoundLimits, SkippingSearch, price_of

_SITES = ("qkv", "attention_output")
# Tokens of the text whose inputs are counted.
_TOKENS = 512
# Prices are tried between these steps of the search, which are eighths of a power of two.
_STEPS = 8 * 22


def _search(share: float) -> type[SkippingSearch]:
    class SearchOfShare(SkippingSearch):
        """Searches for limits that leave out `share` of the inputs."""

        def run(self) -> FoundLimits:
            low, high = 0, _STEPS
            if self._left_out(high)[0] < share:
                sys.exit(f"no price leaves out {share:.0%} of the inputs")
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._left_out(middle)[0] < share else (low, middle)
            _, left_out, losses = self._left_out(high)
            rise = self._rise(self._losses(no_limits(self.graph_module), "whole"), losses)
            limits, price = self._limits(high), price_of(high)
            return FoundLimits(limits, price, rise, float(np.exp(losses.mean())), len(losses), left_out)

        def _left_out(self, step: int) -> tuple[float, dict[str, float], NDArray[np.float64]]:
            found: dict[str, float] = {}
            losses = self._losses(self._limits(step), f"step {step}", found)
            return statistics.mean(found.values()), found, losses

    return SearchOfShare


def _compile(given: argparse.Namespace, share: float) -> Path:
    name = (given.model.name, given.target, given.quant, given.predictor, f"{share:g}")
    artifact: Path = given.work / "-".join(name)
    if not artifact.exists():
        given.work.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"target": given.target, "quant": given.quant, "predictor": given.predictor}
        if share:
            calibration.SkippingSearch = _search(share)  # type: ignore[misc]
            options |= {"skip": 1.0, "skip_at": _SITES, "skip_tokens": _TOKENS}
        compile_model(given.model, artifact, CompileOptions(**options, rounding="nearest", gate=None))
    return artifact


def _share_of(artifact: Path) -> float:
    """Return the share of inputs that an artifact leaves out of the text that its limits are of."""
    skipping = json.loads((artifact / "report.json").read_text()).get("skipping")
    return statistics.mean(skipping["left_out"].values()) if skipping else 0.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--share", nargs="+", type=float, default=[0.0, 0.4], help="of inputs that are left out")
    parser.add_argument("--quant", default="q4")
    parser.add_argument("--predictor", default="learned")
    parser.add_argument("--target", default="native")
    parser.add_argument("--work", type=Path, default=Path("build/bench-projections"))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if not given.model.exists():
        parser.error(f"there is no {given.model}")
    return given


def main() -> None:
    given = _arguments()
    artifacts = {share: _compile(given, share) for share in given.share}
    results: dict[float, list[dict[str, Any]]] = {share: [] for share in artifacts}
    for _ in range(given.rounds):
        for share, artifact in artifacts.items():
            results[share].append(picompile_json("bench", artifact, "-p", 128, "-n", 64, "-r", 1, "-t", 2)["decode"])
    print("| left out | MB a token | tokens/s | of the memory's speed |\n| --- | --- | --- | --- |")
    for share, found in results.items():
        bytes_, speed, part = (
            statistics.median(each[key] for each in found)
            for key in ("bytes_per_token", "tokens_per_s", "bandwidth_share")
        )
        print(f"| {_share_of(artifacts[share]):.1%} | {bytes_ / 1e6:.0f} | {speed:.1f} | {part:.0%} |")


if __name__ == "__main__":
    main()
