"""Random requests, cancellations, failures and turns: what holds for a scheduler whatever happens to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.fake_engine import CHUNK, CONTEXT, END, FakeEngine, Told, answer_alone
from helpers.support import HYPOTHESIS_PROFILE
from picompile_runtime import RequestError, SamplingParams
from picompile_server.request import Event, PromptRead, ServingRequest
from picompile_server.scheduler import Answer, QueueFullError, Scheduler, SchedulerOptions

# Prompts are made of these, so that many begin alike; some begin with a whole answer.
PARTS = st.sampled_from([[3] * CHUNK, [4, 5, 6] * 7, [7] * (2 * CHUNK + 1), [8], [9, END]])
RARELY = st.sampled_from([False, False, False, True])
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.5]),
    top_k=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
)


@dataclass
class Asked:
    """A request with what became of it; it is its own listener."""

    request: ServingRequest
    fails_at: int | None
    told: Told = field(default_factory=Told)
    answer: Answer | None = None
    is_cancelled: bool = False
    is_compared: bool = False

    def __call__(self, event: Event) -> None:
        self.told(event)
        if len(self.told.events) - 1 == self.fails_at:
            self.is_cancelled = True
            raise RuntimeError("the client has gone")


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler on a fake engine, driven turn by turn."""

    @initialize(
        sequences=st.integers(1, 4),
        kv_tokens=st.sampled_from([None, None, 60, CONTEXT, CONTEXT + 40]),
        max_waiting=st.sampled_from([1, 3, 100]),
        reread=st.booleans(),
    )
    def begin(self, sequences: int, kv_tokens: int | None, max_waiting: int, reread: bool) -> None:
        options = SchedulerOptions(max_waiting=max_waiting, kv_tokens=kv_tokens, reread=reread)
        self.engine = FakeEngine(sequences)
        self.scheduler = Scheduler(self.engine, options, start=False)  # type: ignore[arg-type]
        self.asked = list[Asked]()
        self.read_order = list[int]()
        self.failures = 0

    @rule(
        prompt=st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: [*chain(*parts)]),
        max_tokens=st.sampled_from([0, 1, 3, 20, None]),
        params=PARAMS,
        top=st.sampled_from([None, None, 0, 2]),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        fails_at=st.sampled_from([None] * 6 + [0, 1, 4]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int | None,
        params: SamplingParams,
        top: int | None,
        flags: tuple[bool, bool, bool],
        fails_at: int | None,
    ) -> None:
        with_prompt, ignore_end, follows = flags
        ended = [asked for asked in self.asked if asked.told.ended.is_set() and asked.told.tokens]
        if follows and ended:
            prompt = [*ended[-1].request.prompt, *ended[-1].told.tokens, 8]
        request = ServingRequest(prompt, params, max_tokens, top, with_prompt and top is not None, ignore_end)
        asked = Asked(request, fails_at)
        waiting, idle = self.scheduler.stats().waiting, self._idle()
        try:
            asked.answer = self.scheduler.submit(request, asked)
        except QueueFullError:
            assert waiting - idle >= self.scheduler.options.max_waiting
        except RequestError:
            most = self.scheduler.options.kv_tokens or CONTEXT
            assert len(prompt) + (max_tokens != 0) > CONTEXT or _needs(request) > most
        else:
            assert waiting - idle < self.scheduler.options.max_waiting
            self.asked.append(asked)
            assert asked.answer.number == len(self.asked)

    @precondition(lambda self: any(not asked.told.ended.is_set() for asked in self.asked))
    @rule(cancels=RARELY, data=st.data())
    def cancel(self, cancels: bool, data: st.DataObject) -> None:
        if not cancels:
            return
        going = [asked for asked in self.asked if not asked.told.ended.is_set()]
        asked = data.draw(st.sampled_from(going), label="asked")
        asked.is_cancelled = True
        assert asked.answer is not None
        asked.answer.cancel()
        self.step()
        assert asked.told.ended.is_set() or asked.fails_at is not None
        assert asked.answer.number not in [slot.request for slot in self.scheduler.slots()]

    @rule(turns=st.integers(1, 12))
    def turns(self, turns: int) -> None:
        for _ in range(turns):
            self.step()

    @rule(fails=RARELY)
    def step_of_an_engine_that_may_fail(self, fails: bool) -> None:
        self.engine.failures = int(fails)
        calls = len(self.engine.steps())
        self.step()
        if not fails or len(self.engine.steps()) == calls:  # there was nothing to do
            self.engine.failures = 0
            return
        self.failures += 1
        assert self._idle() == self.engine.sequences
        assert self.scheduler.stats().held_tokens == 0

    def step(self) -> None:
        """Do a turn, which may do one chunk and one step of all that are decoding."""
        before = self.scheduler.stats()
        decoding = {slot.slot: slot.request for slot in self.scheduler.slots() if slot.activity == "decoding"}
        count = len(self.engine.steps())
        has_worked = self.scheduler.step()
        names = [call.name for call in self.engine.steps()[count:]]
        assert names in (
            [],
            ["decode"],
            *([name, *rest] for name in ("chunk", "last", "score") for rest in ([], ["decode"])),
        )
        still = {slot.slot for slot in self.scheduler.slots() if decoding.get(slot.slot, 0) == slot.request}
        assert not still or (names[-1] == "decode" and still <= set(self.engine.steps()[-1].slots))
        assert has_worked or before.waiting + before.reading + before.decoding == 0
        for asked in self.asked:
            number = 0 if asked.answer is None else asked.answer.number
            if asked.told.events and isinstance(asked.told.events[0], PromptRead) and number not in self.read_order:
                self.read_order.append(number)

    @invariant()
    def books_and_engine_agree(self) -> None:
        slots = self.scheduler.slots()
        for slot, cache in zip(slots, self.engine.caches, strict=True):
            assert slot.tokens <= len(cache)
            assert slot.request is None or slot.tokens == len(cache)
        running = [slot.request for slot in slots if slot.request is not None]
        ended = {asked.answer.number for asked in self.asked if asked.answer and asked.told.ended.is_set()}
        assert len(set(running)) == len(running) and not ended & set(running)
        stats = self.scheduler.stats()
        assert stats.reading + stats.decoding == len(running)
        assert stats.waiting + len(running) + sum(stats.finished.values()) == len(self.asked)
        assert stats.reading <= 1

    @invariant()
    def reservations_keep_to_the_budget(self) -> None:
        stats, slots = self.scheduler.stats(), self.scheduler.slots()
        needs = {asked.answer.number: _needs(asked.request) for asked in self.asked if asked.answer}
        assert stats.reserved_tokens == sum(needs[slot.request] for slot in slots if slot.request is not None)
        assert all(slot.tokens <= needs[slot.request] for slot in slots if slot.request is not None)
        # Memory that slots have taken and not given back counts, whoever has it.
        idle = sum(self.engine.resident[slot.slot] for slot in slots if slot.request is None)
        assert stats.reserved_tokens + idle <= stats.capacity_tokens
        assert all(self.engine.resident[slot.slot] <= needs[slot.request] for slot in slots if slot.request is not None)

    @invariant()
    def prompts_are_read_in_order_of_arrival(self) -> None:
        assert self.read_order == sorted(self.read_order)
        started = [slot.request for slot in self.scheduler.slots() if slot.request is not None]
        going = [asked for asked in self.asked if not asked.told.ended.is_set() and not asked.is_cancelled]
        numbers = [asked.answer.number for asked in going if asked.answer]
        waiting = [number for number in numbers if number not in started]
        assert not started or not waiting or max(started) < min(waiting)

    @invariant()
    def answers_are_those_of_each_request_alone(self) -> None:
        for asked in self.asked:
            if asked.told.ended.is_set() and not asked.is_compared:
                asked.is_compared = True
                expected = answer_alone(FakeEngine(), asked.request)
                if asked.told.reason in ("cancelled", "error"):
                    assert asked.is_cancelled if asked.told.reason == "cancelled" else self.failures
                    assert asked.told.is_beginning_of(expected)
                else:
                    assert asked.told.answer() == expected

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        turns = 0
        while self.scheduler.step():
            turns += 1
            assert turns < 10_000
        self.answers_are_those_of_each_request_alone()
        self.books_and_engine_agree()
        assert self._idle() == self.engine.sequences
        assert all(asked.told.ended.is_set() or asked.fails_at is not None for asked in self.asked)
        assert self.scheduler.stats().reserved_tokens == 0

    def _idle(self) -> int:
        return sum(slot.request is None for slot in self.scheduler.slots())


def _needs(request: ServingRequest) -> int:
    most = CONTEXT if request.max_tokens is None else request.max_tokens
    return min(len(request.prompt) + most, CONTEXT)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(settings.get_profile(HYPOTHESIS_PROFILE), max_examples=40, stateful_step_count=50)
