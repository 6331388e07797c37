"""`picompile-run ARTIFACT -p PROMPT`: generate text with only the runtime installed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence

from picompile_runtime.engine.engine import load
from picompile_runtime.errors import PicompileRuntimeError
from picompile_runtime.sampling.generate import Generation, generate
from picompile_runtime.sampling.sampler import SamplingParams
from picompile_runtime.sampling.tokenizer import Tokenizer


def _parser() -> argparse.ArgumentParser:
    default = SamplingParams()
    parser = argparse.ArgumentParser(prog="picompile-run", description="Generate text with a compiled model.")
    parser.add_argument("artifact", help="folder that `picompile compile -o` wrote")
    parser.add_argument("-p", "--prompt", required=True, help="text to continue")
    parser.add_argument("-n", "--max-tokens", type=int, default=128, help="tokens to generate at most (default: 128)")
    parser.add_argument("--temp", type=float, default=0.0, help="0, the default, takes the most probable token")
    parser.add_argument("--top-k", type=int, default=default.top_k, help="0 is off")
    parser.add_argument("--top-p", type=float, default=default.top_p, help="1 is off")
    parser.add_argument("--min-p", type=float, default=default.min_p, help="0 is off")
    parser.add_argument("--repetition-penalty", type=float, default=default.repetition_penalty, help="1 is off")
    parser.add_argument("--seed", type=int, help="makes the choices repeatable")
    parser.add_argument("-t", "--threads", type=int, help="default: PICOMPILE_THREADS, else the physical cores")
    parser.add_argument("--replan", action="store_true", help="leave weights with the host where the GPU is too full")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    return parser


def _run(options: argparse.Namespace) -> None:
    params = SamplingParams(
        temperature=options.temp,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )
    with load(options.artifact, options.threads, options.replan) as engine:
        tokenizer = Tokenizer.of(engine.artifact)
        generation = generate(engine, tokenizer, options.prompt, params, options.max_tokens, options.stop)
        if options.json:
            print(json.dumps(_result(generation), ensure_ascii=False))
        else:
            for piece in generation:
                print(piece, end="", flush=True)
            print()


def _result(generation: Generation) -> dict[str, object]:
    text = "".join(generation)
    stats = vars(generation.stats)
    return {"text": text, "tokens": generation.tokens, "prompt_tokens": generation.prompt_tokens, "stats": stats}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, which is that of the error, if any: see errors.py."""
    options = _parser().parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that lacks a character must not end the text
        sys.stdout.reconfigure(errors="replace")
    try:
        _run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has gone; keep Python from failing again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except PicompileRuntimeError as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
