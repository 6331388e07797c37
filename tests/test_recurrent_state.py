"""An operator with recurrent state: lowered, and in an engine, whose sequences go back to checkpoints."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import picompile_runtime
from helpers import leak
from helpers.fake_engine import Told, answer_alone
from helpers.kernels.lowered import Runner, relative_error
from helpers.states import host_states
from helpers.toys.toy_artifact import code_entry, write_manifest
from picompile.artifact.files import write_weights
from picompile.placement.counting import graph_bytes
from picompile.placement.model_bytes import Packing
from picompile.testing import random_weights, run
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_codegen.lowering.placement import Placement
from picompile_passes.base import Stage
from picompile_passes.graph.materialize import evaluate_constant
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline
from picompile_passes.verify import verify
from picompile_runtime import Engine, KernelError, RequestError, SamplingParams
from picompile_runtime.engine.state import MOST_CHECKPOINTS
from picompile_server.request import ServingRequest
from picompile_server.scheduler import Scheduler
from picompile_server.slots import SlotTable

CHUNK, CONTEXT, SLOTS = 4, 48, 3
OPTIONS = LowerOptions(CONTEXT, CHUNK, "float16", SLOTS, draft_tokens=5)
IDS = [int(token) for token in np.random.default_rng(5).integers(0, leak.VOCAB, 40)]


def _nothing(size_bytes: int) -> None:
    pass


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The operator's package is installed in this process."""
    with pytest.MonkeyPatch.context() as patch:
        site = tmp_path_factory.mktemp("site")
        leak.install(site)
        patch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        yield


def test_a_plan_counts_the_state_as_it_does_a_kv_cache(installed: None) -> None:
    model = graph_bytes("leak", leak.leaking(2), Packing("f16", "none", CONTEXT, sequences=SLOTS))
    (state,) = {layer.kv_cache_bytes for layer in model.layers}
    # A float32 for each column and sequence.
    assert state == 4 * leak.HIDDEN * SLOTS
    assert all(layer.launches.kv_cache == 1 for layer in model.layers)


@pytest.fixture(scope="module")
def artifact(installed: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, Lowered]:
    """The folder of an artifact, the logits after each of IDS in eager PyTorch, and the program."""
    passes = (InsertPredictors("none"), Partition({}), Quantize("f16"))
    verify(before := leak.leaking(2), Stage.CANONICAL)
    graph_module = Pipeline(passes)(before).graph_module
    verify(graph_module, Stage.QUANTIZED)
    lowered = lower(graph_module, OPTIONS)
    weights = random_weights(graph_module, representable="f16")
    folder = tmp_path_factory.mktemp("leak")
    (folder / "kernels").mkdir()
    build_host_library(lowered.kernels, folder / "kernels" / "host.so")
    tensors = list(lowered.weights.tensors.values())
    write_weights(
        folder / "weights.safetensors",
        tensors,
        lambda node: evaluate_constant(graph_module, node, weights),
        _nothing,
    )
    (folder / "program.json").write_text(json.dumps(lowered.program.to_json()))
    write_manifest(folder, CONTEXT, CHUNK, {"sequences": SLOTS, "code": [code_entry()]})
    return folder, run(graph_module, weights, torch.tensor(IDS)).numpy(), lowered


@pytest.fixture
def engine(artifact: tuple[Path, np.ndarray, Lowered]) -> Iterator[Engine]:
    with picompile_runtime.load(artifact[0], threads=2) as engine:
        yield engine


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_the_whole_last_mixer_runs_where_its_state_depends_on_all_operands(
    artifact: tuple[Path, np.ndarray, Lowered],
) -> None:
    program = artifact[2].program
    ops = {name: [call.op for call in calls] for name, calls in program.functions.items()}
    assert ops["prefill"][-1] == "leak" and ops["prefill"].count("leak") == 2
    assert ops["prefill_last"].index("take_last") > max(i for i, op in enumerate(ops["prefill_last"]) if op == "leak")
    state = {"kind": "recurrent", "layer": 1, "dtype": "float32", "shape": [leak.HIDDEN]}
    assert program.state["memory.1"].to_json() == state
    assert program.layers == 2


PLACEMENTS = {
    "all": Placement.all_of(2),
    "state with the host": Placement(attention=frozenset({0, 1}), caches=frozenset({0}), head=True),
}


@pytest.mark.slow("compiles both sides of a program")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_either_side_keeps_recurrent_state(placement: str, installed: None, tmp_path: Path) -> None:
    """Of layers whose state is the host's, prompts are read by both."""
    partition = Partition({layer: list(range(leak.FFN_SIZE)) for layer in range(2)})
    graph_module = Pipeline((InsertPredictors("none"), partition, Quantize("f16")))(leak.leaking(2)).graph_module
    options = LowerOptions(CONTEXT, CHUNK, "float32", 1, "cpu", PLACEMENTS[placement])
    lowered, weights = lower(graph_module, options), random_weights(graph_module, representable="f16")
    assert {each.memory for each in lowered.program.state.values()} == (
        {"accelerator"} if placement == "all" else {"accelerator", "host"}
    )
    runner = Runner(tmp_path / "host.so", lowered, graph_module, weights)
    expected = run(graph_module, weights, torch.tensor(IDS[:11]))
    assert relative_error(runner.score(IDS[:11], CHUNK), expected) < 1e-5
    runner.forget()
    assert relative_error(runner.decode(IDS[:11]), expected) < 1e-5


def test_steps_of_all_kinds_compute_what_eager_pytorch_does(
    engine: Engine, artifact: tuple[Path, np.ndarray, Lowered]
) -> None:
    expected = artifact[1]
    close(engine.prefill(IDS[:11]), expected[10])
    close(engine.decode(IDS[11]), expected[11])
    close(np.concatenate(list(engine.score(IDS[12:21]))), expected[12:21])
    close(engine.prefill(IDS[:6], slot=2), expected[5])
    close(engine.decode_sequences([IDS[6], IDS[21]], [2, 0]), expected[[6, 21]])
    assert engine.read_chunk(IDS[:4], slot=1, is_last=False) is None
    close(engine.read_chunk(IDS[4:7], slot=1).logits(), expected[6])


def test_a_copy_goes_on_by_itself(engine: Engine, artifact: tuple[Path, np.ndarray, Lowered]) -> None:
    expected = artifact[1]
    engine.prefill(IDS[:7])
    engine.copy(0, 2)
    engine.copy(0, 1, 4)  # the end of the first chunk
    close(engine.decode(IDS[7], slot=2), expected[7])
    close(engine.decode(IDS[4], slot=1), expected[4])
    close(engine.decode(IDS[7]), expected[7])
    engine.rewind(4, slot=2)  # checkpoints are copied as well
    close(engine.decode(IDS[4], slot=2), expected[4])
    with pytest.raises(
        RequestError, match="cannot copy 6 tokens: the model's recurrent state is not kept there; copy 4"
    ):
        engine.copy(0, 1, 6)


def test_a_sequence_goes_back_to_checkpoints_only(engine: Engine, artifact: tuple[Path, np.ndarray, Lowered]) -> None:
    expected = artifact[1]
    assert not engine.can_cut
    assert engine.most_checked == 1  # no drafts
    engine.prefill(IDS[:10])
    for token in IDS[10:13]:
        engine.decode(token)
    assert [engine.reusable(prefix) for prefix in (13, 12, 10, 9, 8, 5, 3, 0)] == [13, 10, 10, 8, 8, 4, 0, 0]
    with pytest.raises(RequestError, match=r"cannot rewind to position 12: .* rewind to 10, the last position before"):
        engine.rewind(12)
    assert engine.position == 13
    engine.rewind(8)
    assert engine.reusable(8) == 8
    close(engine.decode(IDS[8]), expected[8])
    engine.checkpoint()
    engine.decode(IDS[0])
    engine.rewind(9)
    close(engine.decode(IDS[9]), expected[9])
    engine.reset()
    assert not any(state[0].any() for state in host_states(engine).values())
    close(engine.decode(IDS[0]), expected[0])
    with pytest.raises(RequestError, match="the prefix must be"):
        engine.reusable(2)


def test_checkpoints_are_bounded_and_spread(engine: Engine) -> None:
    engine.prefill(IDS)
    kept = sorted(engine._executor.states[0]._kept[0])
    assert len(kept) == MOST_CHECKPOINTS
    assert kept[-1] == len(IDS)
    assert max(np.diff([0, *kept])) <= 3 * CHUNK


def test_a_pinned_checkpoint_stays(engine: Engine) -> None:
    engine.prefill(IDS[:3])
    engine.checkpoint()
    engine.prefill(IDS[3:])
    assert engine.reusable(3) == 3


def test_a_step_that_fails_leaves_the_last_sure_state(
    engine: Engine, artifact: tuple[Path, np.ndarray, Lowered], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.prefill(IDS[:6])
    engine.decode(IDS[6])

    def fail(*arguments: object) -> None:
        for state in host_states(engine).values():
            state[:] = np.nan
        raise KernelError("it broke")

    with monkeypatch.context() as patch, pytest.raises(KernelError, match="it broke"):
        patch.setattr(engine._executor, "run_one", fail)
        engine.decode(IDS[7])
    assert engine.position == 6
    close(engine.decode(IDS[6]), artifact[1][6])


def test_a_prefix_is_reused_from_the_nearest_checkpoint(engine: Engine) -> None:
    table = SlotTable(engine.sequences, engine.context, reusable=engine.reusable)
    first, second = np.array(IDS[:14], np.int32), np.array([*IDS[:10], 1, 2, 3, 4, 5, 6], np.int32)
    table.begin(table.place(first), first, 0)
    engine.prefill(first)
    table.prompt_read(0, len(first))
    table.release(0)
    place = table.place(second)
    assert (place.slot, place.reused, place.source) == (0, 8, None)
    assert table.rewind(0) == 14


def test_the_server_answers_as_if_each_request_were_alone(engine: Engine) -> None:
    """Slots reuse prefixes up to checkpoints, and answers are read again from there."""
    random = np.random.default_rng(8)
    requests = []
    for number in range(9):
        own = random.integers(0, leak.VOCAB, random.integers(1, 12)).tolist()
        prompt = (IDS[:18] if number % 3 else []) + own
        requests.append(ServingRequest(prompt, SamplingParams(temperature=0.8, seed=number), 10, ignore_end=True))
    expected = [answer_alone(engine, request, 0) for request in requests]
    engine.reset()
    scheduler = Scheduler(engine, start=False)
    told = [Told() for _ in requests]
    for each, request in zip(told, requests, strict=True):
        scheduler.submit(request, each)
        for _ in range(random.integers(0, 30)):
            scheduler.step()
    scheduler.close()
    assert [each.answer() for each in told] == expected
    assert scheduler.stats().cached_tokens >= 3 * 16


def test_memory_is_checked_for_checkpoints_too(
    artifact: tuple[Path, np.ndarray, Lowered], monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = artifact[2].program.arena_bytes
    state = 2 * SLOTS * leak.HIDDEN * 4
    monkeypatch.setattr("picompile_runtime.devices.memory._machine_bytes", lambda: arena + state * MOST_CHECKPOINTS)
    with pytest.raises(picompile_runtime.DoesNotFitError, match="a cache for 3 sequences of 48 tokens"):
        picompile_runtime.load(artifact[0])
