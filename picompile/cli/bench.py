"""`picompile bench`: how fast an artifact is on this machine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from picompile.cli.checks import format_bytes, require_text_file
from picompile.cli.options import ArtifactArgument, DebugOption, JsonOption, ThreadsOption
from picompile.cli.progress import progress
from picompile.errors import UsageError

_PROMPT_TOKENS = 512
_DECODE_TOKENS = 128


def bench_command(
    artifact: ArtifactArgument,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "-p", "--prompt-tokens", metavar="N", min=1, help="Length of the prompt. Default: 512, or what fits."
        ),
    ] = None,
    decode_tokens: Annotated[
        int | None,
        typer.Option("-n", "--decode-tokens", metavar="N", min=1, help="Tokens to decode. Default: 128, or what fits."),
    ] = None,
    repeats: Annotated[int, typer.Option("-r", "--repeats", metavar="N", min=1, help="Rounds that count.")] = 5,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read this text instead of random tokens; which neurons fire depends on it."),
    ] = None,
    threads: ThreadsOption = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure the speed of reading a prompt and of decoding.

    Decoding is bound by memory: the share of the machine's measured bandwidth
    says how near an artifact is to its limit. A first round does not count.

    \b
    Examples:
      picompile bench build/tiny -p 128 -n 32 -r 3
      picompile bench build/tiny -t 2 --json
    """
    content = None if text is None else require_text_file(text)

    from picompile_runtime import Tokenizer, load, measure

    with progress() as shown:
        with shown.step("check and load"):
            engine = load(artifact, threads)
        with engine, shown.step("measure", repeats + 1) as advance:
            lengths = fit_lengths(engine.context, prompt_tokens, decode_tokens)
            ids = None if content is None else Tokenizer.of(engine.artifact).encode(content)
            if ids is not None and not ids:
                raise UsageError(f"{text}: no tokens in it")
            result = measure(engine, *lengths, repeats, ids, lambda done, total: advance(1))
    print(json.dumps(result, indent=2)) if json_output else _show(result)


def fit_lengths(context: int, prompt_tokens: int | None, decode_tokens: int | None) -> tuple[int, int]:
    """Lengths that fit the context: as asked for, or the defaults cut to what is left. Raises `UsageError`."""
    prompt = prompt_tokens or max(1, min(_PROMPT_TOKENS, context - (decode_tokens or context // 2)))
    decode = decode_tokens or max(1, min(_DECODE_TOKENS, context - prompt))
    if prompt + decode > context:
        raise UsageError(f"{prompt} prompt tokens and {decode} decoded ones do not fit the context of {context}")
    return prompt, decode


def _show(result: Mapping[str, Any]) -> None:
    prefill, decode = result["prefill"], result["decode"]
    print(f"prompt     {prefill['tokens_per_s']:9.1f} tokens/s ± {prefill['stdev']:.1f}")
    print(f"decode     {decode['tokens_per_s']:9.1f} tokens/s ± {decode['stdev']:.1f}")
    print(f"reads      {format_bytes(decode['bytes_per_token'])} a token")
    print(
        f"bandwidth  {format_bytes(decode['bytes_per_token'] * decode['tokens_per_s'])}/s, "
        f"{decode['bandwidth_share']:.0%} of this machine's {format_bytes(result['bandwidth_bytes_per_s'])}/s"
    )
    print(f"neurons    {decode['firing_share']:.1%} fired, {decode['computed_share']:.1%} computed")
    print(f"threads    {result['threads']}")
