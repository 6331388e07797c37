"""A toy model on a host and an accelerator: its logits equal those of the host alone, and no failure makes it hang."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.hybrid import assert_same_bits, every_step
from helpers.toys.toy_artifact import code_entry, make_toy, set_at
from helpers.toys.toy_two_sides import HOT, build_hybrid_library, write_hybrid
from picompile_runtime import ArtifactError, Engine, KernelError, MachineError, load, verify
from picompile_runtime.devices.memory import aligned_zeros

TOY = make_toy()
IDS = np.random.default_rng(6).integers(0, TOY.vocab, 40).tolist()


@pytest.fixture(scope="module")
def hybrid_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hybrid_library(tmp_path_factory.mktemp("hybrid") / "host.so")


@pytest.fixture(scope="module")
def impatient_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose sides wait for each other for 100 ms, and not for half a minute."""
    return build_hybrid_library(tmp_path_factory.mktemp("impatient") / "host.so", "PI_PATIENCE_NS=100000000")


@pytest.fixture
def make_hybrid(tmp_path: Path, hybrid_library: Path) -> Callable[..., Path]:
    numbers = itertools.count()

    def make(library: Path = hybrid_library, **options: Any) -> Path:
        return write_hybrid(tmp_path / f"hybrid{next(numbers)}", library, TOY, **options)

    return make


@pytest.fixture
def engine(make_hybrid: Callable[..., Path]) -> Iterator[Engine]:
    with load(make_hybrid(), threads=2) as engine:
        yield engine


@pytest.fixture
def alone(make_artifact: Callable[..., Path]) -> Iterator[Engine]:
    """Return an engine for the same model on the host alone."""
    with load(make_artifact(toy=TOY, sequences=3), threads=1) as engine:
        yield engine


# ---- what it computes ----


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_logits_equal_those_of_the_host_alone(threads: int, make_hybrid: Callable[..., Path], alone: Engine) -> None:
    with load(make_hybrid(), threads=threads) as engine:
        expected = every_step(alone, IDS)
        assert_same_bits(every_step(engine, IDS), expected)
        assert_same_bits(every_step(engine, IDS), expected)


def test_neurons_are_counted_on_both_sides_together(engine: Engine, alone: Engine) -> None:
    for each in (engine, alone):
        every_step(each, IDS)
    for function in ("decode", "batch"):
        assert engine.firing(function) == alone.firing(function)
        assert engine.firing(function)[0].computed_share > 0
    engine.reset_firing()
    assert [row.computed_share for function in ("decode", "batch") for row in engine.firing(function)] == [0, 0]
    engine.decode(1, 2)
    assert engine.firing()[0].computed_share == 0.75


def test_step_numbers_wrap_around(engine: Engine, alone: Engine) -> None:
    """They have 31 bits, and a flag is not mistaken for one that is set because it was so in the step before."""
    step = engine._executor._step
    step[3] = 2**31 - 3
    seen = []
    for token in IDS[:6]:
        np.testing.assert_array_equal(engine.decode(token), alone.decode(token))
        seen.append(int(step[3]))
    assert seen == [2**31 - 2, 2**31 - 1, 1, 2, 3, 4]


def test_calls_that_wait_for_the_other_side_are_marked(engine: Engine) -> None:
    """So that threads of the pool do not sleep until the last of them is over."""
    executor = engine._executor
    for function in ("decode", "prefill", "prefill_last", "score", "batch"):
        sides = (executor._host_calls[function], executor._accelerator_calls[function])
        marked = [{name for name, call in zip(side.names, side.calls, strict=True) if call.flags} for side in sides]
        assert marked == [set() if function == "prefill" else {"toy_wait"}, {"toy_receive"}]


# ---- several engines, threads ----


def test_engines_on_one_artifact_in_several_threads(make_hybrid: Callable[..., Path], alone: Engine) -> None:
    """No engine gets the host while another has the accelerator: both would wait until the step timeout. Threads of the
    accelerators end with the engines.
    """
    folder, expected = make_hybrid(), every_step(alone, IDS)

    def run(_: int) -> None:
        with load(folder, threads=2) as engine:
            for _ in range(5):
                assert_same_bits(every_step(engine, IDS), expected)

    before = device_threads()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, range(3)))
    assert device_threads() <= before


def device_threads() -> int:
    return sum(thread.name.startswith("picompile") for thread in threading.enumerate())


# ---- failures ----


def replace_calls(
    patch: pytest.MonkeyPatch, engine: Engine, side: str, function: str, calls: Sequence[tuple[str, Sequence[Any]]]
) -> None:
    """Lets a side do something else in steps of `function`."""
    executor = engine._executor
    library = executor.library if side == "host" else executor._accelerator._library  # type: ignore[union-attr]
    calls_of = executor._host_calls if side == "host" else executor._accelerator_calls
    patch.setitem(calls_of, function, library.bind(calls))  # type: ignore[arg-type]


# The error if a side never answers: which side waited in which call for what, and which flags were set.
STEP_TIMEOUTS = {
    "host": r"step timeout: the accelerator waited too long in its call \d, toy_receive, for flag 0, which held \d "
    r"and is set by toy_signal on the host; flags set in step \d: 1, of 2",
    "accelerator": r"step timeout: the host waited too long in its call 2, toy_wait, for flag 1, which held \d and is "
    r"set by toy_send on the accelerator; flags set in step \d: 0, of 2",
}


USES: dict[str, Callable[[Engine], np.ndarray]] = {
    "decode": lambda engine: engine.decode(IDS[5]),
    "prefill_last": lambda engine: engine.prefill(IDS[5:8]),
    "score": lambda engine: next(engine.score(IDS[5:8])),
    "batch": lambda engine: engine.decode_sequences(IDS[5:7], [0, 2]),
}


@pytest.mark.parametrize("function", USES)
@pytest.mark.parametrize("answers", [True, False], ids=["fails", "never answers"])
@pytest.mark.parametrize("side", ["host", "accelerator"])
def test_a_side_that_fails_ends_the_step_and_no_more(
    side: str, answers: bool, function: str, make_hybrid: Callable[..., Path], impatient_library: Path, alone: Engine
) -> None:
    """If a side says that it fails, the other is told: with the patience that artifacts have, this would else take half
    a minute. If it is never heard of, the other gives up. The next steps are right.
    """
    folder, use = make_hybrid() if answers else make_hybrid(impatient_library), USES[function]
    with load(folder, threads=2) as engine:
        for each in (engine, alone):
            each.prefill(IDS[:5])
        for _ in range(2 if answers else 1):
            says = r"^call 0, kernel fail: ValueError" if answers else STEP_TIMEOUTS[side]
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KernelError, match=says):
                replace_calls(patch, engine, side, function, [("fail", [])] if answers else [])
                use(engine)
            assert engine._executor.buffers["abandoned"][1:].any() != answers  # whether anybody gave up
            assert engine.positions == (5, 0, 0)
        np.testing.assert_array_equal(use(engine), use(alone))
        np.testing.assert_array_equal(engine.decode(IDS[9]), alone.decode(IDS[9]))


@pytest.mark.parametrize("first", ["host", "accelerator"])
def test_the_error_is_that_of_the_side_that_failed_first(
    first: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other may fail over what that left; here it does so because it was told to leave a wait."""
    executor = engine._executor
    other = executor._accelerator._library if first == "host" else executor.library  # type: ignore[union-attr]
    run = other.run

    def wait_and_fail(calls: Any, *arguments: Any) -> None:
        while not executor._abandoned[0]:
            time.sleep(0.001)
        run(other.bind([("pool_fail", [])]), 1)

    replace_calls(monkeypatch, engine, first, "decode", [("fail", [])])
    monkeypatch.setattr(other, "run", wait_and_fail)
    with pytest.raises(KernelError, match=r"call 0, kernel fail: ValueError: this kernel always fails"):
        engine.decode(1)


INTERRUPTED = """
import os, random, signal, sys, threading, time
import numpy as np
from picompile_runtime import load
signal.signal(signal.SIGINT, signal.default_int_handler)
seed, interrupts = int(sys.argv[2]), int(sys.argv[3])
engine, alone = load(sys.argv[1], threads=2), load(sys.argv[1], threads=1)
expected = [alone.prefill(range(9)), *(alone.decode(token) for token in range(9))]
enough = threading.Event()

def steps():
    engine.reset()
    found = [engine.prefill(range(9)), *(engine.decode(token) for token in range(9))]
    assert all(map(np.array_equal, found, expected))

def interrupt():
    choose = random.Random(seed)
    for _ in range(interrupts):
        time.sleep(choose.random() * 0.01)
        os.kill(os.getpid(), signal.SIGINT)
    enough.set()

started = False
while not enough.is_set():
    try:
        if not started:
            started = True
            threading.Thread(target=interrupt, daemon=True).start()
        steps()
    except KeyboardInterrupt:
        pass
    assert not engine._executor.buffers["abandoned"][1:].any()  # nobody gave up
steps()
print("right", flush=True)
os._exit(0)
"""


@pytest.mark.slow("interrupts hundreds of steps; single interrupts are fast")
def test_interrupts_at_any_time(make_hybrid: Callable[..., Path]) -> None:
    """Steps behind them are right, and none waits for a side that is not at work."""
    folder = make_hybrid()
    for seed in range(2):
        run = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, str(folder), str(seed), "300"],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert (run.returncode, run.stdout) == (0, "right\n"), run.stderr


def test_an_interrupted_step_has_ended_on_the_accelerator(engine: Engine, alone: Engine) -> None:
    """The interrupted step must not read what the next one writes."""
    library, count = engine._executor._accelerator._library, aligned_zeros((1,), np.int32)  # type: ignore[union-attr]
    run, dozing = library.run, library.bind([("toy_doze", [count])])

    def run_and_doze(calls: Any, threads: int, stamps: Any) -> None:
        run(calls, threads, stamps)
        run(dozing, threads)

    # Who is started in the background of a shell ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "run", run_and_doze)
        main = threading.get_ident()
        interrupt = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            engine.decode(IDS[0])
            time.sleep(60)  # where the interrupt comes late
    signal.signal(signal.SIGINT, before)
    assert count[0] == 1
    interrupt.join()
    engine.reset()
    for token in IDS[:3]:
        np.testing.assert_array_equal(engine.decode(token), alone.decode(token))


def test_an_interrupt_after_the_accelerator_began_ends_its_step(engine: Engine, alone: Engine) -> None:
    """The host has not begun, and the accelerator must not wait for it until the step timeout of real artifacts."""
    device = engine._executor._accelerator
    assert device is not None
    start = device.start

    def start_and_interrupt(calls: Any, stamps: Any = None) -> None:
        start(calls, stamps)
        raise KeyboardInterrupt

    for token in IDS[:3]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "start", start_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.decode(token)
        engine.reset()
        alone.reset()
        np.testing.assert_array_equal(engine.decode(token), alone.decode(token))


# ---- artifacts ----


def refused(folder: Path, match: str, kind: type[Exception] = ArtifactError) -> None:
    with pytest.raises(kind, match=match) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def call_with(kernel: str, number: int, argument: dict[str, Any]) -> Callable[[Any], None]:
    """Gives the first call of `kernel` in `decode` another argument."""

    def change(program: Any) -> None:
        call = next(call for call in program["functions"]["decode"] if call["kernel"] == kernel)
        call["args"][number] = argument

    return change


def over(name: str, other: str) -> Callable[[Any], None]:
    """Puts a buffer where another one lies."""
    return lambda program: set_at("buffers", name, "offset", program["buffers"][other]["offset"])(program)


def moved(name: str) -> Callable[[Any], None]:
    """Puts a buffer of the runtime's into the accelerator's memory."""

    def change(program: Any) -> None:
        program["buffers"][name].update(memory="accelerator", offset=program["accelerator_arena_bytes"])
        program["accelerator_arena_bytes"] += 4096

    return change


def picks_top_logits(function: str, count: int, memory: str = "shared", ids: str = "int32") -> Callable[[Any], None]:
    """Return a change to a program: the accelerator picks the `count` highest logits of a function."""

    def change(program: Any) -> None:
        for name, dtype in (("scores", "float32"), ("ids", ids)):
            at = f"{memory}_arena_bytes"
            buffer = {"dtype": dtype, "shape": [1, count], "offset": program[at], "memory": memory}
            program["buffers"][f"leading.{name}"] = buffer
            program[at] += 64 * count
        program["leading"] = {function: {"scores": "leading.scores", "ids": "leading.ids"}}

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            call_with("toy_head", 1, {"buffer": "last.accelerator"}),
            "toy_head on the host is given last.accelerator, .* accel",
        ),
        (call_with("toy_ffn", 3, {"buffer": "stats"}), "toy_ffn on the accelerator is given stats, .* in host memory"),
        (set_at("state", "k.0", "memory", "host"), "toy_cache on the accelerator is given k.0, .* in host memory"),
        (set_at("state", "k.0", "memory", "gpu"), "memory must be one of host, accelerator, shared"),
        (set_at("functions", "decode", 0, "device", "gpu"), "device must be one of host, accelerator"),
        (lambda program: program["buffers"].pop("flags"), "flags"),
        (lambda program: program["buffers"].pop("stats.accelerator"), "stats.accelerator"),
        (set_at("buffers", "flags", "shape", [2, 8]), r"flags must be int32 \[2, 16\]|not inside of flags"),
        (set_at("buffers", "abandoned", "shape", [1]), r"abandoned must be int32 \[16\]"),
        (
            set_at("buffers", "stats.batch.accelerator", "shape", [3, 2]),
            r"stats.batch.accelerator must be int64 \[2, 2\]",
        ),
        (over("flags", "x"), "x overlaps flags"),
        (over("sent", "step"), "sent overlaps step"),
        (over("stats.batch.accelerator", "last.accelerator"), "last.accelerator overlaps stats.batch.accelerator"),
        (set_at("accelerator_arena_bytes", 64), "such that the buffer ends inside the arena"),
        (set_at("streamed", ["nothing"]), "there are no weights called nothing"),
        (set_at("streamed", "head"), "streamed must be"),
        *((moved(name), rf"{name}(,| must)") for name in ("step", "tokens", "logits", "stats", "flags")),
        (picks_top_logits("prefill", 5), "leading: prefill is no function that gives logits"),
        (picks_top_logits("batch", 5), r"leading.scores must be float32 \[3, 5\]"),
        (picks_top_logits("decode", 5, ids="float32"), r"leading.ids must be int32 \[1, 5\]"),
        (picks_top_logits("decode", 5, memory="accelerator"), "leading.scores must not be in the accelerator's memory"),
        (set_at("leading", {"decode": {"scores": "x"}}), "decode: ids must be a text, but is missing"),
        (set_at("leading", ["decode"]), "leading must be an object"),
    ],
)
def test_programs_that_mix_the_sides_up_raise(
    make_hybrid: Callable[..., Path], change: Callable[[Any], Any], match: str
) -> None:
    refused(make_hybrid(change=change), match)


def test_top_logits_leave_the_others_to_the_accelerator(make_hybrid: Callable[..., Path]) -> None:
    """Nobody else may: the runtime would find nothing there."""

    def change(program: Any) -> None:
        picks_top_logits("decode", 5)(program)
        for function in ("decode", "prefill_last"):
            program["functions"][function].pop()  # the head, which is the host's
        program["buffers"]["logits"].update(memory="accelerator", offset=program["accelerator_arena_bytes"])
        program["accelerator_arena_bytes"] += 4 * 64

    refused(make_hybrid(change=change), "buffers: logits must not be in the accelerator's memory")

    def change_both(program: Any) -> None:
        change(program)
        program["leading"]["prefill_last"] = program["leading"]["decode"]

    assert verify(make_hybrid(change=change_both)).accelerator is not None
    verify(make_hybrid())


@pytest.mark.parametrize(
    ("accelerator", "match"),
    [
        (None, "has calls for an accelerator, and no code for one; compile it again"),
        ({"kind": "tpu"}, "is for an accelerator of the kind 'tpu', which no package here opens"),
        ({"kind": "cpu", "code": []}, "code must be a list of one variant or more"),
        ({"kind": "cpu", "code": [code_entry(file="program.json")]}, "file must be one of the artifact's files"),
        ({"kind": "cuda", "sm": 89, "cubin": "no", "ptx": HOT, "launches": HOT}, "cubin must be one of"),
        ({"kind": "cuda", "sm": 5, "cubin": HOT, "ptx": HOT, "launches": HOT}, "sm must be an integer from 10"),
        ({"kind": "cpu", "code": [code_entry(file=HOT, features=["made-up"])]}, "needs a processor with made-up"),
    ],
)
def test_manifests_without_a_valid_accelerator_raise(
    make_hybrid: Callable[..., Path], accelerator: Any, match: str
) -> None:
    for_others = "made-up" in match
    refused(make_hybrid(manifest={"accelerator": accelerator}), match, MachineError if for_others else ArtifactError)


def test_accelerator_code_that_lacks_a_kernel_raises(make_hybrid: Callable[..., Path], library: Path) -> None:
    folder = make_hybrid()
    (folder / HOT).write_bytes(library.read_bytes())
    refused(folder, "was changed|instead of")
    change = set_at("functions", "decode", 5, "kernel", "no_such_kernel")
    for use in (load, verify):
        with pytest.raises(ArtifactError, match=r"hot.toy.so: has no kernel called 'no_such_kernel'"):
            use(make_hybrid(change=change))
