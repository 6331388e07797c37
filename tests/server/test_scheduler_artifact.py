"""The scheduler on compiled kernels: answers have the bits that they have alone, whoever runs beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import picompile_runtime
from helpers.fake_engine import SoloAnswer, Told, answer_alone
from helpers.mixtures import save_tiny_mixture
from helpers.support import BuildOnce, compile_for_test
from picompile_runtime import Engine, SamplingParams
from picompile_server.request import ServingRequest
from picompile_server.scheduler import Scheduler, SchedulerOptions

pytestmark = pytest.mark.slow("sends many requests to compiled models; the scheduler on a toy model is fast")

SLOTS, CONTEXT = 16, 192
PATIENCE_S = 120
LONG = 40  # tokens of an answer that is worth being read again


@pytest.fixture(scope="module")
def engine(build_once: BuildOnce, tiny_model: Path) -> Iterator[Engine]:
    folder = build_once(
        "tiny-artifact-of-16",
        lambda path: compile_for_test(tiny_model, path, quant="q4", context=CONTEXT, sequences=SLOTS, chunk=32),
    )
    with picompile_runtime.load(folder, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module", params=["none", "exact", "sign"])
def mixture(request: pytest.FixtureRequest, build_once: BuildOnce) -> Iterator[Engine]:
    """A mixture of experts with ReLU, by the predictor of its neurons."""

    def build(folder: Path) -> None:
        options = {"quant": "q4", "context": CONTEXT, "sequences": SLOTS, "chunk": 32, "accuracy_bound": None}
        compile_for_test(build_once("tiny-mixture", save_tiny_mixture), folder, predictor=request.param, **options)

    with picompile_runtime.load(build_once(f"tiny-mixture-of-16-{request.param}", build), threads=2) as engine:
        yield engine


def random_request(random: np.random.Generator, system: list[int]) -> ServingRequest:
    """A request of any kind; half of them begin with `system`."""
    prompt = random.integers(0, 256, random.integers(1, 90)).tolist()
    params = SamplingParams(
        temperature=float(random.choice([0.0, 0.7, 1.3])),
        top_k=int(random.choice([0, 5, 40])),
        top_p=float(random.choice([0.9, 1.0])),
        repetition_penalty=float(random.choice([1.0, 1.2])),
        presence_penalty=float(random.choice([0.0, 0.8])),
        seed=int(random.integers(1000)),
    )
    top = [None, 0, 4][random.integers(3)]
    return ServingRequest(
        (system if random.random() < 0.5 else []) + prompt,
        params,
        int(random.integers(0, 60)),
        top,
        with_prompt=top is not None and random.random() < 0.3,
        ignore_end=random.random() < 0.7,
    )


def ask(scheduler: Scheduler, request: ServingRequest) -> Told:
    told = Told()
    scheduler.submit(request, told)
    return told


def is_same(told: Told, expected: SoloAnswer) -> bool:
    """Whether an answer is the same token by token, and its log-probabilities bit by bit."""
    found = told.answer()
    return repr(found) == repr(expected) and found == expected


def test_64_requests_over_16_slots_are_answered_as_alone(engine: Engine) -> None:
    compare_with_alone(engine, 8)


def test_requests_to_a_mixture_are_answered_as_alone(mixture: Engine) -> None:
    """Although tokens of several sequences share experts, drafts are read with them, and prefixes are used again."""
    compare_with_alone(mixture, 9)


def compare_with_alone(engine: Engine, seed: int) -> None:
    random = np.random.default_rng(seed)
    system = random.integers(0, 256, 50).tolist()
    requests = [random_request(random, system) for _ in range(64)]
    expected = [answer_alone(engine, request, number % SLOTS) for number, request in enumerate(requests)]
    scheduler = Scheduler(engine, start=False)
    told, answers = [Told() for _ in requests], []
    cancelled = set(random.permutation(64)[:12].tolist())
    for number, request in enumerate(requests):
        answers.append(scheduler.submit(request, told[number]))
        for _ in range(random.integers(0, 4)):
            scheduler.step()
        if number in cancelled:
            answers[random.choice(list(cancelled & set(range(number + 1))))].cancel()
    scheduler.close()
    reasons = {each.reason for each in told}
    assert reasons >= {"cancelled", "max_tokens"} and "error" not in reasons
    for each, one in zip(told, expected, strict=True):
        assert each.is_beginning_of(one) if each.reason == "cancelled" else is_same(each, one)
    assert scheduler.stats().cached_tokens > 500
    assert {slot.activity for slot in scheduler.slots()} == {"idle"}


def test_a_known_prefix_changes_no_bit(engine: Engine) -> None:
    """Nor does another function of the program, which reads a prompt whose log-probabilities are wanted."""
    random = np.random.default_rng(10)
    system = random.integers(0, 256, 70).tolist()
    prompts = [[*system, *random.integers(0, 256, 9).tolist()] for _ in range(6)]
    requests = [ServingRequest(prompt, SamplingParams(seed=1), 20, 3, ignore_end=True) for prompt in prompts]
    expected = [answer_alone(engine, request) for request in requests]
    scheduler = Scheduler(engine, start=False)
    told = [ask(scheduler, request) for request in requests]
    scored = ask(scheduler, replace(requests[0], with_prompt=True))
    scheduler.close()
    assert [each.prompt.cached_tokens for each in (*told, scored)] == [0, *[70] * 5, 0]
    assert all(is_same(each, one) for each, one in zip(told, expected, strict=True))
    assert scored.answer().tokens == expected[0].tokens
    assert scored.answer().log_probabilities == expected[0].log_probabilities
    # Neurons that fire are counted.
    share = scheduler.stats().fired_share
    assert share is not None and 0 < share < 1


@pytest.mark.parametrize(("options", "reused"), [({}, LONG), ({"reread": False}, 0)])
def test_the_next_question_of_a_chat_finds_the_answer(engine: Engine, options: dict[str, bool], reused: int) -> None:
    prompt = np.random.default_rng(11).integers(0, 256, 33).tolist()
    scheduler = Scheduler(engine, SchedulerOptions(**options), start=False)  # type: ignore[arg-type]
    first = ask(scheduler, ServingRequest(prompt, SamplingParams(seed=1), LONG, ignore_end=True))
    while scheduler.step():
        pass
    question = ServingRequest([*prompt, *first.tokens, 1, 2, 3], SamplingParams(seed=2), 25, 2, ignore_end=True)
    second = ask(scheduler, question)
    scheduler.close()
    assert second.prompt.cached_tokens == len(prompt) + reused
    assert is_same(second, answer_alone(engine, question))
