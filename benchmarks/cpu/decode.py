"""Decode and prefill speed of synthetic checkpoints.

    python -m benchmarks.cpu.decode --shape reglu-1.3b --active 0.10 --work build/bench

Makes the checkpoint, compiles it in every format asked for, and measures each at every thread count, interleaved, so
that a machine that slows down slows all of them down. Prints a Markdown table; the share is of the bandwidth measured
in the run.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.cpu.commands import picompile, picompile_json
from benchmarks.script import argument_parser, heading, row


def _arguments() -> argparse.Namespace:
    parser = argument_parser(
        __doc__, active=0.10, work=Path("build/bench"), threads=[2, 1], prompt=128, tokens=64, rounds=3
    )
    parser.add_argument("--shape", default="reglu-1.3b")
    parser.add_argument("--model", type=Path, help="use this checkpoint instead of making one")
    parser.add_argument("--quant", nargs="+", default=["q4", "f16"])
    parser.add_argument("--predictor", nargs="+", default=["exact", "none"])
    return parser.parse_args()


def _checkpoint(options: argparse.Namespace) -> Path:
    if options.model is not None:
        return Path(options.model)
    folder = Path(options.work) / f"{options.shape}-{round(options.active * 100)}"
    if not folder.exists():
        picompile("synth", "--shape", options.shape, "--active", options.active, "--seed", 0, "-o", folder)
    return folder


def _artifacts(options: argparse.Namespace) -> dict[tuple[str, str], Path]:
    model, artifacts = _checkpoint(options), {}
    for quant in options.quant:
        for predictor in options.predictor:
            output = Path(options.work) / f"{model.name}.{quant}.{predictor}"
            if not output.exists():
                picompile("compile", model, "-o", output, "--quant", quant, "--predictor", predictor, "--context", 2048)
            artifacts[quant, predictor] = output
    return artifacts


def _line(key: tuple[str, str, int], results: list[dict[str, Any]]) -> str:
    quant, predictor, threads = key
    median = {
        name: statistics.median(result[part][field] for result in results)
        for name, part, field in (
            ("decode", "decode", "tokens_per_s"),
            ("prefill", "prefill", "tokens_per_s"),
            ("bytes", "decode", "bytes_per_token"),
            ("share", "decode", "bandwidth_share"),
            ("firing", "decode", "firing_share"),
            ("computed", "decode", "computed_share"),
        )
    }
    speeds = (f"{median['decode']:.1f}", f"{median['prefill']:.1f}", f"{median['bytes'] / 1e6:.0f}")
    shares = (f"{median['share']:.0%}", f"{median['firing']:.1%}", f"{median['computed']:.1%}")
    return row(quant, predictor, threads, *speeds, *shares)


def main() -> None:
    options = _arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    artifacts = _artifacts(options)
    results: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for (quant, predictor), artifact in artifacts.items():
            for threads in options.threads:
                measured = picompile_json(
                    "bench", artifact, "-p", options.prompt, "-n", options.tokens, "-r", 1, "-t", threads
                )
                results.setdefault((quant, predictor, threads), []).append(measured)
    columns = ("format", "predictor", "threads", "decode tokens/s", "prefill tokens/s", "MB a token", "bandwidth")
    print(heading(*columns, "fire", "computed"))
    for key, rows in results.items():
        print(_line(key, rows))
    bandwidth = statistics.median(each["bandwidth_bytes_per_s"] for rows in results.values() for each in rows)
    print(f"\nMedians of {options.rounds} interleaved rounds; measured bandwidth {bandwidth / 1e9:.1f} GB/s (median).")


if __name__ == "__main__":
    main()
