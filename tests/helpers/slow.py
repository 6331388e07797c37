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
        ),
    ),
    SlowTests(
        "a plug-in and two wheels, each installed into an environment of its own",
        ("test_plugin.py::", "test_packaging.py::test_uninstalling_one_leaves_the_other"),
        ("test_plugin.py::test_links_of_the_readme",),
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
            "codegen/lowering/test_lower_hybrid.py::test_placement_does_not_change_the_results",
            "codegen/lowering/test_lower_hybrid.py::test_some_layers_have_no_neuron_to_compute",
        ),
        (
            f"{_HYBRID}families[llama-relu-f16]",
            f"{_HYBRID}families[opt-post-norm-q4]",
            f"{_HYBRID}every_share_and_every_delay[llama-relu-f16-(0.5, 0.9)]",
            f"{_HYBRID}placements[falcon-7b-crosswise]",
            "codegen/lowering/test_lower_hybrid.py::test_placement_does_not_change_the_results[parallel-1]",
        ),
    ),
    SlowTests(
        "what the planner counts, held against what is lowered for each family: one gated and one plain are fast",
        (
            _LAUNCHES,
            "placement/test_counting.py::test_counted_bytes_add_up_to_the_artifact[",
            "placement/test_counting.py::test_a_shape_has_the_bytes_of_its_model[",
            "placement/test_counting.py::test_parts_of_a_split_layer_take_no_more_than_counted",
            "placement/test_planning.py::test_the_infeasible_error_names_the_smallest_budgets",
            "placement/test_shapes.py::test_every_family_is_derived_as_it_is_lowered[",
        ),
        (
            f"{_LAUNCHES}'llama-relu', predictor='learned', quant='q4', context=40, batch=1",
            f"{_LAUNCHES}'opt-pre-norm'",
            "placement/test_counting.py::test_counted_bytes_add_up_to_the_artifact[llama-relu]",
            "placement/test_counting.py::test_counted_bytes_add_up_to_the_artifact[opt-post-norm]",
            "placement/test_counting.py::test_a_shape_has_the_bytes_of_its_model[llama-relu]",
            "placement/test_counting.py::test_a_shape_has_the_bytes_of_its_model[opt-pre-norm]",
            "placement/test_shapes.py::test_every_family_is_derived_as_it_is_lowered[llama-relu",
            "placement/test_shapes.py::test_every_family_is_derived_as_it_is_lowered[opt-pre-norm",
        ),
    ),
    SlowTests(
        "predictors, families and sequences one by one, and regions task by task: one form of each is fast",
        (
            "codegen/lowering/test_lower_predictors.py::test_decoding_equals_eager_predicted_graph[",
            "codegen/lowering/test_lower_predictors.py::test_no_two_tasks_of_a_region_meet[",
            "codegen/lowering/test_lower_sequences.py::test_sequences_and_prompts_in_any_order[",
            "frontend/test_capture_families.py::test_fatrelu_of_every_family[",
            "streaming/test_layerwise_run.py::test_every_family_gives_the_whole_graphs_logits[",
            "test_prediction.py::test_an_accuracy_bound_that_is_not_met",
        ),
        (
            "codegen/lowering/test_lower_predictors.py::test_decoding_equals_eager_predicted_graph[gated]",
            "codegen/lowering/test_lower_predictors.py::test_no_two_tasks_of_a_region_meet[plain]",
            "codegen/lowering/test_lower_sequences.py::test_sequences_and_prompts_in_any_order[rotary, windows, exact]",
            "frontend/test_capture_families.py::test_fatrelu_of_every_family[LlamaForCausalLM]",
            "streaming/test_layerwise_run.py::test_every_family_gives_the_whole_graphs_logits[llama-relu]",
        ),
    ),
    SlowTests(
        "packs of kernels for a GPU, run and broken in emulation, each in processes of its own",
        (
            "benchmarks/test_benchmarks_gpu.py::test_one_kernel_alone",
            "benchmarks/test_benchmarks_gpu.py::test_the_first_documented_command",
            "benchmarks/test_benchmarks_gpu.py::test_the_second_documented_command",
            "benchmarks/test_benchmarks_gpu.py::test_a_run_that_is_ended_leaves_its_results_so_far",
            "benchmarks/test_benchmarks_gpu.py::test_models_that_the_bars_need_are_measured_first",
            "benchmarks/test_benchmarks_gpu_failures.py::",
            "benchmarks/test_benchmarks_gpu_kernels.py::test_a_measured_row_has_bytes_and_seconds",
            "benchmarks/test_benchmarks_gpu_kernels.py::test_a_wrong_kernel_is_found",
            "benchmarks/test_benchmarks_gpu_kernels.py::test_weights_on_the_host",
            "benchmarks/test_benchmarks_gpu_models.py::test_a_planned_split",
            "benchmarks/test_benchmarks_gpu_models.py::test_speed_of_a_model",
            "benchmarks/test_benchmarks_gpu_models.py::test_the_hybrid_model_keeps_to_its_budget",
        ),
        ("benchmarks/test_benchmarks_gpu_failures.py::test_exit_codes_and_signals_are_explained",),
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
        "artifacts with code for four instruction sets: what each holds is tested by itself",
        ("cli/test_cli_isa.py::",),
        (
            "cli/test_cli_isa.py::test_the_default_target_has_code_for_avx2_and_avx512",
            "cli/test_cli_isa.py::test_a_missing_cross_compiler",
        ),
    ),
    SlowTests(
        "kernels for each instruction set: one product is fast for two of them, and all kernels for this machine's",
        ("codegen/cpu/test_isa_kernels.py::test_kernels[",),
        tuple(
            f"codegen/cpu/test_isa_kernels.py::test_kernels[{isa}-linear-q4]" for isa in ("x86-64-v3", "x86-64-v4-vnni")
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
            "runtime/sampling/test_runtime_chat_limits.py::test_templates_that_do_not_end_raise",
            "test_compile.py::test_the_same_inputs_give_the_same_bytes",
        ),
        (
            "cli/test_cli_processes.py::test_closed_streams[run {} --ids 1,2 -n 2-0-",
            "cli/test_cli_processes.py::test_a_signal_to_stop_ends_it_quietly[15]",
            "predictors/powerinfer/test_import.py::test_arrays_of_each_type[F16]",
            "runtime/sampling/test_runtime_chat_limits.py::test_templates_that_do_not_end_raise[{{ 'a' * 10 ** 10",
            "runtime/sampling/test_runtime_chat_limits.py::test_templates_that_do_not_end_raise[{% macro",
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
