"""Decoding with drafted tokens against decoding without, on texts that repeat and on texts that do not.

    python -m benchmarks.cpu.speculation ARTIFACT [--rounds 3] [--tokens 300] [--threads N]

The artifact continues prompts. By the likeliest tokens, it writes code again and continues the beginning of prose, both
of which repeat; drawn at a temperature of 1, tokens hardly repeat. It also reads files of this repository as if it were
generating them: their tokens are given, whatever the model would say, and drafts are accepted where the text agrees.
Decoding with and without drafts take turns, also at being first. It prints a table: tokens/s of both, their ratio, and
the shares of tokens that were drafted and accepted. Generated tokens are compared; a difference ends the benchmark.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial

from benchmarks import ROOT
from benchmarks.script import argument_parser, heading
from picompile_runtime import Engine, SamplingParams, Tokenizer, generate, load
from picompile_runtime.bench.drafting import DraftedTokens, decode_drafting, decode_plainly
from picompile_runtime.sampling.speculation import DRAFTS

_CODE = """class Rectangle:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def perimeter(self):
        return 2 * (self.width + self.height)
"""
_PROMPTS = {
    "code, written again": f"This class, then the same with docstrings:\n\n{_CODE}\nAgain:\n\nclass Rectangle:\n",
    "prose, from its beginning": "The history of the lighthouse begins with fires that were lit on hills. Later",
}
_DRAWN = (
    "def parse(text):\n    ",
    "Dear Sir or Madam,\n\nI am writing to",
    "Once upon a time",
    "The three branches of physics that",
)
_FILES = ("picompile/config.py", "runtime/picompile_runtime/sampling/sampler.py", "CONTRIBUTING.md", "docs/glossary.md")
# Tokens of a file that are in the cache before the first one that counts.
_BEFORE = 500

_Way = Callable[[], DraftedTokens]


def _generations(engine: Engine, prompt: str, tokens: int, params: SamplingParams) -> dict[str, _Way]:
    tokenizer, made = Tokenizer.of(engine.artifact), dict[str, list[int]]()

    def run(draft: str) -> DraftedTokens:
        generation = generate(engine, tokenizer, prompt, params, tokens, draft=draft)
        for _ in generation:
            pass
        if made.setdefault("tokens", generation.tokens) != generation.tokens:
            sys.exit("error: the tokens differ")
        stats = generation.stats
        if stats.generated_tokens < 2:
            sys.exit(f"error: the text behind {prompt!r} ends at once")
        return DraftedTokens(
            (stats.generated_tokens - 1) / stats.decode_tokens_per_s,
            stats.generated_tokens - 1,
            stats.draft_tokens,
            stats.accepted_tokens,
        )

    return {draft: partial(run, draft) for draft in DRAFTS[::-1]}


def _readings(engine: Engine, text: str, tokens: int) -> dict[str, _Way]:
    place = min(_BEFORE, engine.context - tokens)
    ids = Tokenizer.of(engine.artifact).encode(text)[: place + tokens]
    before, counted = ids[:place], ids[place:]
    engine.reset()
    engine.prefill(before)

    def run(read: Callable[[], DraftedTokens]) -> DraftedTokens:
        engine.rewind(len(before))
        return read()

    return {
        "none": lambda: run(lambda: decode_plainly(engine, counted)),
        "ngram": lambda: run(lambda: decode_drafting(engine, before, counted)),
    }


def _row(title: str, ways: dict[str, _Way], rounds: int) -> str:
    found: dict[str, list[DraftedTokens]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            each = ways[name]()
            if number:  # the first round only warms up
                found[name].append(each)
    plain, drafting = (statistics.median(each.tokens / each.seconds for each in found[name]) for name in found)
    drafted, accepted = (
        statistics.mean(getattr(e, what) / e.tokens for e in found["ngram"]) for what in ("drafted", "accepted")
    )
    return f"| {title} | {plain:.1f} | {drafting:.1f} | {drafting / plain:.2f} × | {drafted:.0%} | {accepted:.0%} |"


def main() -> None:
    parser = argument_parser(__doc__, "artifact", "--threads", rounds=3, tokens=300)
    options = parser.parse_args()
    print(heading("text", "without", "with drafts", "ratio", "drafted", "accepted"))
    with load(options.artifact, options.threads) as engine:
        for title, prompt in _PROMPTS.items():
            likeliest = _generations(engine, prompt, options.tokens, SamplingParams(temperature=0))
            print(_row(title, likeliest, options.rounds), flush=True)
        for prompt in _DRAWN:
            drawn = _generations(engine, prompt, options.tokens, SamplingParams(temperature=1, seed=1))
            print(_row(f"`{prompt.split(chr(10))[0]}` …, drawn", drawn, options.rounds), flush=True)
        for name in _FILES:
            text = (ROOT / name).read_text(encoding="utf-8")
            print(_row(f"{name}, read", _readings(engine, text, options.tokens), options.rounds), flush=True)


if __name__ == "__main__":
    main()
