"""Generation where the head runs on the accelerator: the host gets the highest logits, and chooses the same tokens."""

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from helpers.gpu_artifacts import HOT, fake_cuda, fake_library, gpu, gpu_artifact, gpu_kernels, gpu_model, host_artifact
from helpers.support import BuildOnce, compile_for_test
from picompile_runtime import Engine, Sampler, SamplingParams, Scores, Tokenizer, generate, load
from picompile_runtime.engine.executor import Executor

pytestmark = pytest.mark.slow("compiles models for two devices")

__all__ = ["fake_cuda", "fake_library", "gpu", "gpu_artifact", "gpu_kernels", "gpu_model", "host_artifact"]

PROMPT = [1, 15, 7, 200, 31]
COUNT, VOCAB, SEQUENCES = 64, 300, 2
PARAMS = [SamplingParams(temperature=0), SamplingParams(seed=5), SamplingParams(top_k=3, top_p=1.0, seed=6)]


@pytest.fixture(scope="session")
def hybrid_artifact(build_once: BuildOnce, gpu_model: Path) -> Path:
    """`gpu_artifact` for a second partition of the CPU, with room for several sequences."""
    sizes = {"quant": "f16", "context": 32, "chunk": 16, "hot": HOT, "sequences": SEQUENCES}
    return build_once("sampling-hybrid", lambda folder: compile_for_test(gpu_model, folder, accelerator="cpu", **sizes))


@pytest.fixture
def hybrid(hybrid_artifact: Path) -> Iterator[Engine]:
    with load(hybrid_artifact, threads=2) as engine:
        yield engine


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions whose logits were asked for, as often as they were."""
    functions: list[str] = []
    logits = Executor.logits

    def ask(self: Executor, function: str, *args: object, **options: object) -> object:
        functions.append(function)
        return logits(self, function, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Executor, "logits", ask)
    return functions


def generated(engine: Engine, params: SamplingParams, count: int = 12) -> list[int]:
    generation = generate(engine, Tokenizer.of(engine.artifact), PROMPT, params, count)
    list(generation)
    return generation.tokens


def chosen_from_all(engine: Engine, params: SamplingParams, count: int = 12) -> list[int]:
    """Return the tokens that are chosen from all logits of each step."""
    engine.reset()
    sampler = Sampler(params, engine.vocab)
    sampler.observe(PROMPT)
    tokens = [sampler.sample(engine.prefill(PROMPT))]
    while len(tokens) < count and tokens[-1] not in engine.artifact.eos_token_ids:
        tokens.append(sampler.sample(engine.decode(tokens[-1])))
    return tokens


def test_same_tokens(hybrid: Engine, host_artifact: Path, asked: list[str]) -> None:
    """As from all logits, and as on the host alone, whose logits have the same bits."""
    with load(host_artifact, threads=1) as alone:
        for params in PARAMS:
            tokens = generated(hybrid, params)
            assert len(tokens) > 3 and not asked
            assert tokens == chosen_from_all(hybrid, params)
            assert set(asked) == {"prefill_last", "decode"}
            asked.clear()
            assert tokens == generated(alone, params)
            asked.clear()
    # Where the highest logits do not decide, all are read.
    for params in (SamplingParams(top_k=0, seed=1), SamplingParams(repetition_penalty=1.4, seed=2)):
        tokens = generated(hybrid, params)
        assert asked == ["prefill_last"] + ["decode"] * (len(tokens) - 1)
        assert tokens == chosen_from_all(hybrid, params)
        asked.clear()


def check_scores(scores: Scores, logits: np.ndarray) -> None:
    """The bits of `logits`, and the highest of them."""
    assert scores.top_logits is not None
    ids = np.lexsort((np.arange(VOCAB), -logits))[:COUNT]
    assert scores.top_logits.ids.tolist() == ids.tolist()
    assert scores.top_logits.scores.tobytes() == logits[ids].tobytes()
    assert scores.logits().tobytes() == logits.tobytes()


def test_scores_of_every_kind_of_step(hybrid: Engine) -> None:
    """With all logits of each row read where they are."""

    def steps(reads: bool) -> list[Scores | np.ndarray]:
        for slot in range(SEQUENCES):
            hybrid.rewind(0, slot)
        found: list[Scores | np.ndarray] = []

        def keep(made: Scores | np.ndarray) -> None:
            if isinstance(made, Scores):
                all_of = made.logits()
                made = Scores(lambda: all_of, made.top_logits)
            found.append(made)

        def batch(tokens: Sequence[int], slots: Sequence[int]) -> None:
            rows = hybrid.read_sequences(tokens, slots) if reads else hybrid.decode_sequences(tokens, slots)
            for row in rows:
                keep(row)

        keep(hybrid.read(PROMPT * 4) if reads else hybrid.prefill(PROMPT * 4))
        keep(hybrid.read(PROMPT, 1) if reads else hybrid.prefill(PROMPT, 1))
        keep(hybrid.read([9]) if reads else hybrid.decode(9))
        batch([4, 5], [1, 0])
        batch([7, 8], [0, 1])
        batch([3], [1])
        return found

    read, logits = steps(True), steps(False)
    assert len(read) == len(logits) == 8
    for scores, row in zip(read, logits, strict=True):
        check_scores(scores, row)


def test_on_a_gpu(gpu_artifact: Path, host_artifact: Path, gpu: ctypes.CDLL, asked: list[str]) -> None:
    """Its sums are made in another order, so that only its own logits have the same bits."""
    with load(gpu_artifact, threads=1) as engine:
        check_scores(engine.read(PROMPT), (engine.reset(), engine.prefill(PROMPT))[1])
        asked.clear()
        tokens = [generated(engine, params, 6) for params in PARAMS]
        assert not asked
        assert tokens == [chosen_from_all(engine, params, 6) for params in PARAMS]
    with load(host_artifact, threads=1) as alone:
        assert tokens == [generated(alone, params, 6) for params in PARAMS]
        alone.reset()
        scores = alone.read(PROMPT)
        assert scores.top_logits is None
        assert np.array_equal(scores.logits(), (alone.reset(), alone.prefill(PROMPT))[1])
