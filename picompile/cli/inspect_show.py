"""The contents of an artifact, as `picompile inspect` shows them; for an accelerator its memory and kernels."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from picompile.cli.accuracy_show import comparison_text, reported, show_comparison
from picompile.cli.plan_show import size, three_digits
from picompile.cli.skipping_show import skipping_text
from picompile.cli.tables import print_table
from picompile.cli.weights_show import weights_text
from picompile.quantities import format_bytes
from picompile_runtime import ArtifactError, MachineError, RequestError
from picompile_runtime.artifact.fields import parse_object
from picompile_runtime.artifact.interfaces import choose_variant
from picompile_runtime.artifact.manifest import AcceleratorCode, Manifest, read_manifest
from picompile_runtime.artifact.program import Program
from picompile_runtime.artifact.program_file import read_program
from picompile_runtime.artifact.weights import read_header
from picompile_runtime.devices.cuda.module import read_images
from picompile_runtime.devices.memory import Tensor, map_file
from picompile_runtime.engine.layout import weights_of

_WIDTH = 120
_MEMORY_TITLES = {"accelerator": "on accelerator", "host": "on the host", "shared": "shared memory"}
# The objects of an artifact's report that are shown.
_REPORTED = ("accuracy", "checkpoint_accuracy", "skipping", "rounding", "weight_formats", "plan")
_RESOURCES = ("registers", "local_bytes", "shared_bytes")


def collect_device(
    folder: Path, manifest: Manifest, program: Program, tensors: Mapping[str, Tensor]
) -> dict[str, Any] | None:
    """Return what `--json` shows of the accelerator, None without one. Raise `ArtifactError`."""
    code = manifest.accelerator
    if code is None:
        return None
    return {
        "kind": code.kind,
        "sm": code.sm or None,
        "code": [variant.isa for variant in code.variants],
        "memory_bytes": _memory(program, tensors),
        "kernels": list(_kernels(folder, code)) if "launches" in code.files else [],
    }


def _memory(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Return the bytes in each memory. Streamed weights are in the host's, where the accelerator reads them."""
    used, kept = weights_of(program, "accelerator"), weights_of(program, "host")
    arenas = {
        "accelerator": program.accelerator_arena_bytes,
        "host": program.arena_bytes,
        "shared": program.shared_arena_bytes,
    }
    weights = {
        "accelerator": sum(tensors[name].size_bytes for name in used if name not in program.streamed),
        "host": sum(tensors[name].size_bytes for name in kept),
        "shared": 0,
    }
    return {
        memory: {"weights": weights[memory], **_state_bytes(program, memory), "workspace": arenas[memory]}
        for memory in arenas
    }


def _state_bytes(program: Program, *memories: str) -> dict[str, int]:
    """Return the bytes of the KV cache in `memories` and, if there is any, of recurrent state."""
    found = {"positional": 0, "recurrent": 0}
    for name, tensor in program.state.items():
        if program.memories["state", name] in memories:
            found[tensor.kind] += tensor.size_bytes
    recurrent = {"recurrent_state": found["recurrent"]} if found["recurrent"] else {}
    return {"kv_cache": found["positional"], **recurrent}


def _kernels(folder: Path, code: AcceleratorCode) -> Iterator[dict[str, Any]]:
    """Yield an entry for each launch: its grid and block, and the resources that the compiler reports."""
    path = folder / code.files["launches"]
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{folder}: incomplete ({error}); compile the model again") from error
    entries = parse_object(text, str(path)).object("kernels")
    for name, launches in read_images(text, b"", b"", str(path)).kernels.items():
        for launch, fields in zip(launches, entries.objects(name), strict=True):
            resources = {key: fields.integer(key) for key in _RESOURCES}
            extents = {"grid": list(launch.grid), "block": list(launch.block)}
            yield {"kernel": name, "symbol": launch.symbol, **extents, **resources}


def accelerator_rows(device: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines on the accelerator for the table of facts."""
    if sm := device["sm"]:
        yield "accelerator", f"GPU of compute capability {sm // 10}.{sm % 10}; newer ones by PTX"
    elif device["code"]:
        yield "accelerator", f"a second partition of the CPU: {', '.join(device['code'])}"
    else:
        yield "accelerator", device["kind"]
    for memory, parts in device["memory_bytes"].items():
        held = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts.items() if size]
        yield _MEMORY_TITLES[memory], ", ".join(held) or "nothing"


def show_kernels(kernels: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a line for each launch on the GPU."""
    table = Table(box=None, pad_edge=False)
    table.add_column("launch", overflow="fold")
    for title in ("blocks", "threads", "registers", "local B", "shared B"):
        table.add_column(title, justify="right")
    for kernel in kernels:
        blocks = " x ".join(str(extent) for extent in kernel["grid"] if extent > 1) or "1"
        figures = [str(kernel[key]) for key in _RESOURCES]
        table.add_row(kernel["symbol"], blocks, str(kernel["block"][0]), *figures)
    # Each launch is one line, even if the width of the terminal is not known.
    print_table(table, _WIDTH)


def collect(folder: Path) -> dict[str, Any]:
    """Return everything that `inspect --json` prints. Raise `ArtifactError`."""
    manifest = read_manifest(folder)
    program, tensors = _program(folder)
    report = reported(folder)
    return {
        "artifact": str(folder),
        "model": dict(manifest.model),
        "quant": manifest.quant,
        "predictor": manifest.predictor,
        "kv_dtype": manifest.kv_dtype,
        "context": manifest.context,
        "chunk": manifest.chunk,
        "sequences": manifest.sequences,
        "code": _code(manifest),
        "accelerator": collect_device(folder, manifest, program, tensors),
        "files": {name: entry.size_bytes for name, entry in manifest.files.items()},
        "memory_bytes": {
            "weights": manifest.files["weights.safetensors"].size_bytes,
            **_state_bytes(program, "host", "accelerator"),
            "workspace": program.arena_bytes + program.accelerator_arena_bytes + program.shared_arena_bytes,
        },
        "token_bytes": _bytes_by_operator(program),
        "kernels": len({call.kernel for calls in program.functions.values() for call in calls}),
        "calls": {name: len(calls) for name, calls in program.functions.items()},
        "ffn": [
            {"layer": part.layer, "part": part.part, "neurons": part.neurons, "predictor": part.predictor}
            | ({"experts": part.experts, "chosen": part.chosen} if part.experts else {})
            for part in program.ffn
        ],
        "parts": _parts(program, str(folder / "program.json")),
        **{what: report.get(what) for what in _REPORTED},
    }


def _code(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the code for each instruction set, the best first; `used_here` marks the one that this machine runs."""
    chosen = None
    with suppress(MachineError, RequestError):
        chosen = choose_variant(manifest.code)
    return [
        {**asdict(variant), "bytes": manifest.files[variant.file].size_bytes, "used_here": variant == chosen}
        for variant in manifest.code
    ]


def _program(folder: Path) -> tuple[Program, Mapping[str, Tensor]]:
    """Return the program, and the tensors of the weights file by name."""
    weights, program = folder / "weights.safetensors", folder / "program.json"
    try:
        with weights.open("rb") as file:
            tensors = read_header(map_file(file.fileno()), str(weights))
        return read_program(program.read_bytes(), tensors, str(program)), tensors
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ArtifactError(f"{folder}: incomplete ({error}); compile the model again") from error


def _parts(program: Program, where: str) -> dict[str, dict[str, int]]:
    """Return the sizes of the feed-forward blocks together, or of the hot and the cold parts if they are split."""
    # The parts are in the order of their calls.
    sizes = [call.weight_bytes for call in program.functions["decode"] if call.op == "ffn"]
    if len(sizes) != len(program.ffn):
        raise ArtifactError(f"{where}: {len(sizes)} calls for {len(program.ffn)} parts of feed-forward blocks")
    totals: dict[str, Counter[str]] = {}
    for part, weight_bytes in zip(program.ffn, sizes, strict=True):
        totals.setdefault(part.part, Counter()).update(blocks=1, neurons=part.neurons, weight_bytes=weight_bytes)
    return {name: dict(total) for name, total in totals.items()}


def _bytes_by_operator(program: Program) -> dict[str, int]:
    """Return the bytes of weights that a decoded token reads if every neuron is computed, by operator."""
    totals: Counter[str] = Counter()
    for call in program.functions["decode"]:
        totals[call.op] += call.weight_bytes
    return {op: read for op, read in totals.most_common() if read}


def show(facts: Mapping[str, Any]) -> None:
    """Print what `collect` returned as tables."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(facts):
        table.add_row(name, value)
    print_table(table)
    if facts["checkpoint_accuracy"] is not None:
        print()
        show_comparison(facts["checkpoint_accuracy"])
    if facts["accelerator"] is not None and facts["accelerator"]["kernels"]:
        print()
        show_kernels(facts["accelerator"]["kernels"])


def _rows(facts: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    model, memory = facts["model"], facts["memory_bytes"]
    yield "artifact", facts["artifact"]
    yield "model", f"{model['name']} ({model['architecture']}), {model['parameters'] / 1e6:,.1f} M parameters"
    yield "shape", f"{model['layers']} layers, hidden {model['hidden']}, ffn {model['ffn']} ({model['activation']})"
    yield "attention", f"{model['heads']} heads of {model['head_dim']}, {model['kv_heads']} key/value heads"
    yield "vocabulary", f"{model['vocab']:,}"
    yield "weights", f"{facts['quant']}, {format_bytes(memory['weights'])}"
    if facts["weight_formats"]:
        yield "matrices", weights_text(facts["weight_formats"], facts["rounding"])
    yield "predictor", _predictor_text(facts)
    several = "" if facts["sequences"] == 1 else f"{facts['sequences']} sequences of "
    if facts["checkpoint_accuracy"] is not None:
        yield "accuracy", comparison_text(facts["checkpoint_accuracy"])
    if facts["skipping"] is not None:
        yield "left out", skipping_text(facts["skipping"])
    yield "context", f"{several}{facts['context']} tokens, prompts in chunks of {facts['chunk']}"
    yield "kv cache", f"{facts['kv_dtype']}, {format_bytes(memory['kv_cache'])} when full"
    if "recurrent_state" in memory:
        yield "recurrent state", format_bytes(memory["recurrent_state"])
    yield "workspace", format_bytes(memory["workspace"])
    yield "feed-forward", _ffn_text(facts["parts"])
    if experts := Counter((part["chosen"], part["experts"]) for part in facts["ffn"] if "experts" in part):
        yield "experts", _experts_text(experts)
    if facts["plan"] is not None:
        yield "plan", _plan_text(facts["plan"])
    yield "read per token", ", ".join(f"{op} {format_bytes(read)}" for op, read in facts["token_bytes"].items())
    yield "program", f"{facts['calls']['decode']} calls a token, {facts['kernels']} kernels"
    yield "runs on", "\n".join(map(_code_text, facts["code"]))
    if facts["accelerator"] is not None:
        yield from accelerator_rows(facts["accelerator"])
    yield "files", f"{len(facts['files']) + 1}, {format_bytes(sum(facts['files'].values()))}"


def _code_text(code: Mapping[str, Any]) -> str:
    used = " (used here)" if code["used_here"] else ""
    return f"{code['isa']}{used}: {code['machine']} with {', '.join(code['features'])}"


def _predictor_text(facts: Mapping[str, Any]) -> str:
    kinds = Counter(part["predictor"] for part in facts["ffn"])
    text = ", ".join(f"{kind} ({count} blocks)" for kind, count in sorted(kinds.items()))
    accuracy = facts["accuracy"]
    return text if accuracy is None else f"{text}, perplexity {accuracy['relative_change']:+.3%} by them"


def _experts_text(blocks: Mapping[tuple[int, int], int]) -> str:
    """Return how many experts a token chooses in how many blocks: neurons and bytes are those of the chosen ones."""
    texts = (f"{chosen} of {experts} ({count} blocks)" for (chosen, experts), count in sorted(blocks.items()))
    return f"a token chooses {', '.join(texts)}"


def _ffn_text(parts: Mapping[str, Mapping[str, int]]) -> str:
    return ", ".join(
        f"{name}: {part['blocks']} blocks, {part['neurons']:,} neurons, {format_bytes(part['weight_bytes'])}"
        for name, part in parts.items()
    )


def _plan_text(plan: Mapping[str, Any]) -> str:
    """Return the target, budget and speed of the plan that split the blocks, even if the report is damaged."""
    try:
        budget, speed = size(plan["accelerator_budget_bytes"]), three_digits(plan["tokens_per_s"])
        return f"for {plan['target']}, {budget} of its GPU memory: {speed} tokens/s predicted, not measured"
    except (KeyError, TypeError, ValueError):
        return "cannot be read"
