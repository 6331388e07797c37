"""`picompile run`: generate text."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from picompile.cli.checks import require_text_file
from picompile.cli.help import MORE
from picompile.cli.options import CompiledArgument, DebugOption
from picompile.cli.progress import progress
from picompile.errors import UsageError
from picompile.library.options import LibraryOptions
from picompile.quantities import parse_count, shortened
from picompile_runtime.run_options import RUN_OPTIONS

if TYPE_CHECKING:
    from picompile_runtime.engine.engine import Engine
    from picompile_runtime.sampling.generate import Generation, GenerationStats
    from picompile_runtime.sampling.sampler import SamplingParams


def run_command(
    model: CompiledArgument,
    *,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="What to continue; - reads it from stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="A file that holds the prompt.")
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option(
            "--ids",
            metavar="IDS",
            help="The prompt as token ids, as in 1,15,7; answers with ids.",
            rich_help_panel=MORE,
        ),
    ] = None,
    values: Annotated[dict[str, Any], RUN_OPTIONS],
    echo: Annotated[
        bool, typer.Option("--echo", help="Print the prompt before the text.", rich_help_panel=MORE)
    ] = False,
    library: LibraryOptions,
    debug: DebugOption = False,
) -> None:
    """Continue a prompt; the text appears as it is made.

    The same prompt, options and seed give the same text, with any number of
    threads. A prompt from a file or from stdin loses the line break at its end.

    \b
    Examples:
      picompile run Qwen/Qwen3-0.6B -p "The capital of France is" -n 16
      picompile run build/tiny -p "def read_lines(path):" -n 64
      echo "import os" | picompile run build/tiny -p - --temp 0.8 --seed 1
      picompile run build/tiny --ids 1,15,7 -n 8 --json
    """
    source = read_prompt(prompt, file, ids)

    from picompile.library import open_model
    from picompile.loading import load_engine
    from picompile_runtime.sampling.option_values import OptionValues

    sampling = OptionValues.of(RUN_OPTIONS, values)
    with ExitStack() as stack:
        with progress() as shown:
            opened = stack.enter_context(open_model(model, library, shown))
            engine = stack.enter_context(load_engine(opened.artifact, values["threads"], values["replan"], shown))
        generation = _start(
            engine,
            source,
            sampling.params(engine.artifact),
            max_tokens=values["max_tokens"],
            stop=values["stop"],
            draft=values["draft"],
        )
        if values["json"]:
            _print_json(generation, has_text=isinstance(source, str))
        else:
            _stream(generation, source if echo else "")


def read_prompt(prompt: str | None, file: Path | None, ids: str | None) -> str | list[int]:
    """Return the prompt as text or as token ids, from the one option that was given. Raise `UsageError`."""
    if sum(option is not None for option in (prompt, file, ids)) != 1:
        raise UsageError("give the prompt with one of -p TEXT, -p - (stdin), -f FILE and --ids IDS")
    if ids is not None:
        return _parse_ids(ids)
    if file is not None:
        return require_text_file(file).removesuffix("\n")
    if prompt != "-":
        return prompt or ""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text (byte {error.start})") from error


def _parse_ids(text: str) -> list[int]:
    ids = [parse_count(word) for word in text.replace(",", " ").split()]
    found = [number for number in ids if number is not None]
    if not ids or len(found) < len(ids):
        raise UsageError(f"--ids takes numbers from 0 on, separated by commas, not {shortened(repr(text))}")
    return found


def _start(
    engine: "Engine",
    source: str | list[int],
    params: "SamplingParams",
    max_tokens: int,
    stop: Sequence[str],
    draft: str,
) -> "Generation":
    from picompile_runtime import Tokenizer, generate

    if isinstance(source, str):
        return generate(
            engine,
            tokenizer=Tokenizer.of(engine.artifact),
            prompt=source,
            params=params,
            max_tokens=max_tokens,
            stop=stop,
            draft=draft,
        )
    if stop:
        raise UsageError("--stop is a text; it cannot be given with --ids")
    from picompile.cli.token_ids import generate_ids

    return generate_ids(engine, ids=source, params=params, max_tokens=max_tokens, draft=draft)


def _stream(generation: "Generation", before: str | list[int]) -> None:
    sys.stdout.write(before if isinstance(before, str) else "".join(f"{token}," for token in before))
    for piece in generation:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    _report(generation.stats)


def _print_json(generation: "Generation", *, has_text: bool) -> None:
    text = "".join(generation)
    result = {
        "text": text if has_text else None,
        "tokens": generation.tokens,
        "prompt_tokens": generation.prompt_tokens,
        "stats": asdict(generation.stats),
    }
    print(json.dumps(result, ensure_ascii=False))


def _report(stats: "GenerationStats") -> None:
    """Print the speed if stderr is a terminal."""
    if not sys.stderr.isatty():
        return
    drafted = f", {stats.accepted_tokens} of {stats.draft_tokens} drafted accepted" if stats.draft_tokens else ""
    print(
        f"[{stats.prompt_tokens} prompt tokens at {stats.prefill_tokens_per_s:.0f}/s, "
        f"{stats.generated_tokens} generated at {stats.decode_tokens_per_s:.1f}/s{drafted}, "
        f"ended by {stats.stop_reason}]",
        file=sys.stderr,
    )
