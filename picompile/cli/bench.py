"""`picompile bench`: how fast an artifact is on this machine, and how fast its memory would let it be."""

import json
from collections.abc import Iterator, Mapping
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
    depth: Annotated[
        int | None,
        typer.Option(
            "-d",
            "--depth",
            metavar="N",
            min=0,
            help="Tokens in the cache before the prompt, and before the first decoded one. Default: none before the "
            "prompt, and the prompt before decoding.",
        ),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            "--batch",
            metavar="N",
            min=1,
            max=256,
            help="Sequences that are decoded together; the artifact must be compiled with so many --sequences.",
        ),
    ] = 1,
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

    Decoding is bound by memory: the bytes that a token must move, over the
    measured bandwidth, are the least time that it can take, the floor. The
    table says how near each kind of kernel comes to it. Figures are medians;
    a first round does not count.

    \b
    Examples:
      picompile bench build/tiny -p 128 -n 32 -r 3
      picompile bench build/tiny -p 1 -n 64 -d 64
      picompile bench build/tiny -t 2 --json
    """
    content = None if text is None else require_text_file(text)

    from picompile_runtime import Tokenizer, load, measure

    with progress() as shown:
        with shown.step("check and load"):
            engine = load(artifact, threads)
        with engine, shown.step("measure", repeats + 1) as advance:
            prompt, decode = fit_lengths(engine.context, prompt_tokens, decode_tokens, depth)
            ids = None if content is None else Tokenizer.of(engine.artifact).encode(content)
            if ids is not None and not ids:
                raise UsageError(f"{text}: no tokens in it")
            result = measure(
                engine, prompt, decode, repeats, ids, lambda done, total: advance(1), depth=depth, batch=batch
            )
    print(json.dumps(result, indent=2)) if json_output else _show(result)


def fit_lengths(
    context: int, prompt_tokens: int | None, decode_tokens: int | None, depth: int | None = None
) -> tuple[int, int]:
    """Lengths that fit the context: as asked for, or the defaults cut to what is left. Raises `UsageError`.

    With a `depth` each of them must fit behind it; without, decoding goes on behind the prompt.
    """
    if depth is not None:
        prompt = prompt_tokens or max(1, min(_PROMPT_TOKENS, context - depth))
        decode = decode_tokens or max(1, min(_DECODE_TOKENS, context - depth))
        if depth + max(prompt, decode) > context:
            what = f"{prompt} prompt tokens and {decode} decoded ones"
            raise UsageError(f"{what}, each behind {depth} others, do not fit the context of {context}")
        return prompt, decode
    prompt = prompt_tokens or max(1, min(_PROMPT_TOKENS, context - (decode_tokens or context // 2)))
    decode = decode_tokens or max(1, min(_DECODE_TOKENS, context - prompt))
    if prompt + decode > context:
        raise UsageError(f"{prompt} prompt tokens and {decode} decoded ones do not fit the context of {context}")
    return prompt, decode


def _show(result: Mapping[str, Any]) -> None:
    prefill, decode = result["prefill"], result["decode"]
    bandwidth, best = (format_bytes(result[f"bandwidth_{which}bytes_per_s"]) for which in ("", "best_"))
    several = "" if decode["batch"] == 1 else f", {decode['batch']} sequences together"
    print(f"prompt     {prefill['tokens_per_s']:9.1f} tokens/s ± {prefill['stdev']:.1f}")
    print(
        f"decode     {decode['tokens_per_s']:9.1f} tokens/s ± {decode['stdev']:.1f}, behind {decode['depth']}{several}"
    )
    print(
        f"floor      {decode['floor_tokens_per_s']:9.1f} tokens/s, of which decoding reaches "
        f"{decode['bandwidth_share']:.0%}: {format_bytes(decode['bytes_per_token'])} a token"
    )
    print(f"memory     {bandwidth}/s, at best {best}/s, read by {_threads(result['threads'])}")
    fired = "" if decode["firing_share"] is None else f"{decode['firing_share']:.1%} fired, "
    print(f"neurons    {fired}{decode['computed_share']:.1%} computed")
    print()
    print("\n".join(_table(decode)))


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _table(decode: Mapping[str, Any]) -> Iterator[str]:
    """A line for each kind of kernel, and for the time between them."""
    yield f"{'a token':16}{'MB':>9}{'ms':>9}{'GB/s':>9}{'floor ms':>10}{'of floor':>10}"
    left = 1 / decode["tokens_per_s"]
    for row in decode["kernels"]:
        seconds, floor = 1e3 * row["s_per_token"], 1e3 * row["floor_s_per_token"]
        left -= row["s_per_token"]
        speed, megabytes = row["bytes_per_s"] / 1e9, row["bytes_per_token"] / 1e6
        yield f"{row['kind']:16}{megabytes:9.2f}{seconds:9.3f}{speed:9.1f}{floor:10.3f}{row['floor_share']:10.0%}"
    yield f"{'between them':16}{'':9}{1e3 * max(left, 0.0):9.3f}"
