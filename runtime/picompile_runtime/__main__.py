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
from picompile_runtime.run_options import RUN_OPTIONS
from picompile_runtime.sampling.generate import Generation, generate
from picompile_runtime.sampling.option_values import OptionValues
from picompile_runtime.sampling.tokenizer import Tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="picompile-run", description="Generate text with a compiled model.")
    parser.add_argument("artifact", metavar="ARTIFACT", help="A compiled model's folder.")
    parser.add_argument("-p", "--prompt", required=True, metavar="TEXT", help="What to continue.")
    for option in RUN_OPTIONS.values():
        option.add_to(parser)
    return parser


def _run(options: argparse.Namespace) -> None:
    sampling = OptionValues.of(RUN_OPTIONS, vars(options))
    with load(options.artifact, options.threads, options.replan) as engine:
        params, tokenizer = sampling.params(engine.artifact), Tokenizer.of(engine.artifact)
        generation = generate(
            engine, tokenizer, options.prompt, params, options.max_tokens, options.stop, draft=options.draft
        )
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
