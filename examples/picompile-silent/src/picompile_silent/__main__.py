"""`python -m picompile_silent`: counts the firings of a model's neurons, for `drop-silent-neurons`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from picompile import UsageError
from picompile_silent.counts_file import Counts, write_counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, which is picompile's."""
    options = _parser().parse_args(arguments)
    try:
        for line in _count(options):
            print(line)
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if not isinstance(code, int):
            raise
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m picompile_silent", description="Counts how often each neuron fires.")
    parser.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face folder with a tokenizer.json")
    parser.add_argument("texts", type=Path, metavar="TEXT_FILE", nargs="+", help="text that the model reads")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=True, help="where the counts go, as JSON")
    parser.add_argument("--tokens", type=_positive, metavar="N", help="read no more than N tokens in all")
    parser.add_argument("--window", type=_positive, metavar="N", default=256, help="tokens read together (256)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _count(options: argparse.Namespace) -> Iterator[str]:
    for file in (options.model / "tokenizer.json", *options.texts):
        if not file.is_file():
            raise UsageError(f"{file}: there is no such file")
    if options.output.is_dir() or not options.output.parent.is_dir():
        raise UsageError(f"{options.output}: not a file in a folder that is there")
    # Only now: capture imports transformers, which takes seconds.
    from picompile import load_model
    from picompile_silent.firing import count_firings, read_texts

    captured = load_model(options.model)
    texts = read_texts(options.model, options.texts, options.tokens)
    tokens = sum(map(len, texts))
    if not tokens:
        raise UsageError(f"{options.texts[0]}: no text in it")
    window = min(options.window, captured.facts.max_positions or options.window)
    counts = count_firings(captured, texts, window)
    write_counts(options.output, counts)
    yield from _table(counts, tokens)


def _table(counts: Counts, tokens: int) -> Iterator[str]:
    """Yield a summary of the counts: a line for each layer, and one for all layers."""
    yield f"{tokens} tokens"
    everywhere = [count for layer in counts.values() for count in layer]
    for name, part in [*((f"layer {layer}", counts[layer]) for layer in counts), ("model", everywhere)]:
        share = sum(part) / len(part) / tokens
        yield f"{name}: {len(part)} neurons, {share:.1%} fire for a token, {list(part).count(0)} never fired"


if __name__ == "__main__":
    sys.exit(main())
