"""Right and wrong calls of the runtime's Python API, in random order, against a model of what must happen.

python tests/attack/api.py --number 2000 [--seconds 600] [--seed 0]

An engine, its twin and a list of the tokens in each slot: right calls go to both engines and give the same logits, bit
for bit; wrong ones go to the first alone, raise one of the runtime's errors, one line long, and change nothing. Prints
a line for each failure, with the seed that repeats it, and a summary. No case may leave threads, descriptors or maps.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.attacks import attack, options
from helpers.toys.toy_artifact import build_library, make_toy, write_artifact
from helpers.toys.toy_tokenizers import byte_level
from helpers.toys.toy_two_sides import build_hybrid_library, write_hybrid
from picompile_runtime import PicompileRuntimeError, Sampler, SamplingParams, StreamDecoder, generate, load, perplexity

SEQUENCES, CONTEXT, VOCAB = 3, 40, 50
TOY = make_toy(VOCAB, CONTEXT)


class Strange:
    """An object that fails whatever is done with it."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    def __len__(self) -> int:
        raise ValueError("no length")

    def __iter__(self) -> Any:
        raise OSError("no items")

    def __array__(self, *arguments: Any) -> Any:
        raise RuntimeError("no array")


# What is neither a token, nor a slot, nor a position, nor a number of threads, anywhere.
NONSENSE: list[Any] = [
    None, "", "1", "a", b"1", -1, 1.0, 1.5, np.float64(1), float("nan"), float("inf"), True, False, np.True_, [], {},
    set(), 10**30, -(10**30), 10**5000, 2**31, 2**63, object(), Strange(), [1], np.array([1, 2]), np.zeros((2, 2)), 1j,
    lambda: 1, type, np.float32("nan"), ..., "\ud800", "\0", range(3),
]  # fmt: skip
TOO_LONG = [1] * (CONTEXT + 1)
LISTS: list[Any] = [
    *(value for value in NONSENSE if not isinstance(value, list | range | np.ndarray)),
    [], [[]], [[1], [1, 2]], [1, "a"], [1, None], [1.0], [1, 2.5], [True], [1, True], [-1], [VOCAB], [2**31],
    [2**63, -1], [10**30], np.zeros(2), np.zeros((2, 2), int), np.array(["a"]), np.array([1, VOCAB]),
    np.array([None, 1]), [Strange()], TOO_LONG, np.array(3), [[1, 2]], "12", b"12", {1: 2}, {1, 2}, iter([1]),
    np.array([], int), ["1"], [b"1"],
]  # fmt: skip


class Case:
    """One random sequence of calls."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.folder = folder
        self.engine, self.twin = load(folder, threads=2), load(folder, threads=1)
        self.tokens: list[list[int]] = [[] for _ in range(SEQUENCES)]
        self.tokenizer = byte_level()
        self.failures: list[str] = []

    def run(self, calls: int) -> list[str]:
        """Make so many calls, and return what went wrong."""
        rights = [self._prefill, self._decode, self._batch, self._rewind, self._copy, self._score]
        for number in range(calls):
            if self.random.random() < 0.6:
                self._wrong(number)
            else:
                rights[int(self.random.integers(len(rights)))]()
            if self.engine.positions != tuple(map(len, self.tokens)):
                self.failures.append(f"call {number}: positions {self.engine.positions} of {self.tokens}")
            if self.failures:
                break
        self._closed()
        return self.failures

    # ---- right calls ----

    def _same(self, what: str, one: Any, other: Any) -> None:
        if not np.array_equal(one, other):
            self.failures.append(f"{what}: other logits than the twin's")

    def _slot(self) -> int:
        return int(self.random.integers(SEQUENCES))

    def _ids(self, slot: int, most: int = CONTEXT) -> list[int]:
        room = min(most, CONTEXT - len(self.tokens[slot]))
        return self.random.integers(0, VOCAB, int(self.random.integers(0, room + 1))).tolist()

    def _form(self, ids: list[int]) -> Any:
        """Return the tokens in one of the types that a caller may pass."""
        forms: list[Callable[[list[int]], Any]] = [list, tuple, np.array, lambda ids: np.array(ids, np.uint16)]
        forms.append(lambda ids: [np.int64(token) for token in ids])
        return forms[int(self.random.integers(len(forms)))](ids)

    def _prefill(self) -> None:
        slot = self._slot()
        if ids := self._ids(slot):
            self._same("prefill", self.engine.prefill(self._form(ids), np.int64(slot)), self.twin.prefill(ids, slot))
            self.tokens[slot] += ids

    def _decode(self) -> None:
        slot = self._slot()
        for token in self._ids(slot, 3):
            self._same("decode", self.engine.decode(np.int32(token), slot), self.twin.decode(token, slot))
            self.tokens[slot].append(token)

    def _batch(self) -> None:
        slots = self.random.permutation(SEQUENCES)[: self.random.integers(1, SEQUENCES + 1)].tolist()
        slots = [slot for slot in slots if len(self.tokens[slot]) < CONTEXT]
        if not slots:
            return
        ids = self.random.integers(0, VOCAB, len(slots)).tolist()
        found = self.engine.decode_sequences(self._form(ids), self._form(slots))
        self._same("decode_sequences", found, self.twin.decode_sequences(ids, slots))
        for slot, token in zip(slots, ids, strict=True):
            self.tokens[slot].append(token)

    def _rewind(self) -> None:
        slot = self._slot()
        position = int(self.random.integers(len(self.tokens[slot]) + 1))
        for engine in (self.engine, self.twin):
            engine.rewind(position, slot)
        del self.tokens[slot][position:]

    def _copy(self) -> None:
        source, target = self._slot(), self._slot()
        for engine in (self.engine, self.twin):
            engine.copy(source, target)
        self.tokens[target] = list(self.tokens[source])

    def _score(self) -> None:
        slot = self._slot()
        if ids := self._ids(slot):
            one, other = (np.concatenate(list(engine.score(ids, slot))) for engine in (self.engine, self.twin))
            self._same("score", one, other)
            self.tokens[slot] += ids

    # ---- wrong calls ----

    def _wrong(self, number: int) -> None:
        names, wrongs = zip(*self._wrong_calls(), strict=True)
        index = int(self.random.integers(len(wrongs)))
        self._refused(f"call {number}: {names[index]}", wrongs[index])

    def _refused(self, what: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except PicompileRuntimeError as error:
            text = str(error)
            if "\n" in text or len(text) < 10 or len(text) > 2100:
                self.failures.append(f"{what}: no good line: {text[:200]!r}")
        except BaseException as error:
            self.failures.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        else:
            self.failures.append(f"{what}: not refused")

    def _pick(self, values: Sequence[Any]) -> Any:
        return values[int(self.random.integers(len(values)))]

    def _wrong_calls(self) -> list[tuple[str, Callable[[], Any]]]:
        engine, ids, value = self.engine, self._pick(LISTS), self._pick(NONSENSE)
        token = self._pick([value for value in NONSENSE if not _is_whole(value, VOCAB)])
        slot = self._pick([value for value in NONSENSE if not _is_whole(value, SEQUENCES)])
        position = self._pick([value for value in NONSENSE if not _is_whole(value, CONTEXT)])
        tokenizer, params = self.tokenizer, SamplingParams(seed=1)
        sampler = Sampler(params, VOCAB)
        slots = [*LISTS, [0, slot], [0, 0], [0], [0, 1, 2]]
        word = f"{_word(ids)} {_word(value)} {_word(token)} {_word(slot)} {_word(position)}"
        calls: dict[str, Callable[[], Any]] = {
            "prefill": lambda: engine.prefill(ids),
            "prefill slot": lambda: engine.prefill([1], slot),
            "read": lambda: engine.read(ids),
            "read slot": lambda: engine.read([1], slot),
            "score": lambda: engine.score(ids),
            "check": lambda: engine.check(ids),
            "decode": lambda: engine.decode(token),
            "decode slot": lambda: engine.decode(1, slot),
            "batch": lambda: engine.decode_sequences(ids, [0]),
            "batch slots": lambda: engine.decode_sequences([1, 2], self._pick(slots)),
            "read_sequences": lambda: engine.read_sequences(ids, ids),
            "rewind": lambda: engine.rewind(position),
            "rewind slot": lambda: engine.rewind(0, slot),
            "reset": lambda: engine.reset(slot),
            "copy": lambda: engine.copy(slot, 0),
            "copy target": lambda: engine.copy(0, slot),
            "firing": lambda: engine.firing(value),
            "timing": lambda: engine.timing(value),
            "spans": lambda: engine.spans(value),
            "perplexity": lambda: perplexity(engine, _no_tokens(ids)),
            "perplexity window": lambda: perplexity(engine, [1, 2], 0 if value is None else value),
            "generate": lambda: generate(engine, tokenizer, [] if isinstance(ids, str) else ids, keep_position=True),
            "generate max": lambda: generate(engine, tokenizer, [1], max_tokens=0 if value is None else _no_one(value)),
            "generate stop": lambda: generate(engine, tokenizer, [1], stop=self._pick(_NO_STOPS)),
            "load": lambda: load(value),
            "load damaged": lambda: load(self.folder.with_name("damaged")),
            "load threads": lambda: load(self.folder, threads=0 if value is None else _no_one(value)),
            "params": lambda: SamplingParams(**{self._pick(_PARAMETERS): _no_number(value)}),
            "sampler": lambda: Sampler(params, -1 if _is_whole(token, 2**31) else token),
            "sampler params": lambda: Sampler(value, VOCAB),
            "observe": lambda: sampler.observe(_no_tokens(ids)),
            "sample": lambda: sampler.sample(value),
            "encode": lambda: tokenizer.encode(value if not isinstance(value, str) else None),
            "decode ids": lambda: tokenizer.decode(self._pick(_NO_IDS)),
            "chat": lambda: tokenizer.encode_chat(value),
            "push": lambda: StreamDecoder(tokenizer).push(token if not _is_whole(token, 2**32) else -1),
        }
        return [(f"{name} ({word})", call) for name, call in calls.items()]

    def _closed(self) -> None:
        """A closed engine refuses everything, and can be closed again."""
        engine = self.engine
        engine.close()
        uses: dict[str, tuple[Any, ...]] = {
            "prefill": ([1],), "decode": (1,), "read": ([1],), "check": ([1],), "decode_sequences": ([1], [0]),
            "read_sequences": ([1], [0]), "score": ([1],), "rewind": (0,), "reset": (), "copy": (0, 1), "firing": (),
            "reset_firing": (), "start_timing": (), "stop_timing": (), "timing": ("decode",), "spans": ("decode",),
        }  # fmt: skip
        for name, arguments in uses.items():
            self._refused(f"closed, {name}", partial(getattr(engine, name), *arguments))
        self._refused("closed, perplexity", lambda: perplexity(engine, [1, 2]))
        self._refused("closed, generate", lambda: generate(engine, self.tokenizer, [1]))
        engine.close()
        self.twin.close()


_NO_IDS = (None, 5, [-1], [1.5], [2**32], [10**30], ["a"], Strange())
_NO_STOPS = (None, 5, [5], [""], "", [None])
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def _is_whole(value: Any, end: int) -> bool:
    """Whether it is a right number below `end` after all."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value < end


def _no_tokens(value: Any) -> Any:
    """`value`, unless it is a list of tokens that only the context is too short for, or none."""
    return [VOCAB] if _is_empty(value) or value is TOO_LONG else value


def _is_empty(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.size == 0
    return isinstance(value, list | str | dict | set | bytes) and not value


def _no_one(value: Any) -> Any:
    """`value`, unless it may be a number of tokens or threads."""
    return 0 if _is_whole(value, 2**63) else value


def _no_number(value: Any) -> Any:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return "1" if value is None or is_number else value


def _word(value: Any) -> str:
    try:
        return repr(value)[:40]
    except ValueError:
        return type(value).__name__


def write_folders(base: Path) -> list[Path]:
    """Write artifacts for three sequences: for the host alone, and with a partition of the CPU as the accelerator.

    A third one, which is damaged, lies beside them.
    """
    library, hybrid = build_library(base / "host.so"), build_hybrid_library(base / "hybrid.so")
    plain = write_artifact(base / "plain", library, TOY, sequences=SEQUENCES)
    damaged = Path(shutil.copytree(plain, base / "damaged")) / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes() + b"\0")
    return [plain, write_hybrid(base / "hybrid", hybrid, TOY, sequences=SEQUENCES)]


def run(folders: Sequence[Path], seed: int, calls: int = 40) -> list[str]:
    """Make random calls on an artifact, every third time in two threads with engines of their own on the same one."""
    folder = folders[seed % len(folders)]
    if seed % 3:
        return Case(folder, seed).run(calls)
    with ThreadPoolExecutor(2) as threads:
        cases = [threads.submit(lambda own=own: Case(folder, own).run(calls)) for own in (2 * seed, 2 * seed + 1)]
    return [failure for case in cases for failure in case.result()]


# As many cases begin, and as many more show what is held.
_WARM = 30


def _most(held: Sequence[tuple[int, int, int]]) -> list[int]:
    return [max(values) for values in zip(*held, strict=True)]


def held_now() -> tuple[int, int, int]:
    """The threads, descriptors and maps that this process has."""
    gc.collect()
    threads, descriptors = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return threads, descriptors, len(Path("/proc/self/maps").read_text().splitlines())


def main() -> int:
    found = options(__doc__, 1000)
    usual: list[tuple[int, int, int]] = []
    with tempfile.TemporaryDirectory() as base:
        folders = write_folders(Path(base))

        def case(seed: int) -> tuple[str, str | None]:
            failures, held = run(folders, seed), held_now()
            # In the first cases modules are imported; maps vary by those of Python's own memory.
            if len(usual) < 2 * _WARM:
                usual.append(held)
            elif any(now > most + may for now, most, may in zip(held, _most(usual[_WARM:]), (0, 0, 8), strict=True)):
                failures.append(f"threads, descriptors and maps grew from {_most(usual[_WARM:])} to {held}")
            return ("wrong", failures[0]) if failures else ("right", None)

        return 1 if attack(case, found.number, found.seconds, found.seed).failures else 0


if __name__ == "__main__":
    sys.exit(main())
