"""The text of `picompile doctor`: this machine in plain words, the models that fit it, and what is missing."""

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from picompile.choices import planned_title
from picompile.quantities import format_bytes

if TYPE_CHECKING:
    from picompile.cli.doctor_findings import Finding
    from picompile.machine.measured import LocalMachine
    from picompile.placement.estimates import Estimate

_WIDTH = 79
_INDENT = 4
# Programs that run or wait, in the mean of a minute, for each core.
_BUSY_LOAD = 0.5


def summary(local: "LocalMachine", available_bytes: int) -> Iterator[str]:
    """Yield the lines that describe this machine."""
    machine, gpu = local.machine, local.machine.gpu
    cores = f"{machine.threads} core{'s' if machine.threads > 1 else ''}"
    yield f"processor  {machine.cpu}, {cores}"
    yield f"memory     {format_bytes(machine.memory_bytes)}, {format_bytes(available_bytes)} available"
    yield f"speed      {format_bytes(local.host.bytes_per_s)}/s read from memory"
    yield from _busy(machine.threads)
    if gpu is None or local.speed is None:
        yield "GPU        none that picompile can use"
    else:
        free, speed = format_bytes(local.speed.free_bytes), format_bytes(local.speed.copy_bytes_per_s)
        yield f"GPU        {gpu.name}, {format_bytes(gpu.total_bytes)}, {free} free, {speed}/s"
    yield ""
    yield from _filled(
        "To write a token, a model reads its weights from memory once, so the speed of memory decides how fast it "
        "answers. A mixture of experts reads only the experts that it chooses for the token. The speed above is the "
        "best that was measured here; other programs lower it while they run."
    )


def _busy(cores: int) -> Iterator[str]:
    """Yield a note if other programs have been using the machine, so that its memory was measured too slow."""
    if os.getloadavg()[0] >= _BUSY_LOAD * cores:
        yield "           (the machine is busy, so this may be too low: run doctor again)"


def models_table(estimates: Sequence["Estimate"]) -> Iterator[str]:
    """Yield the lines of the table of models, none without models."""
    if not estimates:
        return
    first = estimates[0]
    weights = f"about 4 bits ({planned_title(None, first.quant)})"
    yield from _filled(
        f"Predicted for models in {weights}, a context of {first.context:,} tokens and {first.tokens:,} of them filled:"
    )
    yield ""
    yield f"{'model':18} {'parameters':>10} {'experts':>10} {'memory':>8} {'tokens/s':>9}"
    for each in estimates:
        experts = f"{each.chosen} of {each.experts}" if each.experts else ""
        speed = "-" if each.tokens_per_s is None else f"{each.tokens_per_s:.1f}"
        parameters, needed = f"{each.parameters / 1e9:.1f} B", format_bytes(each.needed_bytes)
        yield f"{each.model:18} {parameters:>10} {experts:>10} {needed:>8} {speed:>9}  {each.verdict}"
    yield ""
    yield from _filled(
        f"Models may take {format_bytes(first.available_bytes)} of the memory that is available now. Speeds are "
        "predictions, from the bytes that a token reads; no model was run. fast: 10 tokens/s or more. usable: 3 or "
        "more. picompile bench measures a compiled model. picompile plan --shape NAME predicts one of these models in "
        "detail, also for other machines (picompile targets)."
    )


def missing_parts(findings: Iterable["Finding"]) -> Iterator[str]:
    """Yield the lines that say what this machine lacks, each with the command that mends it."""
    lacking = [finding for finding in findings if finding.missing]
    if not lacking:
        yield "Nothing is missing: models can be compiled and run here."
        return
    yield "Missing:"
    for finding in lacking:
        yield f"✗ {finding.missing}"
        if finding.mend:
            yield f"{'':{_INDENT}}{finding.mend}"


def details(findings: Iterable["Finding"]) -> Iterator[str]:
    """Yield every finding in a line of its own."""
    for finding in findings:
        yield f"{'✗' if finding.missing else ' '} {finding.name:20s} {finding.value}"


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False)
