"""Forged GGUF files through the command line, from end to end, each with the time it took.

    python tests/fuzz_gguf.py [--count 200] [--imports 10] [--seed 0] [--model MODEL]

A changed file must be refused in one line with exit code 2 within a second, or, where the change is in data or in
metadata that nobody reads, give the same values. Exits with 1 where one does not. Every file that is refused goes
through the command line; of the others, whose import takes seconds, the first `--imports`, and the rest through the
guarded process alone.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from helpers.powerinfer_files import Mutation, Sizes, mutations, random_predictors, write_gguf
from picompile.errors import UsageError
from picompile.predictors.powerinfer import find_source, read_guarded
from picompile.predictors.powerinfer.importer import check_by_config

BOUND_S = 1.0
BUNDLED_MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny-reglu"


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "model.powerinfer.gguf"
        write_gguf(file, random_predictors(_sizes(options.model), options.seed), threshold=0.25)
        whole = _run(file, options.model, folder / "whole")
        if whole[1] != 0:
            print(f"the file itself is not imported: {whole[2]}")
            return 1
        expected = load_file(folder / "whole" / "predictors.safetensors")
        wrong, refused_s, most_s, imported_s, read = 0, [0.0], 0.0, [0.0], 0
        for number, mutation in enumerate(mutations(file, options.count, options.seed)):
            changed, output = folder / "forged.gguf", folder / f"out{number}"
            changed.write_bytes(mutation.data)
            values = _read(changed, options.model, folder)
            if values is not None and len(imported_s) > options.imports:
                read += 1
                fault = _fault_of_values(mutation, values, expected)
                print(f"          {mutation.name:45} {fault or 'read'}", flush=True)
            else:
                used_s = _processor_s()
                took_s, code, said = _run(changed, options.model, output)
                most_s = max(most_s, _processor_s() - used_s) if code else most_s
                fault = _fault(mutation, output, expected, took_s, code, said)
                (refused_s if code else imported_s).append(took_s)
                print(f"{took_s:6.2f} s  {mutation.name:45} {fault or said.strip() or 'imported'}", flush=True)
            wrong += fault is not None
        print(f"{len(refused_s) - 1} refused, the slowest in {max(refused_s):.2f} s, half of them within ", end="")
        print(
            f"{np.median(refused_s[1:] or [0]):.2f} s, none with more than {most_s:.2f} s of processor time; ", end=""
        )
        print(f"{len(imported_s) - 1} imported ", end="")
        print(f"in {np.median(imported_s[1:] or [0]):.1f} s, {read} only read; {wrong} wrong")
    return int(wrong > 0)


def _processor_s() -> float:
    """Return the processor seconds of all ended processes, which other work on the machine does not change."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read(file: Path, model: Path, folder: Path) -> dict[str, np.ndarray] | None:
    """Return the tensors from the guarded process, or None for a file that is refused."""
    try:
        source = find_source(file)
        check_by_config(file, source.shapes, model)
        return load_file(read_guarded(source, folder))
    except UsageError:
        return None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--imports", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    return parser.parse_args()


def _sizes(model: Path) -> Sizes:
    import json

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    ranks = [32 + 16 * (layer % 2) for layer in range(config["num_hidden_layers"])]
    return Sizes(config["hidden_size"], config["intermediate_size"], ranks)


def _run(file: Path, model: Path, output: Path) -> tuple[float, int, str]:
    """Seconds, exit code and what was said on stderr."""
    command = [sys.executable, "-m", "picompile", "import-predictors", file, "--model", model, "-o", output]
    started = time.perf_counter()
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    return time.perf_counter() - started, done.returncode, done.stderr


def _fault(
    mutation: Mutation, output: Path, expected: Mapping[str, np.ndarray], took_s: float, code: int, said: str
) -> str | None:
    if code == 2:
        one_line = said.startswith("error: ") and said.count("\n") == 1 and said.strip().isprintable()
        if not one_line:
            return f"WRONG: not one line: {said!r}"
        if output.exists():
            return "WRONG: left something behind"
        return None if took_s <= BOUND_S else f"WRONG: refused too late: {said.strip()}"
    if code != 0:
        return f"WRONG: exit code {code}: {said.strip()}"
    return _fault_of_values(mutation, load_file(output / "predictors.safetensors"), expected)


def _fault_of_values(
    mutation: Mutation, found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> str | None:
    matrices = {name for name in expected if not name.endswith(".bias")}
    if not matrices <= found.keys() <= expected.keys() or not all(np.isfinite(v).all() for v in found.values()):
        return "WRONG: imported something else"
    same = all(np.array_equal(values, expected[name]) for name, values in found.items())
    return None if same or not mutation.harmless else "WRONG: imported other values"


if __name__ == "__main__":
    sys.exit(main())
