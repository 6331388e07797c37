"""`picompile bench`: how fast an artifact is on this machine, and how fast its memory would let it be."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from picompile.cli.checks import require_text_file, require_trace_output, write_trace
from picompile.cli.options import CompiledArgument, DebugOption, DraftOption, JsonOption, ReplanOption, ThreadsOption
from picompile.cli.progress import progress
from picompile.errors import UsageError
from picompile.library.options import LibraryOptions
from picompile.quantities import format_bytes
from picompile_runtime.artifact import MOST_SEQUENCES

_TITLES = {"host": "a token, host", "accelerator": "accelerator"}
_PROMPT_TOKENS = 512
_DECODE_TOKENS = 128


def bench_command(
    artifact: CompiledArgument,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "-p", "--prompt-tokens", metavar="N", min=1, help="Tokens of the prompt. Default: 512, or as many as fit."
        ),
    ] = None,
    decode_tokens: Annotated[
        int | None,
        typer.Option(
            "-n", "--decode-tokens", metavar="N", min=1, help="Tokens to decode. Default: 128, or as many as fit."
        ),
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
    sequences: Annotated[
        int,
        typer.Option(
            "--sequences",
            metavar="N",
            min=1,
            max=MOST_SEQUENCES,
            help="Sequences that are decoded together; compile the artifact with at least as many --sequences.",
        ),
    ] = 1,
    repeats: Annotated[int, typer.Option("-r", "--repeats", metavar="N", min=1, help="Rounds that are measured.")] = 5,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Read this text instead of random tokens; the text decides which neurons fire."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a trace of a few steps, call by call, that Perfetto and chrome://tracing show. A trace in FILE "
            "is overwritten.",
        ),
    ] = None,
    draft: DraftOption = "none",
    threads: ThreadsOption = None,
    replan: ReplanOption = False,
    *,
    library: LibraryOptions,
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
      picompile bench build/tiny --text README.md --draft ngram
      picompile bench build/tiny --trace build/tiny.trace.json
    """
    if trace is not None:
        require_trace_output(trace)
    content = None if text is None else require_text_file(text)

    from picompile.library import open_model
    from picompile.loading import load_engine
    from picompile_runtime import Tokenizer, measure

    with progress() as shown, open_model(artifact, library, shown) as opened:
        engine = load_engine(opened.artifact, threads, replan, shown)
        with engine, shown.step("measure", repeats + 1) as advance:
            prompt, decode = fit_lengths(engine.context, prompt_tokens, decode_tokens, depth)
            ids = None if content is None else Tokenizer.of(engine.artifact).encode(content)
            if ids is not None and not ids:
                raise UsageError(f"{text}: no tokens in it")
            result = measure(
                engine,
                prompt_tokens=prompt,
                decode_tokens=decode,
                repeats=repeats,
                ids=ids,
                progress=lambda done, total: advance(1),
                depth=depth,
                sequences=sequences,
                trace=None if trace is None else partial(write_trace, trace),
                draft=draft,
            )
    print(json.dumps(result, indent=2)) if json_output else _show(result)


def fit_lengths(
    context: int, prompt_tokens: int | None, decode_tokens: int | None, depth: int | None = None
) -> tuple[int, int]:
    """Return the tokens of the prompt and to decode, as asked for or the defaults cut to fit. Raise `UsageError`.

    With a `depth` each must fit the context behind that many tokens; without one, decoding begins behind the prompt.
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
    several = "" if decode["sequences"] == 1 else f", {decode['sequences']} sequences together"
    print(f"prompt     {prefill['tokens_per_s']:9.1f} tokens/s ± {prefill['stdev']:.1f}")
    print(
        f"decode     {decode['tokens_per_s']:9.1f} tokens/s ± {decode['stdev']:.1f}, behind {decode['depth']}{several}"
    )
    if (draft := result["draft"]) is not None:
        ratio = draft["tokens_per_s"] / decode["tokens_per_s"]
        shares = f"{draft['draft_share']:.0%} of the tokens drafted, {draft['accepted_share']:.0%} accepted"
        print(f"drafting   {draft['tokens_per_s']:9.1f} tokens/s ± {draft['stdev']:.1f}, {ratio:.2f} ×: {shares}")
    print(f"floor      {_floor(decode)}")
    print(f"memory     {bandwidth}/s, at best {best}/s, read by {_threads(result['threads'])}")
    fired = "" if decode["firing_share"] is None else f"{decode['firing_share']:.1%} fired, "
    print(f"neurons    {fired}{decode['computed_share']:.1%} computed")
    for line in _hybrid(result["hybrid"]):
        print(line)
    for device in dict.fromkeys(row["device"] for row in decode["kernels"]):
        print()
        print("\n".join(_table(decode, device, "a token" if result["hybrid"] is None else _TITLES[device])))


def _floor(decode: Mapping[str, Any]) -> str:
    bytes_per_token = f"{format_bytes(decode['bytes_per_token'])} a token"
    if decode["floor_tokens_per_s"] is None:
        return f"  unknown, since the bandwidth of the GPU's memory is not measured: {bytes_per_token}"
    share = f"tokens/s, of which decoding reaches {decode['bandwidth_share']:.0%}"
    return f"{decode['floor_tokens_per_s']:9.1f} {share}: {bytes_per_token}"


def _hybrid(hybrid: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield lines on how host and accelerator share the work of a token; none without an accelerator."""
    if hybrid is None:
        return
    host, device, both = (1e3 * hybrid[f"{name}_s_per_token"] for name in ("host", "accelerator", "overlap"))
    share = f"{hybrid['overlap_share']:.0%} of the shorter"
    yield f"devices    host {host:.3f} ms a token, accelerator {device:.3f} ms, both {both:.3f} ms: {share}"
    skipped = hybrid["skipped_per_token"]
    waited = "" if skipped is None else f", of which {skipped:.1f} are not waited for"
    yield f"transfers  {hybrid['exchanges_per_token']:.1f} a token{waited}"
    if hybrid["step"] is not None:
        step, compute, hot, cold, transfer, idle = (f"{1e3 * value:.3f}" for value in hybrid["step"].values())
        parts = f"{compute} computing (hot neurons {hot}), {transfer} in transfers and waits, {idle} between calls"
        yield f"step       {step} ms on the accelerator: {parts}; cold neurons on the host {cold}"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _table(decode: Mapping[str, Any], device: str, title: str) -> Iterator[str]:
    """Yield a line for each kind of kernel on host or accelerator, and one for the host's time between them."""
    yield f"{title:16}{'MB':>9}{'ms':>9}{'GB/s':>9}{'floor ms':>10}{'of floor':>10}"
    left = 1 / decode["tokens_per_s"]
    for row in (row for row in decode["kernels"] if row["device"] == device):
        left -= row["s_per_token"]
        speed, megabytes = row["bytes_per_s"] / 1e9, row["bytes_per_token"] / 1e6
        line = f"{row['kind']:16}{megabytes:9.2f}{1e3 * row['s_per_token']:9.3f}{speed:9.1f}"
        if row["floor_share"] is not None:
            line += f"{1e3 * row['floor_s_per_token']:10.3f}{row['floor_share']:10.0%}"
        yield line
    if device == "host":
        yield f"{'between them':16}{'':9}{1e3 * max(left, 0.0):9.3f}"
