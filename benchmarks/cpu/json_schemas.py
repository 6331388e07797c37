"""Validity of answers that a JSON schema restricts, and the cost of the grammar for each token.

    python -m benchmarks.cpu.json_schemas SCHEMAS [--count 200] [--model ARTIFACT] [--tokenizer FILE]

For each schema an answer is made from random scores, with a vocabulary of 2,048 and one of 49,152 tokens, and two by
the bundled model: greedy and with temperature 1. Finished answers are read as JSON and checked by the package
jsonschema; one invalid answer ends the benchmark with exit code 1. It prints how many answers were valid, how many were
cut at the token limit, which schemas were refused and why, and the processor time of `allowed` and `accept` a token.

Random scores hardly ever end: a quote has one chance in thousands. So after 40 tokens a bonus that grows with every
token is added to the scores of the end token and of tokens that begin with a quote or a closing bracket. The model's
scores are left as they are.

Without --model the bundled model is compiled; without --tokenizer a byte-level vocabulary of 49,152 tokens is trained
on the source of Python's library. SCHEMAS is a folder of JSONSchemaBench (Geng et al. 2025, arXiv 2501.10868),
maskbench/data: files that have a schema as `schema`, or are one.
"""

import argparse
import decimal
import itertools
import json
import random
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks import ROOT
from benchmarks.cpu.commands import picompile
from benchmarks.script import argument_parser
from picompile_runtime import Engine, RequestError, Sampler, SamplingParams, Tokenizer, load
from picompile_server.grammar import GrammarCompiler
from picompile_server.request import Grammar
from picompile_server.text import TokenTexts

_BUNDLED = ROOT / "models" / "tiny-reglu"
_LARGE = 49_152
_END = 0  # of both vocabularies
_MOST_DIGITS = 32  # of a token
_PATIENT_TOKENS, _BONUS = 40, 0.1
_PROMPT = "# A JSON document\ndata = "

Schema = dict[str, Any]
# Takes what may come next and how many tokens there are, and returns the next one.
Choose = Callable[[NDArray[np.bool_], int], int]


@dataclass
class Outcome:
    """Counts and times of the answers of one kind."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    invalid: list[str] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)

    def row(self) -> str:
        counts = " | ".join(str(self.counts[kind]) for kind in ("valid", "invalid", "cut", "failed"))
        spread = np.array(self.token_s or [0.0]) * 1e6
        times = " | ".join(f"{value:.0f}" for value in (spread.mean(), *np.percentile(spread, [50, 99])))
        return f"| {self.name} | {counts} | {len(self.token_s)} | {times} |"


def main() -> None:
    parser = argument_parser(__doc__, seed=0)
    parser.add_argument("schemas", type=Path, help="a folder of JSONSchemaBench")
    parser.add_argument("--count", type=int, default=200, help="number of schemas")
    parser.add_argument("--tokens", type=int, default=500, help="the most tokens of an answer")
    parser.add_argument("--model", type=Path, help="an artifact of the bundled model")
    parser.add_argument(
        "--tokenizer", type=Path, help="a large vocabulary, as tokenizer.json, whose token 0 ends a text"
    )
    options = parser.parse_args()
    sys.set_int_max_str_digits(0)  # numbers may be long
    decimal.getcontext().prec = 2 * options.tokens * _MOST_DIGITS
    schemas = list(_read(options.schemas, options.count, options.seed))
    with _engine(options.model) as engine:
        outcomes = _run(schemas, options, engine)
    if any(outcome.invalid for outcome in outcomes):
        sys.exit(1)


def _read(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Schema]]:
    """Yield some schemas of a folder, with the names of their kinds."""
    files = sorted(folder.rglob("*.json"))
    for path in random.Random(seed).sample(files, min(count, len(files))):
        content = json.loads(path.read_text(encoding="utf-8"))
        yield path.stem.partition("---")[0].partition("_")[0], content.get("schema", content)


def _run(schemas: list[tuple[str, Schema]], options: argparse.Namespace, engine: Engine) -> list[Outcome]:
    small = Tokenizer.of(engine.artifact)
    large = Tokenizer(options.tokenizer.read_bytes() if options.tokenizer else _trained())
    compilers = {tokenizer: _compiler(tokenizer) for tokenizer in (small, large)}
    rng = np.random.default_rng(options.seed)
    kinds: list[tuple[Outcome, Tokenizer, Callable[[], Choose]]] = [
        (Outcome(f"random, {engine.vocab:,} tokens"), small, lambda: _random(small, rng)),
        (Outcome(f"random, {len(large.vocabulary()):,} tokens"), large, lambda: _random(large, rng)),
        (Outcome("model, greedy"), small, lambda: _model(engine, small, SamplingParams(temperature=0))),
        (
            Outcome("model, temperature 1"),
            small,
            lambda: _model(engine, small, SamplingParams(temperature=1, top_k=0, top_p=1, seed=options.seed)),
        ),
    ]
    refused, compile_s = Counter[str](), list[float]()
    for name, schema in schemas:
        start = time.perf_counter()
        try:
            makers = {tokenizer: compiler.json_schema(schema) for tokenizer, compiler in compilers.items()}
        except RequestError as error:
            refused[f"{name}: {error}"] += 1
            continue
        compile_s.append((time.perf_counter() - start) / len(makers))
        for outcome, tokenizer, choose in kinds:
            _answer(outcome, schema, tokenizer, makers[tokenizer](), choose(), options.tokens)
    outcomes = [outcome for outcome, _, _ in kinds]
    _print(outcomes, len(schemas), refused, compile_s)
    return outcomes


def _compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    start = time.perf_counter()
    compiler = GrammarCompiler(tokenizer, len(tokenizer.vocabulary()), [_END])
    print(f"{len(tokenizer.vocabulary()):,} tokens are prepared in {time.perf_counter() - start:.2f} s", flush=True)
    return compiler


def _answer(
    outcome: Outcome, schema: Schema, tokenizer: Tokenizer, grammar: Grammar, choose: Choose, most_tokens: int
) -> None:
    tokens = list[int]()
    try:
        for number in itertools.count():
            if number == most_tokens:
                outcome.counts["cut"] += 1
                return
            start = time.thread_time()
            allowed = grammar.allowed()
            allowed_s = time.thread_time() - start
            token = choose(allowed if allowed is not None else np.ones(0, np.bool_), number)
            start = time.thread_time()
            is_complete = grammar.accept(token)
            outcome.token_s.append(allowed_s + time.thread_time() - start)
            tokens.append(token)
            if is_complete:
                break
    except RequestError as error:  # too large to go on
        outcome.counts["failed"] += 1
        print(f"failed: {error}: {json.dumps(schema)[:200]}")
        return
    text = tokenizer.decode(tokens)
    reason = _fault(schema, text)
    outcome.counts["invalid" if reason else "valid"] += 1
    if reason:
        outcome.invalid.append(reason)
        print(f"INVALID ({outcome.name}): {reason}\n  {json.dumps(schema)}\n  {text}")


def _fault(schema: Schema, text: str) -> str:
    """Return why a text does not satisfy a schema, "" if it does."""
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator(_parsed(json.dumps(schema))).validate(_parsed(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(getattr(error, "message", error))
    return ""


def _parsed(text: str) -> Any:
    """Return JSON with exact numbers, as multipleOf wants them; those with an exponent are floats: they may be huge."""
    return json.loads(text, parse_float=lambda number: float(number) if "e" in number.lower() else Decimal(number))


def _random(tokenizer: Tokenizer, rng: np.random.Generator) -> Choose:
    texts = TokenTexts(tokenizer)
    vocab = len(tokenizer.vocabulary())
    closes = np.array([texts.bytes_of(token)[:1] in (b'"', b"}", b"]") for token in range(vocab)])
    closes[_END] = True

    def choose(allowed: NDArray[np.bool_], number: int) -> int:
        scores = 2 * rng.standard_normal(vocab) + closes * max(0.0, _BONUS * (number - _PATIENT_TOKENS))
        return int(np.where(allowed, scores, -np.inf).argmax())

    return choose


def _model(engine: Engine, tokenizer: Tokenizer, params: SamplingParams) -> Choose:
    sampler = Sampler(params, engine.vocab)
    engine.reset()
    scores = [engine.read(tokenizer.encode(_PROMPT))]

    def choose(allowed: NDArray[np.bool_], number: int) -> int:
        token = sampler.sample(scores[0], allowed)
        scores[0] = engine.read([token])
        return token

    return choose


@contextmanager
def _engine(artifact: Path | None) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        if artifact is None:
            artifact = Path(folder) / "model"
            picompile("compile", _BUNDLED, "-o", artifact)
        with load(artifact) as engine:
            yield engine


def _trained() -> str:
    """Return a tokenizer.json of as many tokens as small models have, trained on Python's library."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    texts = (
        path.read_text(encoding="utf-8", errors="replace") for path in sources if "site-packages" not in path.parts
    )
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_LARGE, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return str(made.to_str())


def _print(outcomes: list[Outcome], schemas: int, refused: Counter[str], compile_s: list[float]) -> None:
    spread = 1e3 * np.array(compile_s or [0.0])
    median_ms, high_ms = np.percentile(spread, [50, 99])
    print(f"\n{schemas} schemas, {refused.total()} of them refused")
    print(f"a grammar is compiled in {median_ms:.1f} ms (p99 {high_ms:.0f})\n")
    print("| answers | valid | invalid | cut | failed | tokens | µs a token | median | p99 |")
    print("| --- " * 9 + "|")
    for outcome in outcomes:
        print(outcome.row())
    print("\nrefused:")
    for reason, count in refused.most_common():
        print(f"{count:4d}  {reason}")


if __name__ == "__main__":
    main()
