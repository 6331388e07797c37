"""Damaged GGUF files as models, each in a process with little memory and time.

    python tests/attack/gguf_models.py [--number 300] [--seconds 600] [--seed 0]

A file must be refused in one line, or read to its end, tokenizer and tensors, within 5 seconds and 1 GiB beyond what
the libraries take. A process is a fork of this one, which has the libraries.
"""

import resource
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.attacks import attack, import_once, options, run_case
from helpers.gguf_architectures import ARCHITECTURE_EXAMPLES, save_architecture
from helpers.gguf_files import EXAMPLES, POWERINFER_EXAMPLES, byte_level_metadata, damaged, refusal, save_example

BOUND_S = 5
BOUND_BYTES = 1 << 30
_EXAMPLES = [
    *((partial(save_example, name=name), name) for name in EXAMPLES),
    *((partial(save_example, name=name, powerinfer=True), f"{name} of PowerInfer") for name in POWERINFER_EXAMPLES),
    *((partial(save_architecture, name=name), name) for name in ARCHITECTURE_EXAMPLES),
]


def read(file: Path) -> str:
    """Read a file with little memory and time: a case for `run_case`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = pages * resource.getpagesize() + BOUND_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (BOUND_S, BOUND_S + 1))
    line = refusal(file)
    return "read" if line is None else f"refused\n{line}"


def main() -> int:
    found = options(__doc__, 300)
    torch.set_num_threads(1)
    import_once()
    with tempfile.TemporaryDirectory() as folder:

        def case(seed: int) -> tuple[str, str | None]:
            save, name = _EXAMPLES[seed % len(_EXAMPLES)]
            file = save(Path(folder), type_name="Q8_0", **byte_level_metadata())
            what, changed = list(damaged(file, 6, seed))[seed // len(_EXAMPLES) % 6]
            file.write_bytes(changed)
            ended = run_case(lambda: read(file), 4 * BOUND_S)
            is_wrong = ended.is_fault or ended.seconds > BOUND_S or not ended.detail.isprintable()
            told = f"{name}, {what}: {ended.word} in {ended.seconds:.1f} s: {ended.detail[-600:]}"
            return ended.word, told if is_wrong else None

        return 1 if attack(case, found.number, found.seconds, found.seed).failures else 0


if __name__ == "__main__":
    sys.exit(main())
