"""Compiles every family for a hot device that is a partition of the CPU, with random hot neurons, and compares.

python tests/hybrid_matrix.py [--seed 0] [--variants llama-relu,qwen2] [--formats f16,q4]

Hot are 0, 0.1, 0.5, 0.9 and 1.0 of each layer's neurons, and shares drawn at random for each layer. Of each artifact

- all logits have the bits of the artifact that computes the same two parts one after the other, also where either side
  is delayed at random, and whatever was in memory before;
- greedy tokens are those of the artifact whose neurons are all together, wherever that one's two best logits are
  further apart than rounding. With q4 weights, factors of eight neurons are rounded together, which are another eight
  there: that comes to as much as the distance to eager PyTorch, see BYTES_TOLERANCE of test_end_to_end.py.

Prints a line for each; ends with 1 where something is wrong.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import picompile_runtime
from helpers.families import VARIANTS, build, save
from helpers.hybrid import (
    CHUNK,
    SEQUENCES,
    SHARES,
    SIDES,
    Choices,
    Naps,
    assert_same_bits,
    compare_choices,
    compile_naps,
    every_step,
    hot_sets,
    poison,
    shares_of,
)
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.frontend import Captured, load_model
from picompile.machine import TARGETS, find_native_target
from test_end_to_end import BYTES_TOLERANCE, TOLERANCE

PROMPTS, TOKENS = 6, 12
CONTEXT = 80
# How far apart two logits must be to stay in order, relative to the largest.
ROUNDING = {"f16": TOLERANCE, "q4": BYTES_TOLERANCE}


@dataclass(frozen=True)
class Model:
    """A captured model with its unpartitioned artifact's tokens, and the logits that they were chosen from."""

    captured: Captured
    quant: str
    folder: Path
    ids: list[int]

    def compile(self, name: str, **options: object) -> Path:
        """An artifact in the folder `name`, in the place of what was there."""
        sizes = {"chunk": CHUNK, "sequences": SEQUENCES, "context": CONTEXT, "overwrite": True}
        compile_model(self.captured, self.folder / name, CompileOptions(quant=self.quant, **sizes, **options))  # type: ignore[arg-type]
        return self.folder / name

    @property
    def prompts(self) -> list[list[int]]:
        return [self.ids[start : start + 1 + 2 * start] for start in range(PROMPTS)]


def choices(model: Model, whole: Path, hybrid: Path) -> Choices:
    """Return the result of `compare_choices`; raise AssertionError as it does, or if logits differ beyond rounding."""
    rounding = ROUNDING[model.quant]
    with picompile_runtime.load(whole, threads=2) as one, picompile_runtime.load(hybrid, threads=2) as other:
        found = compare_choices(one, other, model.prompts, TOKENS, rounding)
    assert found.apart <= rounding, f"logits are {found.apart:.1e} apart"
    return found


def problem_of(model: Model, hot: dict[int, list[int]], naps: Naps, seed: int) -> str | None:
    """Return the fault of the hybrid artifact; None if there is none."""
    apart, hybrid = model.compile("apart", hot=hot), model.compile("hybrid", hot=hot, hot_device="cpu")
    with picompile_runtime.load(apart, threads=2) as engine:
        expected, shares = every_step(engine, model.ids), [shares_of(engine, name) for name in ("decode", "batch")]
    for sides in ((), SIDES[:1], SIDES[1:], SIDES):
        with naps.delaying(sides, seed), picompile_runtime.load(hybrid, threads=2) as engine:
            poison(engine)
            try:
                assert_same_bits(every_step(engine, model.ids), expected)
            except (AssertionError, picompile_runtime.PicompileRuntimeError) as error:
                return f"delayed {'and '.join(sides) or 'nowhere'}: {error}"
            if shares != [shares_of(engine, name) for name in ("decode", "batch")]:
                return f"delayed {'and '.join(sides) or 'nowhere'}: other neurons are counted"
    return None


def sets_of(captured: Captured, random: np.random.Generator) -> Iterator[tuple[str, dict[int, list[int]]]]:
    """The hot sets of a model, each with its shares as text."""
    layers = captured.facts.layers
    for shares in (*((share,) * layers for share in SHARES), tuple(random.uniform(size=layers))):
        text = " ".join(f"{share:.2f}" for share in shares)
        yield text, dict(hot_sets(captured.facts.ffn, shares, random))


def check(model: Model, name: str, naps: Naps, seed: int, random: np.random.Generator) -> tuple[int, int, int]:
    """How many artifacts there were, how many were wrong, and of how many some choice is another."""
    whole, count, wrong, others = model.compile("whole"), 0, 0, 0
    for shares, hot in sets_of(model.captured, random):
        problem = problem_of(model, hot, naps, seed + count)
        try:
            found = choices(model, whole, model.folder / "hybrid")
            others += found.same < found.compared
            said = f"{found.same} of {found.compared} tokens, {found.clear} clear, logits {found.apart:.1e} apart"
        except AssertionError as error:
            problem, said = problem or "tokens", str(error)
        count, wrong = count + 1, wrong + (problem is not None)
        print(f"{name:17s} {model.quant:4s} hot {shares}: {problem or 'ok'}; {said}", flush=True)
    return count, wrong, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--formats", default="f16,q4")
    options = parser.parse_args()
    native = find_native_target()
    if native is not None:
        TARGETS["cpu"] = replace(TARGETS["cpu"], isas=native.isas)
    totals = run(options.variants.split(","), options.formats.split(","), options.seed)
    print("{} artifacts, {} wrong, {} where a choice between close logits is another".format(*totals))
    sys.exit(totals[1] > 0)


def run(variants: Sequence[str], formats: Sequence[str], seed: int) -> tuple[int, int, int]:
    """Checks every variant in every format; see `check`."""
    totals = np.zeros(3, int)
    for number, name in enumerate(variants):
        with tempfile.TemporaryDirectory(prefix="picompile-hybrid-") as made:
            folder, random = Path(made), np.random.default_rng([seed, number])
            naps = compile_naps(folder)
            save(name, build(name, seed), folder / "model")
            captured = load_model(folder / "model")
            ids = random.integers(0, captured.facts.vocab, 2 * CHUNK + 9).tolist()
            for quant in formats:
                totals += check(Model(captured, quant, folder, ids), name, naps, seed, random)
    return int(totals[0]), int(totals[1]), int(totals[2])


if __name__ == "__main__":
    main()
