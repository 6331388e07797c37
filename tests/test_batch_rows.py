"""A sequence has the same logits, bit for bit, alone or among others, whatever reads the step and in whatever slots."""

import itertools
import mmap
from pathlib import Path

import numpy as np
import pytest

import picompile_runtime
from helpers.families import build, save
from helpers.states import host_states
from helpers.support import BUNDLED_MODEL
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile_runtime import DoesNotFitError, Engine

pytestmark = pytest.mark.slow("compiles a model for several sequences per kind of block; one program is fast")

SEQUENCES = 11  # more than FEW_TOKENS: so many share neurons
STEPS = 4
# Each kind of block and predictor, with and without a gate, biases and slopes, and each format.
CASES = [
    ("llama-relu", "q4", "exact"),
    ("opt-pre-norm", "f16", "none"),
    ("opt-pre-norm", "q6", "exact"),
    ("falcon-7b", "q4", "none"),
    ("bamboo", "f16", "exact"),
    ("qwen2", "q4m", "none"),
    ("bitnet", "q8", "exact"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in {case[0] for case in CASES}:
        folders[name] = tmp_path_factory.mktemp(name)
        save(name, build(name), folders[name])
    return folders


def texts(engine: Engine) -> list[list[int]]:
    """A text for each slot, of very different lengths; the last STEPS tokens are decoded."""
    rng = np.random.default_rng(0)
    longest = engine.context - STEPS
    around = [engine.chunk - 1, engine.chunk, engine.chunk + 1]
    lengths = [1, 2, 3, *around, longest // 3, longest // 2, longest - 2, longest - 1, longest]
    return [rng.integers(0, engine.vocab, length + STEPS).tolist() for length in lengths]


def read_prompts(engine: Engine, all_texts: list[list[int]]) -> None:
    for slot, text in enumerate(all_texts):
        engine.reset(slot)
        engine.prefill(text[:-STEPS], slot)


def alone(engine: Engine, all_texts: list[list[int]]) -> list[list[bytes]]:
    """The logits of each step of each sequence, decoded by itself."""
    return [[engine.decode(token, slot).tobytes() for token in text[-STEPS:]] for slot, text in enumerate(all_texts)]


def together(engine: Engine, all_texts: list[list[int]], seed: int) -> list[list[bytes]]:
    """As `alone`, in steps of some sequences each, drawn anew for every step and in any order."""
    rng = np.random.default_rng(seed)
    left = {slot: text[-STEPS:] for slot, text in enumerate(all_texts)}
    rows: list[list[bytes]] = [[] for _ in all_texts]
    while left:
        slots = rng.permutation(list(left))[: rng.integers(1, len(left) + 1)].tolist()
        for slot, row in zip(slots, engine.decode_sequences([left[slot][0] for slot in slots], slots), strict=True):
            rows[slot].append(row.tobytes())
            left[slot] = left[slot][1:]
        left = {slot: rest for slot, rest in left.items() if rest}
    return rows


def check_drafts(engine: Engine) -> None:
    """Tokens of one sequence in one step have the logits that they have one after another."""
    rng = np.random.default_rng(3)
    for slot, position in ((1, 2), (0, engine.chunk + 3), (2, engine.context - engine.most_checked)):
        ids = rng.integers(0, engine.vocab, position + engine.most_checked).tolist()
        found = []
        for sizes in ([1] * engine.most_checked, [engine.most_checked], [2, 3, engine.most_checked - 5]):
            engine.reset(slot)
            engine.prefill(ids[:position], slot)
            rows, place = list[bytes](), position
            for size in sizes:
                for scores in engine.read_each(ids[place : place + size], slot):
                    rows.append(scores.logits().tobytes())
                place += size
                if size < engine.most_checked:  # a wrong draft leaves nothing behind
                    left = min(engine.most_checked, engine.context - place)
                    engine.read_each([0] * left, slot) if left else None
                    engine.rewind(place, slot)
            found.append(rows)
        assert found[0] == found[1] == found[2]


def check_rows(engine: Engine) -> None:
    all_texts = texts(engine)
    read_prompts(engine, all_texts)
    expected = alone(engine, all_texts)
    for seed in range(2):
        read_prompts(engine, all_texts)
        assert together(engine, all_texts, seed) == expected


@pytest.mark.parametrize(("name", "quant", "predictor"), CASES, ids=lambda value: value)
def test_rows_do_not_depend_on_their_company(
    models: dict[str, Path], tmp_path: Path, name: str, quant: str, predictor: str
) -> None:
    options = CompileOptions(
        quant=quant, predictor=predictor, accuracy_bound=None, sequences=SEQUENCES, context=160, chunk=32
    )
    compile_model(models[name], tmp_path / "artifact", options)
    with picompile_runtime.load(tmp_path / "artifact", threads=2) as engine:
        check_rows(engine)
        check_drafts(engine)


@pytest.mark.parametrize("predictor", ["sign", "learned"])
def test_rows_with_masks_do_not_depend_on_their_company(tmp_path: Path, predictor: str) -> None:
    options = CompileOptions(predictor=predictor, accuracy_bound=None, sequences=SEQUENCES, context=160, chunk=32)
    compile_model(BUNDLED_MODEL, tmp_path / "artifact", options)
    with picompile_runtime.load(tmp_path / "artifact", threads=2) as engine:
        check_rows(engine)
        check_drafts(engine)
        computed, _, neurons = engine.firing_totals("batch")
        assert 0 < computed < neurons


def test_rows_of_a_split_model_do_not_depend_on_their_company(models: dict[str, Path], tmp_path: Path) -> None:
    hot = {layer: range(20) for layer in range(build("opt-pre-norm").config.num_hidden_layers)}
    sizes = {"sequences": SEQUENCES, "context": 160, "chunk": 32}
    options = CompileOptions(quant="q4", accuracy_bound=None, accelerator="cpu", hot=hot, **sizes)
    compile_model(models["opt-pre-norm"], tmp_path / "artifact", options)
    with picompile_runtime.load(tmp_path / "artifact", threads=2) as engine:
        check_rows(engine)


@pytest.mark.parametrize("name", ["llama-relu", "qwen2"])
def test_a_prompt_is_the_same_however_it_is_cut(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    options = CompileOptions(quant="q4", accuracy_bound=None, sequences=2, context=160, chunk=32)
    compile_model(models[name], tmp_path / "artifact", options)
    with picompile_runtime.load(tmp_path / "artifact", threads=2) as engine:
        ids = np.random.default_rng(1).integers(0, engine.vocab, 100).tolist()
        found = set()
        for cuts in ([32, 64, 96], [1, 2, 3, 35, 50, 82, 99], [17, 49, 68, 100], [31, 63, 64, 65, 97]):
            engine.reset(1)
            for start, stop in itertools.pairwise([0, *cuts, 100]):
                if start < stop:
                    scores = engine.read_chunk(ids[start:stop], slot=1, is_last=stop == 100)
            assert scores is not None
            found.add((scores.logits().tobytes(), engine.decode(5, slot=1).tobytes()))
        assert len(found) == 1


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model for three long texts."""
    artifact = tmp_path_factory.mktemp("long") / "artifact"
    compile_model(BUNDLED_MODEL, artifact, CompileOptions(accuracy_bound=None, sequences=3, context=1024))
    return artifact


def test_released_memory_is_what_lies_behind_the_tokens(long: Path) -> None:
    """A short text follows a long one in each slot; what the long one leaves is zero afterwards, page by page."""
    with picompile_runtime.load(long, threads=2) as engine:
        rng = np.random.default_rng(2)
        for slot in range(3):
            engine.prefill(rng.integers(0, engine.vocab, 900).tolist(), slot)
        caches = host_states(engine)
        before = {name: cache.copy() for name, cache in caches.items()}
        engine.rewind(70, 1)
        engine.release(1)
        engine.reset(2)
        engine.release(2)
        for name, cache in caches.items():
            assert np.array_equal(cache[0], before[name][0])
            assert np.array_equal(cache[1, :, :70], before[name][1, :, :70])
            row_bytes = cache[0, 0, 0].nbytes
            rows_of_page = -(-mmap.PAGESIZE // row_bytes)
            for slot, held in ((1, 70), (2, 0)):
                assert not cache[slot, :, held + rows_of_page : 1024 - rows_of_page].any()
            assert before[name][1:, :, 850].any()
        engine.prefill(rng.integers(0, engine.vocab, 100).tolist(), 1)


def test_a_bound_on_tokens_is_what_memory_is_checked_for(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with picompile_runtime.load(long) as engine:
        cache_bytes = engine.cache_token_bytes * 3 * 1024
        assert cache_bytes == sum(cache.nbytes for cache in host_states(engine).values())
        arena_bytes = engine.artifact.program.arena_bytes
    monkeypatch.setattr("picompile_runtime.devices.memory._machine_bytes", lambda: cache_bytes // 2 + arena_bytes)
    with pytest.raises(DoesNotFitError, match=r"a cache for 3 sequences of 1024 tokens needs"):
        picompile_runtime.load(long)
    with pytest.raises(DoesNotFitError, match=r"a cache for 2300 tokens needs"):
        picompile_runtime.load(long, cache_tokens=2300)
    picompile_runtime.load(long, cache_tokens=1100).close()
