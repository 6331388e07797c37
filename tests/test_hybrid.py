"""Artifacts whose hot neurons are on a second partition of the CPU give what those without an accelerator give.

With the same hot neurons, all logits have the same bits, whichever side is late. Where neurons are not in two parts,
sums are in another order: then it is greedy tokens that are the same. Each family has one format and one pair of
shares.
"""

import json
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import picompile_runtime
from helpers.families import VARIANTS
from helpers.hybrid import (
    EXCHANGES,
    SEQUENCES,
    SIDES,
    Naps,
    assert_same_bits,
    compare_choices,
    compile_naps,
    device_array,
    every_step,
    greedy,
    hot_sets,
    poison,
    shares_of,
)
from helpers.states import host_states
from helpers.support import BUNDLED_MODEL
from picompile.choices import CHUNK
from picompile.compile import compile_model
from picompile.compile import lower as compile_lower
from picompile.config import CompileOptions
from picompile.frontend.captured import Captured
from picompile.frontend.hf import load_model
from picompile_codegen.lowering.placement import ON_HOST, Placement
from test_end_to_end import BYTES_TOLERANCE, TOLERANCE, Capture, captured
from test_prediction import held_out, write_predictors

__all__ = ["captured", "held_out"]

# Hot shares of the neurons of the first and of the second layer.
PAIRS = ((0.0, 0.1), (0.5, 0.5), (1.0, 0.5), (0.5, 0.0), (0.9, 0.1))
# Which sides sleep, and before which kernels; all, where none is named.
DELAYS = {
    "nobody": ((), ()),
    "host": (SIDES[:1], ()),
    "accelerator": (SIDES[1:], ()),
    "both": (SIDES, ()),
    "exchanges": (SIDES, EXCHANGES),
}
TOKENS = 45
# How far apart two logits must be to stay in order, relative to the largest. In q4 eight neurons are rounded together,
# which are another eight where there are two parts.
ROUNDING = {"f16": TOLERANCE, "q4": BYTES_TOLERANCE}


@pytest.fixture(scope="module")
def naps(tmp_path_factory: pytest.TempPathFactory) -> Naps:
    return compile_naps(tmp_path_factory.mktemp("naps"))


@dataclass(frozen=True)
class Pair:
    """Artifacts of the same parts: of which one device computes one after the other, and two devices both at once."""

    apart: Path
    hybrid: Path


def compile_pair(model: Captured | Path, folder: Path, **options: object) -> Pair:
    pair = Pair(folder / "apart", folder / "hybrid")
    compile_model(model, pair.apart, CompileOptions(**options))  # type: ignore[arg-type]
    compile_model(model, pair.hybrid, CompileOptions(accelerator="cpu", **options))  # type: ignore[arg-type]
    return pair


def check_bits(pair: Pair, ids: list[int], naps: Naps, *delays: str) -> None:
    """AssertionError unless the two give the same bits and count the same neurons, with each of `delays`."""
    with picompile_runtime.load(pair.apart, threads=1) as engine:
        expected, shares = every_step(engine, ids), shares_of(engine)
    for name in delays:
        sides, before = DELAYS[name]
        with naps.delaying(sides, len(ids), before=before), picompile_runtime.load(pair.hybrid, threads=2) as engine:
            assert "accelerator" in {call.device for call in engine._program.functions["decode"]}
            poison(engine)
            assert_same_bits(every_step(engine, ids), expected)
            assert shares_of(engine) == shares


def tokens_of(artifact: Path, prompt: list[int], count: int = TOKENS) -> list[int]:
    with picompile_runtime.load(artifact, threads=2) as engine:
        return greedy(engine, prompt, count)[0]


def random_ids(vocabulary: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, vocabulary, 2 * CHUNK + 9).tolist()
    return ids


# ---- families ----


@pytest.mark.slow("compiles a model per family for two devices; caches of one are fast")
@pytest.mark.parametrize(
    ("name", "quant", "shares"),
    [(name, ("f16", "q4")[number % 2], PAIRS[number % len(PAIRS)]) for number, name in enumerate(VARIANTS)],
)
def test_families(
    name: str, quant: str, shares: tuple[float, float], captured: Capture, naps: Naps, tmp_path: Path
) -> None:
    """The bits equal those of the same parts one after the other, and the tokens those of all neurons together.

    Most kernels are those of test_end_to_end.py, which need not be compiled twice.
    """
    model, random = captured(name), np.random.default_rng(len(name))
    ids = random_ids(model.facts.vocab, len(name))
    options = {"quant": quant, "kv_dtype": None if quant == "f16" else "f32"}
    pair = compile_pair(model, tmp_path, hot=hot_sets(model.facts.ffn, shares, random), **options)
    check_bits(pair, ids, naps, "nobody", "both")
    # Its down matrices are rounded by neurons as well, as those of parts are.
    every = {layer: range(model.facts.ffn) for layer in range(model.facts.layers)}
    compile_model(model, tmp_path / "whole", CompileOptions(hot=every, **options))
    with (
        picompile_runtime.load(tmp_path / "whole", threads=1) as whole,
        picompile_runtime.load(pair.hybrid, threads=2) as hybrid,
    ):
        clear, same = compare_choices(whole, hybrid, [ids[:11], ids[3:5], ids[7:30]], TOKENS // 3, ROUNDING[quant])
    # In q4 those of which the choice is clear are the same, and there are many.
    assert same.all() if quant == "f16" else clear.mean() > 0.25


@pytest.mark.slow("compiles models for two devices; caches of one are fast")
@pytest.mark.parametrize(
    ("name", "quant", "shares"),
    [("llama-relu", "f16", (0.0, 0.1)), ("opt-post-norm", "q4", (0.5, 0.9)), ("llama-relu", "q4", (1.0, 0.5))],
    ids=str,
)
def test_every_delay(
    name: str, quant: str, shares: tuple[float, ...], captured: Capture, naps: Naps, tmp_path: Path
) -> None:
    model = captured(name)
    hot = hot_sets(model.facts.ffn, shares, np.random.default_rng(int(100 * sum(shares))))
    ids = random_ids(model.facts.vocab, 3)
    pair = compile_pair(model, tmp_path, quant=quant, hot=hot, sequences=SEQUENCES)
    check_bits(pair, ids, naps, *DELAYS)


@pytest.mark.slow("compiles models for two devices; caches of one are fast")
def test_trained_model_gives_the_same_tokens(tmp_path: Path) -> None:
    """Its logits are apart by more than sums in another order make them differ by."""
    model, prompt = load_model(BUNDLED_MODEL), [1, 17, 300, 42, 5]
    compile_model(model, tmp_path / "whole", CompileOptions(quant="f16"))
    expected = tokens_of(tmp_path / "whole", prompt, 100)
    for share in (0.1, 0.9):
        hot = hot_sets(model.facts.ffn, (share,) * model.facts.layers, np.random.default_rng(int(10 * share)))
        compile_model(model, tmp_path / str(share), CompileOptions(quant="f16", hot=hot, accelerator="cpu"))
        assert tokens_of(tmp_path / str(share), prompt, 100) == expected, share


# ---- placements ----

PLACEMENTS = {
    "hot neurons": ON_HOST,
    "one layer": Placement(frozenset({1}), frozenset({1})),
    "caches": Placement(caches=frozenset({0, 1})),
    "crosswise": Placement(attention=frozenset({0}), caches=frozenset({1}), head=True),
    "head": Placement(head=True),
}


@pytest.mark.slow("compiles models for two devices; caches of one are fast")
@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("opt-post-norm", "caches"),
        ("opt-post-norm", "one layer"),
        ("falcon-7b", "crosswise"),
        ("falcon-7b", "hot neurons"),
        ("llama-relu", "head"),
    ],
)
def test_placements(
    name: str, placement: str, captured: Capture, naps: Naps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plans have them: what is not hot is on either side."""
    monkeypatch.setattr(compile_lower, "_placement", lambda plan, layers: PLACEMENTS[placement])
    model = captured(name)
    hot = hot_sets(model.facts.ffn, (0.1, 0.9), np.random.default_rng(8))
    pair = compile_pair(model, tmp_path, quant="f16", hot=hot)
    check_bits(pair, random_ids(model.facts.vocab, 2), naps, "nobody", "both")


@pytest.mark.slow("compiles a pair of artifacts")
def test_a_plan_with_nothing_on_the_accelerator(
    captured: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may leave nothing to it: then the artifact is one for the host, which takes all threads."""
    monkeypatch.setattr(compile_lower, "_placement", lambda plan, layers: ON_HOST)
    pair = compile_pair(captured("llama-relu"), tmp_path, quant="f16", hot={0: (), 1: ()})
    manifest = json.loads((pair.hybrid / "manifest.json").read_text())
    assert "accelerator" not in manifest
    assert picompile_runtime.verify(pair.hybrid).accelerator is None
    assert tokens_of(pair.hybrid, [3, 1, 4]) == tokens_of(pair.apart, [3, 1, 4])


@pytest.mark.slow("compiles models for two devices; caches of one are fast")
@pytest.mark.parametrize("bias", [0.0, -1e4])
def test_hybrid_steps_with_learned_predictors(
    bias: float, tiny_model: Path, held_out: Path, naps: Naps, tmp_path: Path
) -> None:
    """Masks go to the host: of half of the neurons, and of none, for which the device does not wait."""
    predictors = write_predictors(tiny_model, tmp_path / "predictors", bias)
    options = {"predictor": "learned", "predictors": predictors, "calibration": (held_out,), "check_tokens": 40}
    hot = hot_sets(200, (0.5, 0.0), np.random.default_rng(1))
    pair = compile_pair(tiny_model, tmp_path, quant="f16", accuracy_bound=None, hot=hot, chunk=64, **options)
    check_bits(pair, random_ids(300, 4), naps, *DELAYS)
    with picompile_runtime.load(pair.hybrid, threads=2) as engine:
        greedy(engine, [1, 2, 3], 10)
        computed = shares_of(engine)[0, "cold"][0]
    assert computed == 0 if bias < -10 else 0 < computed < 1


# ---- slots ----


@pytest.fixture(scope="module")
def split(captured: Capture, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Artifacts of which one layer's cache is on the device, the other's on the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_lower, "_placement", lambda plan, layers: Placement(caches=frozenset({1})))
        folder, hot = tmp_path_factory.mktemp("split"), {0: range(20), 1: range(180)}
        return compile_pair(captured("llama-relu"), folder, quant="f16", hot=hot, sequences=SEQUENCES)


@pytest.mark.slow("compiles a pair of artifacts")
def test_caches_of_both_sides_are_copied_and_rewound(split: Pair) -> None:
    """Neither has anything of what was not copied."""
    ids = random_ids(503, 5)
    with picompile_runtime.load(split.apart) as apart, picompile_runtime.load(split.hybrid, threads=2) as engine:
        caches = [host_states(engine)["k.0"], device_array(engine, "state", "k.1")]
        for each in (apart, engine):
            each.prefill(ids[:9])
            each.prefill(ids[4:20], 1)
            each.rewind(6)
            each.copy(0, 1)
        for cache in caches:
            np.testing.assert_array_equal(cache[1, :, :6], cache[0, :, :6])
            assert (cache[1, :, 6:16] != cache[0, :, 6:16]).any()
            assert not cache[2].any()
        for slot in (1, 0):
            np.testing.assert_array_equal(engine.decode(ids[9], slot), apart.decode(ids[9], slot))


@pytest.mark.slow("compiles a pair of artifacts")
def test_engines_and_threads(split: Pair) -> None:
    """Two engines on one artifact, in two threads; nothing of them is left when they are closed."""
    before = set(threading.enumerate())
    with (
        picompile_runtime.load(split.hybrid, threads=2) as one,
        picompile_runtime.load(split.hybrid, threads=1) as other,
    ):
        found: dict[int, list[int]] = {}

        def run(number: int, engine: picompile_runtime.Engine) -> None:
            found[number] = greedy(engine, [7, 8, 9], TOKENS)[0]

        threads = [threading.Thread(target=run, args=(number, each)) for number, each in enumerate((one, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == dict.fromkeys(range(2), tokens_of(split.apart, [7, 8, 9]))
    assert set(threading.enumerate()) == before
