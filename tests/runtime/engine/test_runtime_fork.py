"""Processes that are forked while other threads decode, load and unload: they load and decode themselves, at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers.products import sampled
from helpers.toys.toy_artifact import make_toy, write_artifact
from helpers.toys.toy_two_sides import build_hybrid_library, write_hybrid

TOY = make_toy()

SCRIPT = """
import os, signal, sys, threading, time, warnings
import numpy as np
from picompile_runtime import load
warnings.simplefilter("ignore")
folder, whose, forks = sys.argv[1], sys.argv[2], int(sys.argv[3])

def steps(engine):
    engine.reset()
    return [engine.prefill(range(9)), *(engine.decode(token) for token in range(5))]

def work(engine):
    while True:
        steps(engine)

def reload():
    while True:
        load(folder, threads=2).close()

def child(engine, expected):
    engine = load(folder, threads=2) if whose == "own" else engine
    found = []
    if engine.position >= 9:  # as the last whole step of the parent left it
        start = engine.position - 9
        found += zip((engine.decode(token) for token in range(start, 5)), expected[start + 1:])
    found += zip(steps(engine), expected)
    same = all(np.array_equal(one, other) for one, other in found)
    engine.close()
    return 0 if same else 1

engine = load(folder, threads=2)
expected = steps(engine)
for target, arguments in ((work, (engine,)), (work, (load(folder, threads=2),)), (reload, ())):
    threading.Thread(target=target, args=arguments, daemon=True).start()
for number in range(forks):
    time.sleep(0.002 * (number % 5))
    process = os.fork()
    if process == 0:
        signal.alarm(20)  # ends a child that hangs
        try:
            os._exit(child(engine, expected))
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code:
        print(f"fork {number}: {code}", flush=True)
        os._exit(1)
os._exit(0)
"""


@sampled(
    kind=("host", "hybrid"),
    whose=("own", "inherited"),
    fast={"kind": ("host",), "whose": ("inherited",)},
    slow="forks amid steps, dozens of times",
)
def test_a_child_loads_and_decodes_while_its_parent_does(kind: str, whose: str, tmp_path: Path, library: Path) -> None:
    """It uses an engine of its own and one that it inherits, on the host alone and with an accelerator."""
    if kind == "host":
        folder = write_artifact(tmp_path / "host", library, TOY)
    else:
        folder = write_hybrid(tmp_path / "hybrid", build_hybrid_library(tmp_path / "host.so"), TOY)
    command = [sys.executable, "-c", SCRIPT, str(folder), whose, "20"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, ""), run.stdout + run.stderr
