"""Attack on artifacts: thousands of damaged copies are loaded and run, with the hashes of before and with right ones.

python tests/attack/artifacts.py --number 5000 --seed 0     or --seconds 600

With the hashes of before each must be refused. With right ones, each must be refused or run: no signal, no hang beyond
5 s, no exception but the runtime's own. A failure says its seed, and `--seed SEED --number 1` repeats it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from artifact_mutations import copy_artifact, damage_content, files_of

from helpers.attacks import Report, attack, damage_file, options, run_case

LIMIT_S = 5.0
CHUNK, SEQUENCES, CONTEXT = 16, 3, 64


@dataclass(frozen=True)
class Base:
    """A whole artifact, and how it is loaded."""

    name: str
    folder: Path
    mapped: bool


def make_bases(folder: Path) -> None:
    """Compile models with everything that programs have: masks, batches, caches in bytes, positions, an accelerator."""
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
    learned = {"predictor": "learned", "predictors": predictors, "calibration": (text,), "accuracy_bound": None}
    several = {"sequences": SEQUENCES, "check_tokens": 64, **learned, **sizes}
    random = np.random.default_rng(0)
    hot = {layer: sorted(random.permutation(96)[:40].tolist()) for layer in range(2)}
    compile_for_test(llama, folder / "masked", quant="f16", **several)
    compile_for_test(opt, folder / "opt", quant="q8", kv_dtype="q8", **sizes)
    compile_for_test(llama, folder / "hybrid", quant="f16", hot=hot, accelerator="cpu", **several)


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


def damage(folder: Path, keeps_hashes: bool, random: Random) -> str:
    """Damage an artifact in place; return what was done."""
    if not keeps_hashes:
        return damage_content(folder, random)
    files = [folder / name for name in files_of(folder)]
    chosen = random.choice([*files, folder / "manifest.json", folder / "program.json"])
    return damage_file(chosen, files, random)


def run(bases: list[Base], folder: Path, number: int | None, seconds: float | None, seed: int) -> Report:
    """Damage copies of `bases` and use them, every second one with the hashes of before."""

    def case(seed: int) -> tuple[str, str | None]:
        keeps_hashes, base = bool(seed % 2), bases[seed // 2 % len(bases)]
        target = folder / "case"
        shutil.rmtree(target, ignore_errors=True)
        copy_artifact(base.folder, target)
        told = damage(target, keeps_hashes, Random(seed))

        def work() -> str:
            os.environ["PICOMPILE_MMAP"] = str(int(base.mapped))
            return use(target)

        outcome = run_case(work, LIMIT_S)
        regime = "old hashes" if keeps_hashes else "right hashes"
        is_wrong = outcome.is_fault or (keeps_hashes and outcome.word != "refused")
        where = f"{base.name}, mapped {base.mapped}, {regime}, {told}: {outcome.word} {outcome.detail}"
        return f"{regime}: {outcome.word}", where if is_wrong else None

    return attack(case, number, seconds, seed)


def main() -> int:
    found = options(__doc__, 1000)
    with tempfile.TemporaryDirectory(prefix="picompile-attack-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        make_bases(folder)
        return 1 if run(find_bases(folder), folder, found.number, found.seconds, found.seed).failures else 0


if __name__ == "__main__":
    sys.exit(main())
