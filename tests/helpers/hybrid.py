"""Artifacts for a host and a second partition of the CPU as accelerator: hot sets, steps of all kinds, delays."""

import ctypes
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from picompile_runtime import Engine
from picompile_runtime.devices.accelerator import ArgumentView
from picompile_runtime.devices.cpu.native import CallList, HostLibrary, TensorTable
from picompile_runtime.devices.memory import aligned_zeros, array_at

HERE = Path(__file__).parent
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)
CHUNK, SEQUENCES = 7, 3
SIDES = ("host", "accelerator")
EXCHANGES = ("send", "receive", "wait", "signal")
# What a step finds in memory; all else it must write before it reads it.
_KEPT = ("step", "tokens", "positions", "slots", "flags", "abandoned", "stats", "stats.batch")
_KEPT_ON_DEVICE = ("stats.accelerator", "stats.batch.accelerator")

HotSets = Mapping[int, Sequence[int]]


def hot_sets(neurons: int, shares: Sequence[float], random: np.random.Generator) -> HotSets:
    """Random neurons of each layer, the share of it that `shares` has for the layer."""
    return {
        layer: sorted(random.permutation(neurons)[: round(share * neurons)].tolist())
        for layer, share in enumerate(shares)
    }


def every_step(engine: Engine, ids: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    """The logits of every kind of step, by its name: prompts of one chunk and of several, one token, several sequences.

    Reads two chunks of `ids`, and 9 more.
    """
    for slot in range(engine.sequences):
        engine.reset(slot)
    prompt = 2 * engine.chunk + 3
    found = {"prefill": [engine.prefill(ids[:prompt])]}
    found["decode"] = [engine.decode(token) for token in ids[prompt : prompt + 6]]
    engine.rewind(3)
    found["prefill of few"] = [engine.prefill(ids[3:5])]
    if engine.sequences > 1:
        found |= _several(engine, ids)
    engine.reset()
    found["score"] = list(engine.score(ids[:prompt]))
    return {name: np.concatenate([row.reshape(-1, engine.vocab) for row in rows]) for name, rows in found.items()}


def _several(engine: Engine, ids: Sequence[int]) -> dict[str, list[NDArray[np.float32]]]:
    """Steps of three sequences, the first of which has begun."""
    found = {"prompts": [engine.prefill(ids[:2], 1), engine.prefill(ids[:9], 2)]}
    found["batch"] = [engine.decode_sequences(ids[start : start + 3], [2, 0, 1]) for start in (3, 9, 14)]
    found["batch of two"] = [engine.decode_sequences(ids[4:6], [1, 0])]
    engine.copy(0, 2)
    found["copied"] = [engine.decode(ids[14], 2), engine.decode(ids[15])]
    return found


def assert_same_bits(measured: Mapping[str, NDArray[np.float32]], expected: Mapping[str, NDArray[np.float32]]) -> None:
    for name, logits in expected.items():
        assert np.isfinite(measured[name]).all(), f"{name}: something was read that was not there yet"
        wrong = np.flatnonzero((measured[name] != logits).any(axis=1)).tolist()
        assert not wrong, f"{name}: rows {wrong} of {len(logits)} differ"


def greedy(engine: Engine, prompt: Sequence[int], count: int) -> tuple[list[int], list[NDArray[np.float32]]]:
    """Tokens at temperature 0, and the logits that each was chosen from."""
    engine.reset()
    logits = [engine.prefill(prompt)]
    tokens = [int(logits[0].argmax())]
    while len(tokens) < count:
        logits.append(engine.decode(tokens[-1]))
        tokens.append(int(logits[-1].argmax()))
    return tokens, logits


def compare_choices(
    one: Engine, other: Engine, prompts: Sequence[Sequence[int]], count: int, rounding: float
) -> NDArray[np.bool_]:
    """Choices at temperature 0 behind the same texts, `count` behind each prompt: [clear or same, choices].

    A choice of `one` is clear if its two highest logits are apart by more than the rounding, relative to the largest.
    AssertionError if a clear choice is not the same, or any logit differs by more than the rounding.
    """
    found = []
    for prompt in prompts:
        text, expected = greedy(one, prompt, count)
        other.reset()
        read = np.stack([other.prefill(prompt), *(other.decode(token) for token in text[:-1])])
        allowed = rounding * np.abs(expected).max(axis=1)
        assert (np.abs(read - expected).max(axis=1) <= allowed).all()
        second, first = np.partition(expected, -2)[:, -2:].T
        clear, same = first - second > allowed, read.argmax(axis=1) == text
        assert (same | ~clear).all(), f"another token behind {list(prompt)}"
        found.append([clear, same])
    return np.concatenate(found, axis=1)


def shares_of(engine: Engine, function: str = "decode") -> dict[tuple[int, str], tuple[float, float]]:
    """The computed and the fired share of each part, by layer and name: programs differ in the order of parts."""
    firing = engine.firing(function)
    return {(row.part.layer, row.part.part): (row.computed_share, row.fired_share) for row in firing}


# ---- memory ----


def poison(engine: Engine) -> None:
    """From now on each step finds nothing but NaN, -1 and masks of all neurons in memory, and what it was given."""
    executor = engine._executor
    arrays = [array for name, array in executor.buffers.items() if name not in _KEPT]
    if executor._accelerator is not None:
        of_device = {name for kind, name in executor._accelerator_layout.places if kind == "buffer"}
        names = of_device - set(executor.buffers) - set(_KEPT_ON_DEVICE)
        arrays += [device_array(engine, "buffer", name) for name in sorted(names)]
    run = executor._call

    def call(function: str) -> None:
        for array in arrays:
            # A mask of something else than 0 and 1 would have kernels write anywhere.
            array.reshape(-1).view(np.uint8)[:] = 1 if array.dtype == np.uint8 else 255
        run(function)

    executor._call = call  # type: ignore[method-assign]


def device_array(engine: Engine, kind: str, name: str) -> NDArray[np.uint8]:
    """Return a tensor in the memory of a device that is a partition of the CPU."""
    tensors = engine._program.buffers if kind == "buffer" else engine._program.state
    memory, offset = engine._executor._accelerator_layout.places[kind, name]
    view = ArgumentView(memory, replace(tensors[name], offset=offset))
    return array_at(view.memory, view.tensor)


# ---- delays ----


@dataclass(frozen=True)
class Naps:
    """The kernel of nap.c, compiled."""

    address: int

    @contextmanager
    def delaying(
        self, sides: Collection[str], seed: int, *, before: Sequence[str] = (), most_us: int = 2000
    ) -> Iterator[None]:
        """Engines that are loaded meanwhile sleep before each call on `sides`, or before kernels named in `before`."""

        def bind(
            library: HostLibrary,
            calls: Sequence[tuple[str, Sequence[NDArray]]],
            tensors: TensorTable | None = None,
            waits: Collection[str] = (),
        ) -> CallList:
            side = SIDES["/hot." in library.name]
            state = aligned_zeros((2,), np.uint32)
            state[:] = seed + (side == "accelerator"), most_us
            bound = []
            for name, arrays in calls:
                if side in sides and name.startswith(tuple(before)):
                    bound.append(("nap", self.address, [state]))
                bound.append((name, library.kernel(name), arrays))
            return CallList(bound, tensors or TensorTable(), waits)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostLibrary, "bind", bind)
            yield


def compile_naps(folder: Path) -> Naps:
    """Compiles nap.c into `folder`."""
    path = folder / "nap.so"
    flags = ["-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", str(path), str(HERE / "nap.c")], check=True)
    function = ctypes.CDLL(str(path)).nap
    return Naps(ctypes.cast(function, ctypes.c_void_p).value or 0)
