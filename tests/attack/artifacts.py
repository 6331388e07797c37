"""Attack on artifacts: thousands of damaged copies are loaded and run, with the hashes of before and with right ones.

python tests/attack/artifacts.py --number 5000 --seed 0     or --seconds 600

With the hashes of before each must be refused. With right ones, each must be refused or run: no signal, no hang beyond
5 s, no exception but the runtime's own. A failure says its seed, and `--seed SEED --number 1` repeats it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from artifact_mutations import copy_artifact, damage_content, damage_files
from children import Outcome, run_case

LIMIT_S = 5.0
CHUNK, SEQUENCES, CONTEXT = 16, 3, 64


@dataclass(frozen=True)
class Base:
    """A whole artifact, and how it is loaded."""

    name: str
    folder: Path
    mapped: bool


def make_bases(folder: Path) -> None:
    """Compile models with everything that programs have: masks, batches, caches in bytes, positions, a hot device."""
    import numpy as np

    from helpers.families import build, save
    from helpers.support import compile_for_test, save_byte_tokenizer, save_tiny_llama
    from test_prediction import write_predictors

    llama, opt, text = folder / "llama", folder / "opt-model", folder / "text.txt"
    save_tiny_llama(llama, intermediate_size=96)
    save("opt-pre-norm", build("opt-pre-norm"), opt)
    save_byte_tokenizer(opt, json.loads((opt / "config.json").read_text())["vocab_size"])
    text.write_text("".join(f"line {number}: def f(x): return x ** {number}\n" for number in range(60)))
    predictors = write_predictors(llama, folder / "predictors", bias=0.0)
    sizes = {"context": CONTEXT, "chunk": CHUNK}
    learned = {
        "predictor": "learned",
        "predictors": predictors,
        "calibration": (text,),
        "gate": None,
        "gate_tokens": 64,
    }
    several = {"sequences": SEQUENCES, **learned, **sizes}
    random = np.random.default_rng(0)
    hot = {layer: sorted(random.permutation(96)[:40].tolist()) for layer in range(2)}
    compile_for_test(llama, folder / "masked", quant="f16", **several)
    compile_for_test(opt, folder / "opt", quant="q8", kv_dtype="q8", **sizes)
    compile_for_test(llama, folder / "hybrid", quant="f16", hot=hot, hot_device="cpu", **several)


def find_bases(folder: Path) -> list[Base]:
    """The artifacts that `make_bases` made, each with weights in memory and mapped; the hybrid one as often as both."""
    names = ("masked", "opt", "hybrid", "hybrid")
    return [Base(name, folder / name, mapped) for mapped in (False, True) for name in names]


def use(folder: Path) -> str:
    """Load an artifact and do everything with it that a user does. Returns how that went."""
    import numpy as np

    import picompile_runtime as runtime
    from picompile_runtime.sampling import tokenizer

    try:
        with runtime.load(folder, threads=2) as engine:
            vocab = engine.vocab
            ids = [(7 * place + 3) % min(vocab, 300) for place in range(3 * CHUNK)]
            count = min(2 * engine.chunk + 3, engine.context - 8, len(ids))
            if count < 2:
                return "refused\nno room"
            engine.prefill(ids[:count])
            for token in ids[:3]:
                engine.decode(token)
            engine.rewind(1)
            for logits in engine.score(ids[: count - 1]):
                np.isfinite(logits).all()
            if engine.sequences > 1:
                engine.reset(1)
                engine.prefill(ids[:4], 1)
                engine.copy(1, 0)
                engine.decode_sequences(ids[:2], [1, 0])
                engine.read_sequences(ids[:2], [0, 1])
            engine.firing()
            engine.read([ids[0]])
            engine.reset()
            words = tokenizer.Tokenizer.of(engine.artifact)
            list(runtime.generate(engine, words, "some text", runtime.SamplingParams(seed=1), max_tokens=4))
            return f"ran\n{len(engine.artifact.eos_token_ids)}"
    except runtime.PicompileRuntimeError as error:
        assert "\n" not in str(error) and str(error)
        return f"{'refused' if error.exit_code != 1 else 'failed in a kernel'}\n{type(error).__name__}: {error}"


def check(base: Base, keeps_hashes: bool, seed: int, folder: Path) -> tuple[str, Outcome]:
    """Damage a copy of `base` and use it; return what was done and how it ended."""
    target = folder / "case"
    shutil.rmtree(target, ignore_errors=True)
    copy_artifact(base.folder, target)
    random = Random(seed)
    told = (damage_files if keeps_hashes else damage_content)(target, random)

    def case() -> str:
        os.environ["PICOMPILE_MMAP"] = str(int(base.mapped))
        return use(target)

    return told, run_case(case, LIMIT_S)


def run(number: int | None, seconds: float | None, seed: int, bases: list[Base], folder: Path) -> Counter[str]:
    """Try `number` cases, or as many as `seconds` allow, from `seed` on. Print failures; return counts of outcomes."""
    counts: Counter[str] = Counter()
    end = None if seconds is None else time.monotonic() + seconds
    at, slowest = 0, 0.0
    while (number is None or at < number) and (end is None or time.monotonic() < end):
        case_seed = seed + at
        keeps_hashes = bool(case_seed % 2)
        base = bases[case_seed // 2 % len(bases)]
        told, outcome = check(base, keeps_hashes, case_seed, folder)
        regime = "old hashes" if keeps_hashes else "right hashes"
        is_accepted = keeps_hashes and outcome.word != "refused"
        counts[f"{regime}: {outcome.word}"] += 1
        if outcome.is_fault or is_accepted:
            counts["failures"] += 1
            where = f"seed {case_seed}: {base.name}, mapped {base.mapped}, {regime}"
            print(f"{where}, {told}: {outcome.word} {outcome.detail}", flush=True)
        at, slowest = at + 1, max(slowest, outcome.seconds)
    print(f"{at} cases, slowest {slowest:.1f} s: {dict(sorted(counts.items()))}", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bases", type=Path, help="folder of bases that an earlier run made, or for this one to make")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="picompile-attack-") as own:
        os.environ["XDG_CACHE_HOME"] = str(Path(own) / "cache")
        folder = options.bases or Path(own) / "bases"
        if not folder.exists():
            folder.mkdir(parents=True)
            make_bases(folder)
        bases = find_bases(folder)
        number = options.number if options.number or options.seconds else 1000
        counts = run(number, options.seconds, options.seed, bases, folder)
    return 1 if counts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
