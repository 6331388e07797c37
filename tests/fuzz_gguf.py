"""Forged GGUF files through the command line, from end to end.

    python tests/fuzz_gguf.py [--number 200] [--seconds 600] [--seed 0] [--model MODEL]

A changed file must be refused in one line with exit code 2, leave nothing, and take no more than a second of processor
time beyond the whole file; or, where the change is in data or in metadata that nobody reads, give the same values.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from helpers.attacks import Outcome, attack, command, import_once, options, refusal_fault, run_case
from helpers.powerinfer_files import Mutation, Sizes, mutations, random_predictors, write_gguf
from helpers.support import BUNDLED_MODEL

BOUND_S = 1.0
LIMIT_S = 120.0


def main() -> int:
    found = options(__doc__, 200, model=str(BUNDLED_MODEL))
    import_once()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, changed = folder / "model.powerinfer.gguf", folder / "forged.gguf"
        write_gguf(file, random_predictors(_sizes(Path(found.model)), found.seed), threshold=0.25)

        def run(file: Path, output: Path) -> Outcome:
            words = ("import-predictors", str(file), "--model", found.model, "-o", str(output))
            return run_case(lambda: command(words, folder), LIMIT_S)

        whole = run(file, folder / "whole")
        if whole.word != "0":
            print(f"the file itself is not imported: {whole.detail}")
            return 1
        expected = load_file(folder / "whole" / "predictors.safetensors")
        # All forged numbers are among 400 changes.
        some = lru_cache(1)(lambda seed: mutations(file, 400, seed))

        def case(seed: int) -> tuple[str, str | None]:
            mutation = some(seed // 400)[seed % 400]
            changed.write_bytes(mutation.data)
            output = folder / f"out{seed}"
            ended = run(changed, output)
            fault = _fault(mutation, output, expected, ended, whole.processor_s)
            way = "imported" if ended.word == "0" else "refused"
            return way, fault and f"{mutation.name}: {fault}: {ended.detail.strip()}"

        return 1 if attack(case, found.number, found.seconds, found.seed).failures else 0


def _sizes(model: Path) -> Sizes:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    ranks = [32 + 16 * (layer % 2) for layer in range(config["num_hidden_layers"])]
    return Sizes(config["hidden_size"], config["intermediate_size"], ranks)


def _fault(
    mutation: Mutation, output: Path, expected: Mapping[str, np.ndarray], ended: Outcome, usual_s: float
) -> str | None:
    if ended.word == "2":
        if output.exists():
            return "left something behind"
        late = ended.processor_s > usual_s + BOUND_S
        return refusal_fault(2, ended.detail) or ("refused too late" if late else None)
    if ended.word != "0":
        return f"ended with {ended.word}"
    found = load_file(output / "predictors.safetensors")
    matrices = {name for name in expected if not name.endswith(".bias")}
    if not matrices <= found.keys() <= expected.keys() or not all(np.isfinite(v).all() for v in found.values()):
        return "imported something else"
    same = all(np.array_equal(values, expected[name]) for name, values in found.items())
    return None if same or not mutation.harmless else "imported other values"


if __name__ == "__main__":
    sys.exit(main())
