"""A whole model with trained weights: the one that comes with picompile, against the tokens that a CPU chose for it.

The pack has the artifact, prompts, and behind each the tokens that the artifact for CPUs decodes greedily, with how far
the best logit was ahead of the second. Here the same tokens are read, and each choice is compared: so one choice that
rounding decides spoils none of those behind it.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.gpu.engines import LIMIT, step_of
from picompile_runtime import Engine, load, measure

Result = dict[str, Any]

# The limit of errors where weights have 8 bits and fewer, as a share of the largest logit: a CPU rounds activations to
# bytes there (docs/adr, ADR 13).
_LIMIT_OF_BYTES = 1e-2


def check_bundled(
    pack: Path, work: Path, entry: Mapping[str, Any], threads: int, lengths: tuple[int, int, int], most: int | None
) -> Result:
    """Compare the tokens of all prompts, `most` of each if that is not None, and decode.

    `lengths` are the tokens of the prompt, the decoded ones, and rounds.
    """
    limit = LIMIT if entry["quant"] == "f16" else _LIMIT_OF_BYTES
    work.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=work) as text:
        with zipfile.ZipFile(pack / entry["file"]) as archive:
            archive.extractall(text)
        with load(Path(text), threads) as engine:
            found = [_compare(engine, _shortened(prompt, most), limit) for prompt in entry["prompts"]]
            speed = measure(engine, *lengths)
    rows, decided, same = (sum(each[key] for each in found) for key in ("rows", "decided", "same"))
    return {
        "tokens": {"rows": rows, "decided": decided, "same": same},
        # Tokens of each prompt before the first that is another one, whoever decides it.
        "agreed": [each["agreed"] for each in found],
        "is_right": same == decided > rows / 2 and all(each["is_finite"] for each in found),
        "tokens_per_s": speed["decode"]["tokens_per_s"],
        "prefill_tokens_per_s": speed["prefill"]["tokens_per_s"],
        "threads": threads,
        "step": step_of(speed),
        "bench": speed,
    }


def _shortened(prompt: Mapping[str, Any], most: int | None) -> Mapping[str, Any]:
    return {**prompt, "tokens": prompt["tokens"][:most], "margins": prompt["margins"][:most]}


def _compare(engine: Engine, prompt: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Hold the choices behind one prompt against those of the CPU."""
    engine.rewind(0)
    logits, chosen, is_finite = engine.prefill(prompt["prompt"]), [], True
    for token in prompt["tokens"]:
        chosen.append(int(logits.argmax()))
        is_finite = is_finite and bool(np.isfinite(logits).all())
        logits = engine.decode(token)
    same = np.array(chosen) == np.array(prompt["tokens"])
    decides = np.array(prompt["margins"]) > 2 * limit
    return {
        "rows": len(same),
        "decided": int(decides.sum()),
        "same": int((same & decides).sum()),
        "agreed": int(same.argmin()) if not same.all() else len(same),
        "is_finite": is_finite,
    }
