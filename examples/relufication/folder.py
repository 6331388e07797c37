"""The Hugging Face folder of the copy, and the measurements beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

from picompile.errors import UsageError
from picompile.frontend.config import quiet_transformers
from picompile.frontend.tokenizer.read import read_tokenizer
from picompile.output import reserve
from picompile.output.files import json_bytes
from relufication.pair import Pair

MEASUREMENTS = "relufication.json"


def check_output(out: Path) -> None:
    """Raise `UsageError` where something is that no earlier run has made: it is not replaced."""
    if out.exists() and not (out / MEASUREMENTS).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out}: exists and has no {MEASUREMENTS}, so it is not replaced; give another --out")


def save_folder(model: Path, pair: Pair, measurements: Mapping[str, Any], out: Path) -> None:
    """Write the copy with float16 weights, the original's tokenizer, and the measurements: all of it or nothing."""
    with (
        reserve(out, overwrite=True, parents=True, check=lambda: check_output(out)) as place,
        place.folder() as folder,
        quiet_transformers(),
    ):
        logging.disable_progress_bar()
        pair.copy.half().save_pretrained(folder)  # type: ignore[operator]
        read_tokenizer(model, pair.vocabulary).write(folder)
        measured = folder / MEASUREMENTS
        measured.write_bytes(json_bytes(measurements))
        # safetensors writes weights that only their owner can read; large ones to several files.
        for weights in folder.glob("*.safetensors"):
            weights.chmod(measured.stat().st_mode)


def table(records: list[dict[str, Any]], text: str) -> str:
    """The measurements on one text in Markdown."""
    lines = [
        "| stage | tokens | minutes | perplexity | KL, nats a token | firing |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    first = records[0]["text"][text]
    lines.append(f"| original | | | {math.exp(first['original_loss']):.2f} | 0 | |")
    for record in records:
        found = record["text"][text]
        firing, minutes = sum(found["firing"]) / len(found["firing"]), record["seconds"] / 60
        lines.append(
            f"| {record['stage']} | {record['tokens']:,} | {minutes:.0f} | {math.exp(found['loss']):.2f} "
            f"| {found['kl']:.4f} | {firing:.1%} |"
        )
    return "\n".join(lines)
