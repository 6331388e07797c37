"""Which tests `make test` leaves to `make test-slow`, and why.

Each rule names tests by how their ids begin, and those among them that stay fast. What stays is one path through each
family, each weight format and each kernel, and every property of every pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class SlowTests:
    """Tests whose ids, seen from tests/, begin with one of `tests`, but for those that begin with one of `fast`."""

    why: str
    tests: tuple[str, ...]
    fast: tuple[str, ...] = ()


_END_TO_END = "test_end_to_end.py::test_logits_equal_eager_transformers["
_HYBRID = "test_hybrid.py::test_"
_LAUNCHES = "placement/test_launches.py::test_launches_are_those_of_the_lowered_program[Model(variant="

SLOW: tuple[SlowTests, ...] = (
    SlowTests(
        "random damage, kills and full disks: single cases of each stand in the tests of what is attacked",
        (
            "attack/test_api.py::",
            "attack/test_artifacts.py::",
            "attack/test_checkpoints.py::test_the_attack_itself",
            "attack/test_configs.py::",
            "attack/test_programs.py::test_whole_artifacts_run",
            "attack/test_replacements.py::",
            "attack/test_soak.py::test_rounds",
            "attack/test_writers.py::",
            "predictors/profile/test_profile_resume.py::test_killed_at_random_moments",
            "runtime/engine/test_runtime_hybrid.py::test_interrupts_at_any_time",
        ),
        ("attack/test_api.py::test_wrong_calls_are_refused_and_change_nothing[0]",),
    ),
    SlowTests(
        "commands of documents, some eighty of them: what they call is tested without a process of its own",
        (
            "test_docs.py::test_every_command_runs[",
            "test_docs.py::test_write_a_pass",
            "test_docs.py::test_python_of_the_docs[",
            "test_plugin.py::test_every_command_of_the_readme_runs",
            "test_plugin.py::test_its_own_tests_pass",
        ),
    ),
    SlowTests(
        "families by formats: fast are each family once and each format more than once",
        (_END_TO_END,),
        (
            *(f"{_END_TO_END}{name}-f16" for name in ("llama-relu", "prosparse", "opt-galactica", "falcon-40b")),
            *(f"{_END_TO_END}{name}-f16" for name in ("mistral-window", "turbosparse", "qwen2")),
            *(f"{_END_TO_END}{name}-q4" for name in ("llama3-silu-tied", "opt-post-norm", "falcon-serial")),
            *(f"{_END_TO_END}{name}-q8" for name in ("bamboo", "opt-pre-norm", "falcon-7b")),
        ),
    ),
    SlowTests(
        "families by predictors and hot sets: one of each kind of block is fast",
        (
            "test_end_to_end.py::test_exact_gives_the_tokens_of_none",
            "test_end_to_end.py::test_any_hot_set_gives_the_same_logits",
        ),
        (
            "test_end_to_end.py::test_exact_gives_the_tokens_of_none_and_computes_less[llama-relu]",
            "test_end_to_end.py::test_any_hot_set_gives_the_same_logits[llama-relu-f16]",
        ),
    ),
    SlowTests(
        "families on two devices, in all shares, placements and delays: one of each is fast",
        (
            f"{_HYBRID}families[",
            f"{_HYBRID}every_share",
            f"{_HYBRID}trained_model",
            f"{_HYBRID}placements[",
            "codegen/lowering/test_lower_hybrid.py::test_where_things_run_is_of_no_influence",
        ),
        (
            f"{_HYBRID}families[llama-relu-f16]",
            f"{_HYBRID}families[opt-post-norm-q4]",
            f"{_HYBRID}every_share_and_every_delay[llama-relu-f16-(0.5, 0.9)]",
            f"{_HYBRID}placements[falcon-7b-crosswise]",
            "codegen/lowering/test_lower_hybrid.py::test_where_things_run_is_of_no_influence[gated-0]",
            "codegen/lowering/test_lower_hybrid.py::test_where_things_run_is_of_no_influence[plain-2]",
            "codegen/lowering/test_lower_hybrid.py::test_where_things_run_is_of_no_influence[parallel-1]",
        ),
    ),
    SlowTests(
        "what the planner counts, held against what is lowered for each family: one gated and one plain are fast",
        (
            _LAUNCHES,
            "placement/test_counting.py::test_counted_bytes_add_up_to_the_artifact[",
            "placement/test_counting.py::test_a_shape_has_the_bytes_of_its_model[",
        ),
        (
            f"{_LAUNCHES}'llama-relu', predictor='learned', quant='q4', context=40, batch=1",
            f"{_LAUNCHES}'opt-pre-norm'",
            "placement/test_counting.py::test_counted_bytes_add_up_to_the_artifact[llama-relu]",
            "placement/test_counting.py::test_counted_bytes_add_up_to_the_artifact[opt-post-norm]",
            "placement/test_counting.py::test_a_shape_has_the_bytes_of_its_model[llama-relu]",
            "placement/test_counting.py::test_a_shape_has_the_bytes_of_its_model[opt-pre-norm]",
        ),
    ),
    SlowTests(
        "packs of kernels for a GPU, run and broken in emulation, each in processes of its own",
        (
            "benchmarks/test_benchmarks_gpu.py::test_one_kernel_alone",
            "benchmarks/test_benchmarks_gpu.py::test_the_first_command",
            "benchmarks/test_benchmarks_gpu.py::test_the_second_command",
            "benchmarks/test_benchmarks_gpu.py::test_what_is_ended_shows_what_it_knew",
            "benchmarks/test_benchmarks_gpu_failures.py::",
            "benchmarks/test_benchmarks_gpu_kernels.py::test_a_wrong_kernel_is_found",
            "benchmarks/test_benchmarks_gpu_models.py::test_a_planned_split",
            "benchmarks/test_benchmarks_gpu_models.py::test_speed_of_a_model",
        ),
        ("benchmarks/test_benchmarks_gpu_failures.py::test_endings_are_told",),
    ),
    SlowTests(
        "compilations by NVRTC for each architecture: one is fast",
        (
            "artifact/test_hot_device.py::test_kernels_compile_for_every_architecture",
            "artifact/test_hot_device.py::test_kernels_of_other_formats_and_predictors",
            "artifact/test_hot_device.py::test_loads_of_long_rows_come_first",
            "artifact/test_hot_device.py::test_every_row_compiles",
            "codegen/cuda/test_cuda_nibbles.py::test_instructions_for_128_weights",
        ),
        ("artifact/test_hot_device.py::test_kernels_compile_for_every_architecture[90]",),
    ),
    SlowTests(
        "kernels for each instruction set: one product for each is fast, and all kernels for this machine's",
        ("codegen/cpu/test_isa_kernels.py::test_kernels[",),
        tuple(
            f"codegen/cpu/test_isa_kernels.py::test_kernels[{isa}-linear-q4]"
            for isa in ("x86-64-v3", "x86-64-v4", "x86-64-v4-vnni", "aarch64-dotprod")
        ),
    ),
    SlowTests(
        "processes that are started, ended or loaded into again and again: one of each kind is fast",
        (
            "cli/test_cli_processes.py::test_closed_streams",
            "cli/test_cli_processes.py::test_a_signal_to_stop_ends_it_quietly",
            "predictors/train/test_train_run.py::test_a_ray_cluster_gives_the_same_bytes",
            "predictors/train/test_train_run.py::test_a_killed_run_goes_on",
            "runtime/engine/test_runtime_reload.py::test_loading_many_artifacts_leaks_nothing",
            "mutation/test_faults.py::test_the_suite_finds_a_fault",
            "predictors/powerinfer/test_import.py::test_arrays_of_each_type",
        ),
        (
            "cli/test_cli_processes.py::test_closed_streams[run {} --ids 1,2 -n 2-0-",
            "cli/test_cli_processes.py::test_a_signal_to_stop_ends_it_quietly[15]",
            "runtime/engine/test_runtime_reload.py::test_loading_many_artifacts_leaks_nothing[host-closed]",
            "predictors/powerinfer/test_import.py::test_arrays_of_each_type[F16]",
        ),
    ),
)


def is_slow(name: str, rules: Iterable[SlowTests] = SLOW) -> bool:
    """Return whether a rule has the test whose id, seen from tests/, is `name`."""
    return any(name.startswith(rule.tests) and not (rule.fast and name.startswith(rule.fast)) for rule in rules)


def unused_starts(names: Iterable[str], rules: Iterable[SlowTests] = SLOW) -> list[str]:
    """Return the beginnings of ids in the rules that fit none of `names`, which are all tests there are."""
    left = {start for rule in rules for start in (*rule.tests, *rule.fast)}
    for name in names:
        left -= {start for start in left if name.startswith(start)}
    return sorted(left)


def mark_slow_tests(items: Sequence[pytest.Item], *, all_collected: bool) -> None:
    """Give the marker `slow` to the tests that a rule has.

    Raises:
        pytest.UsageError: Where every test was collected, and a rule names one that is not among them.
    """
    names = [item.nodeid.removeprefix("tests/") for item in items]
    for item, name in zip(items, names, strict=True):
        if is_slow(name):
            item.add_marker("slow")
    if all_collected and (unused := unused_starts(names)):
        raise pytest.UsageError(f"tests/helpers/slow.py names tests that are not there: {unused}")
