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

_BLOCKS = "codegen/cpu/test_kernels_ffn.py::test_"
# Every kind of block, every way through a kernel and every format.
_BLOCK_CASES = (
    *("reglu-dense-f16-1", "reglu-exact-f16-1", "reglu-exact-q4-13", "reglu-masked-f16-1", "reglu-part-f16-1"),
    *("drelu-masked-f16-1", "fatrelu-exact-f16-1", "swiglu-dense-f16-13"),
    *("bitnet-exact-q8-1", "normed-dense-q4-13", "drelu-exact-q4m-1"),
)
_LIMITS = "codegen/cpu/test_kernels_ffn_limits.py::test_"
_LINEAR = "codegen/cpu/test_kernels_linear.py::test_"
_PREDICT = "codegen/cpu/test_kernels_predict.py::test_low_rank"
_ATTENTION = ("codegen/cpu/test_kernels_attention.py", "codegen/cuda/test_cuda_attention.py")
_NAN_KEYS = "codegen/cuda/test_cuda_attention.py::test_nan_keys_reach_exactly_the_queries_that_see_them["
_SHAPES = ("groups of 2", "q8, odd widths", "window", "soft cap")

SLOW: tuple[SlowTests, ...] = (
    SlowTests(
        "benchmarks that make and compile models, and choices of prefetching whose kernels take seconds to compile",
        (
            "benchmarks/test_benchmarks_models.py::",
            "machine/test_tuning.py::test_a_choice_changes_a_kernel_and_no_bit_of_its_result[2]",
            "machine/test_tuning.py::test_this_machine",
        ),
    ),
    SlowTests(
        "servers, browsers and terminals in processes of their own, and many requests: what they call has other tests",
        (
            "cli/test_cli_chat.py::",
            "cli/test_cli_serve.py::",
            "deploy/test_containers.py::test_the_health_check_tells_a_server_from_none[",
            "deploy/test_lm_eval.py::",
            "deploy/test_proxies.py::",
            "deploy/test_ray_serve.py::",
            "deploy/test_serve_benchmarks.py::",
            "deploy/test_serving_guide.py::test_the_guide",
            "runtime/sampling/test_runtime_chat.py::test_an_answer_is_that_of_a_chat_that_was_never_read_in_parts",
            "runtime/serving/http/test_page",
            "runtime/serving/test_scheduler_artifact.py::",
        ),
        ("runtime/serving/http/test_page.py::test_a_chat_with_the_real_server",),
    ),
    SlowTests(
        "trainings that are stopped, or whose model is compiled: single steps and one whole training are fast",
        (
            "examples/test_relufication.py::test_a_resumed_training",
            "examples/test_relufication.py::test_firing_is_what_a_profile_counts[drelu]",
            "examples/test_relufication.py::test_text_of_the_models_own",
            "examples/test_relufication.py::test_the_command_ends_with_one_line",
            "examples/test_relufication.py::test_the_compiled_copy_equals_eager_transformers[",
        ),
    ),
    SlowTests(
        "models compiled for several sequences, one for each kind of block: their kernels and one program are fast",
        ("test_batch_rows.py::",),
    ),
    SlowTests(
        "projections that leave out inputs in every format, size and model: one way through each kernel is fast",
        (
            "codegen/cpu/test_kernels_sparse_linear.py::",
            "codegen/cuda/test_cuda_sparse_linear.py::",
            "codegen/lowering/test_lower_skip_inputs.py::",
            "passes/test_skip_inputs.py::test_models_of_transformers[",
            "test_skipping_artifact.py::",
        ),
        (
            *(f"codegen/cpu/test_kernels_sparse_linear.py::test_sparse_linear[{n}-(72, 96)-q4]" for n in (None, 13)),
            "codegen/cpu/test_kernels_sparse_linear.py::test_sparse_linear[None-(331, 203)-f16]",
            "codegen/cpu/test_kernels_sparse_linear.py::test_each_row_has_the_bits_that_it_has_alone[(72, 96)-f16]",
            "codegen/cpu/test_kernels_sparse_linear.py::test_limits_that_leave_out_nothing_or_all[inf-f16-1]",
            "codegen/cpu/test_kernels_sparse_linear.py::test_what_is_no_number_shows_in_its_own_row[1-f16]",
            "codegen/cuda/test_cuda_sparse_linear.py::test_products_are_those_of_float64[0.4-q4-1100x301-each3]",
            "codegen/cuda/test_cuda_sparse_linear.py::test_products_are_those_of_float64[0.4-f16-70x45-r67]",
            *(
                f"codegen/lowering/test_lower_skip_inputs.py::test_{name}[blocks]"
                for name in ("tokens_and_what_they_count", "prompts", "several_sequences")
            ),
        ),
    ),
    SlowTests(
        "random damage, kills and full disks: single cases of each stand in the tests of what is attacked",
        (
            "attack/test_api.py::",
            "attack/test_artifacts.py::",
            "attack/test_checkpoints.py::test_the_attack_itself",
            "attack/test_configs.py::",
            "attack/test_programs.py::",
            "attack/test_replacements.py::",
            "attack/test_soak.py::test_rounds",
            "attack/test_writers.py::",
            "predictors/powerinfer/test_import.py::test_a_hostile_torch_file_end_to_end",
            "predictors/powerinfer/test_import.py::test_mutations_through_the_guarded_process",
            "predictors/profile/test_load_profile.py::test_everything_strange_in_every_place",
            "predictors/profile/test_profile_resume.py::test_ended_between_any_two_files[silu]",
            "predictors/profile/test_profile_resume.py::test_killed_at_random_moments",
            "predictors/test_store.py::test_everything_strange_in_every_place",
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
        "families by formats: one in float16 is fast",
        (_END_TO_END, "test_end_to_end.py::test_every_stage_runs_in_eager_pytorch["),
        (
            f"{_END_TO_END}llama-relu-f16",
            "test_end_to_end.py::test_every_stage_runs_in_eager_pytorch[llama-relu",
            "test_end_to_end.py::test_every_stage_runs_in_eager_pytorch[opt-post-norm",
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
            "test_families_cuda.py::",
            "test_gpu_sequences.py::",
            "test_replan.py::",
            "test_streamed_weights.py::",
            "test_hybrid_sampling.py::",
            f"{_HYBRID}families[",
            f"{_HYBRID}every_share",
            f"{_HYBRID}trained_model",
            f"{_HYBRID}hybrid_steps_with_learned_predictors[",
            f"{_HYBRID}placements[",
            "codegen/lowering/test_lower_hybrid.py::test_placement_does_not_change_the_results",
            "codegen/lowering/test_lower_hybrid.py::test_some_layers_have_no_neuron_to_compute",
            "codegen/lowering/test_lower_hybrid.py::test_a_program_without_waits_gives_wrong_results",
        ),
        (
            f"{_HYBRID}families[llama-relu-f16]",
            "test_streamed_weights.py::test_whenever_copies_arrive_the_logits_have_the_same_bits[llama-relu",
            "test_streamed_weights.py::test_a_missing_wait_is_found[llama-relu",
            "test_streamed_weights.py::test_weights_that_cannot_be_pinned_give_the_same_bits[llama-relu-0",
        ),
    ),
    SlowTests(
        "what the planner counts, held against what is lowered for each family: one gated and one plain are fast",
        (
            _LAUNCHES,
            "placement/test_counting.py::test_counted_bytes_add_up_to_the_artifact[",
            "placement/test_counting.py::test_a_shape_has_the_bytes_of_its_model[",
            "placement/test_counting.py::test_parts_of_a_split_layer_take_no_more_than_counted",
            "placement/test_counting.py::test_counted_bytes_are_those_of_an_artifact_on_disk",
            "placement/test_planning.py::test_memory_is_never_more_than_the_budget_less_its_margin",
            "placement/test_planning.py::test_every_byte_is_in_the_memory_table",
            "placement/test_planning.py::test_no_policy_is_faster",
            "placement/test_solver.py::test_many_random_problems_are_solved[",
            "placement/test_planning.py::test_the_infeasible_error_names_the_smallest_budgets",
            "placement/test_shapes.py::test_every_family_is_derived_as_it_is_lowered[",
        ),
        (
            f"{_LAUNCHES}'llama-relu', predictor='learned', quant='q4', context=40, batch=1",
            *(f"placement/test_solver.py::test_many_random_problems_are_solved[{part}]" for part in (0, 1)),
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
            "codegen/lowering/test_lower_predictors.py::test_no_buffer_is_overwritten_while_it_is_needed[plain]",
            "codegen/lowering/test_lower_sequences.py::test_sequences_and_prompts_in_any_order[",
            *(
                f"codegen/lowering/test_lower_sequences.py::test_{name}[rotary"
                for name in (
                    *("any_number_of_threads_gives_the_same_bits", "no_two_tasks_of_a_region_meet"),
                    *("windows_are_told_of_attention", "blocks_count_several_sequences_into_rows_of_their_own"),
                )
            ),
            "frontend/test_capture_families.py::test_activations[",
            "frontend/test_capture_families.py::test_fatrelu_of_every_family[",
            "frontend/test_capture_families.py::test_logits_equal_eager_transformers[",
            "frontend/test_capture_families.py::test_canonical_graph_has_one_operator_for_each_thing[",
            "frontend/test_capture_families.py::test_parameters_are_on_meta_and_named_as_in_the_checkpoint[",
            "frontend/test_capture_rope.py::test_scaling_equals_eager_transformers[",
            "frontend/test_capture_rope.py::test_scaling_that_depends_on_the_length[scaling1-",
            "codegen/lowering/test_lower_predictors.py::test_prompts_are_read_with_every_neuron[",
            "placement/test_shapes.py::test_named_shapes_are_derived_as_they_are_lowered[",
            "streaming/test_layerwise_run.py::test_a_segment_a_layer_and_one_vector_a_token_between[",
            "testing/test_models.py::test_models_are_captured_as_transformers_computes_them[",
            "streaming/test_layerwise_run.py::test_every_family_gives_the_whole_graphs_logits[",
            "test_prediction.py::test_an_accuracy_bound_that_is_not_met",
        ),
        (
            "codegen/lowering/test_lower_predictors.py::test_decoding_equals_eager_predicted_graph[gated]",
            "codegen/lowering/test_lower_sequences.py::test_sequences_and_prompts_in_any_order[learned positions",
            "frontend/test_capture_families.py::test_activations[bamboo-",
            "frontend/test_capture_families.py::test_fatrelu_of_every_family[LlamaForCausalLM]",
            *(
                f"frontend/test_capture_families.py::test_{test}[{name}]"
                for test in (
                    "logits_equal_eager_transformers",
                    "canonical_graph_has_one_operator_for_each_thing",
                    "parameters_are_on_meta_and_named_as_in_the_checkpoint",
                )
                for name in ("llama-relu", "opt-post-norm", "falcon-40b", "bitnet")
            ),
            "frontend/test_capture_rope.py::test_scaling_equals_eager_transformers[fields0-",
            "placement/test_shapes.py::test_named_shapes_are_derived_as_they_are_lowered[opt-6.7b]",
            "streaming/test_layerwise_run.py::test_a_segment_a_layer_and_one_vector_a_token_between[llama3-silu-tied]",
            "testing/test_models.py::test_models_are_captured_as_transformers_computes_them[llama]",
            "streaming/test_layerwise_run.py::test_every_family_gives_the_whole_graphs_logits[llama-relu]",
        ),
    ),
    SlowTests(
        "programs with arithmetic, in all placements: its kernels and its graphs are fast",
        (
            "codegen/lowering/test_lower_elementwise.py::test_programs_equal_eager[",
            "codegen/lowering/test_lower_elementwise.py::test_placement_does_not_change_the_results[",
        ),
    ),
    SlowTests(
        "proofs of captures, which export models twice each: one right and one wrong are fast",
        (
            "frontend/test_proof.py::test_right_models_pass[",
            "frontend/test_proof.py::test_a_wrong_activation_is_found",
            "frontend/test_proof.py::test_a_factor_that_raising_drops_is_found",
            "frontend/test_proof.py::test_an_eps_that_raising_forgets_is_found",
            "frontend/test_proof.py::test_the_proof_is_a_part_of_compiling",
            "frontend/test_proof.py::test_a_last_layer_of_its_own_kind_is_compared",
            "frontend/test_proof.py::test_models_are_made_small_without_losing_a_kind_of_layer",
            "frontend/test_proof.py::test_two_ways_to_count_positions_are_refused",
            "frontend/test_proof.py::test_windows_that_are_wider_than_masks_are_read",
            "frontend/test_proof.py::test_fewer_positions_than_are_compared",
        ),
        ("frontend/test_proof.py::test_right_models_pass[MistralForCausalLM]",),
    ),
    SlowTests(
        "packs of kernels for a GPU, run and broken in emulation, each in processes of its own",
        (
            "benchmarks/test_benchmarks_gpu.py::test_a_pack_of_other_sources_is_refused",
            "benchmarks/test_benchmarks_gpu.py::test_a_run_that_is_ended_leaves_its_results_so_far",
            "benchmarks/test_benchmarks_gpu.py::test_both_commands",
            "benchmarks/test_benchmarks_gpu.py::test_one_kernel_alone",
            "benchmarks/test_benchmarks_gpu.py::test_what_is_left_for_a_second_quarter_of_an_hour",
            "benchmarks/test_benchmarks_gpu_clock.py::test_",
            "benchmarks/test_benchmarks_gpu_failures.py::",
            "benchmarks/test_benchmarks_gpu_checks.py::",
            "benchmarks/test_benchmarks_gpu_kernels.py::test_a_measured_row_has_bytes_and_seconds",
            "benchmarks/test_benchmarks_gpu_kernels.py::test_a_wrong_kernel_is_found",
            "benchmarks/test_benchmarks_gpu_kernels.py::test_weights_on_the_host",
            "benchmarks/test_benchmarks_gpu_models.py::test_a_planned_split",
            "benchmarks/test_benchmarks_gpu_models.py::test_speed_of_a_model",
            "benchmarks/test_benchmarks_gpu_models.py::test_weights_are_written_once",
            "benchmarks/test_benchmarks_gpu_models.py::test_the_hybrid_model_keeps_to_its_budget",
        ),
        (
            "benchmarks/test_benchmarks_gpu_clock.py::test_a_part_that_hangs_leaves_time_for_the_next[models]",
            "benchmarks/test_benchmarks_gpu_clock.py::test_nothing_is_begun_behind_a_gate_that_failed",
            "benchmarks/test_benchmarks_gpu_failures.py::test_exit_codes_and_signals_are_explained",
        ),
    ),
    SlowTests(
        "compilations by NVRTC for each architecture: all kernels of one artifact for one of them are fast",
        (
            "artifact/test_hot_device.py::test_kernels_compile_for_every_architecture",
            "artifact/test_hot_device.py::test_kernels_of_other_formats_and_predictors",
            "artifact/test_hot_device.py::test_attention_with_all_options",
            "artifact/test_hot_device.py::test_loads_of_long_rows_come_first",
            "artifact/test_hot_device.py::test_every_row_compiles",
            "artifact/test_hot_device.py::test_learned_predictors_are_in_the_plan",
            "artifact/test_hot_device.py::test_weights_of_attention_are_computed_once",
            "codegen/cuda/test_cuda_nibbles.py::test_instructions_for_128_weights",
        ),
    ),
    SlowTests(
        "PTX of a kernel of each kind, translated and run: single instructions and the checks of its text are fast",
        ("codegen/cuda/test_cuda_ptx.py::",),
    ),
    SlowTests(
        "options of attention one by one: all of them together are fast",
        (
            "codegen/lowering/test_lower_attention.py::test_options_equal_eager[",
            "codegen/lowering/test_lower_attention.py::test_q8_cache",
        ),
        ("codegen/lowering/test_lower_attention.py::test_options_equal_eager[softcap, alibi, sinks, window]",),
    ),
    SlowTests(
        "a published model: 93 MB to download, and answers of transformers to compare with",
        ("test_smollm2.py::",),
    ),
    SlowTests(
        "options of configs, each with a capture of its own: one in attention and one in scales are fast",
        (
            "frontend/test_options_of_configs.py::test_as_many_slopes_as_large_models_have",
            "frontend/test_options_of_configs.py::test_options_change",
        ),
        tuple(
            f"frontend/test_options_of_configs.py::test_options_change_the_graph_as_they_change_eager_pytorch[{name}"
            for name in ("gemma2 attn_logit_softcapping=2.0", "granite embedding")
        ),
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
        "kernels for each instruction set: one product is fast for one of them, and all kernels for this machine's",
        (
            "codegen/cpu/test_isa_kernels.py::test_kernels[",
            "codegen/cpu/test_isa_kernels.py::test_instructions_of_aarch64",
            "codegen/cpu/test_isa_kernels.py::test_instructions_of_x86[x86-64-v4-vnni]",
            "codegen/cpu/test_isa_kernels.py::test_instructions_of_x86[x86-64-v4-bf16]",
            "codegen/cpu/test_kernels_bf16.py::",
            "test_bf16.py::",
        ),
        (
            "test_bf16.py::test_other_words_are_refused",
            "codegen/cpu/test_isa_kernels.py::test_kernels[x86-64-v3-linear-q4]",
            "codegen/cpu/test_kernels_bf16.py::test_linear[(251, 72)]",
        ),
    ),
    SlowTests(
        "blocks and attention kernel by kernel, each of which takes a second to compile: fast are all ways, once each",
        (
            *(f"{_BLOCKS}{name}[" for name in ("ffn", "statistics_count_computed_and_firing_neurons")),
            *(f"{_BLOCKS}{name}[" for name in ("same_bits_for_any_number_of_threads", "several_sequences")),
            *(f"{_BLOCKS}{name}[" for name in ("down_is_exact_for_equal_outputs", "empty_and_full_masks")),
            f"{_BLOCKS}masks_of_a_chunk_in_tiles[",
            f"{_BLOCKS}blocks_share_a_kernel[",
            *(f"{file}::test_{name}[" for file in _ATTENTION for name in ("one_token", "chunk", "several_sequences")),
            *(
                f"codegen/lowering/test_lower_panels.py::test_programs_of_both_layouts_compute_the_same[{f}]"
                for f in ("q8", "q4m")
            ),
            "codegen/cuda/test_cuda_ffn.py::test_ffn[",
            "codegen/cuda/test_cuda_ffn.py::test_blocks_share_a_kernel[",
            "codegen/cuda/test_cuda_ffn.py::test_several_sequences[",
            "codegen/cuda/test_cuda_ffn.py::test_large_blocks[",
            "codegen/cuda/test_cuda_attention.py::test_a_chunk_whose_positions_are_shared_by_blocks[",
            f"{_NAN_KEYS}Heads(heads=2, kv_heads=2, head_dim=8, value_dim=8, window=530,",
            f"{_NAN_KEYS}Heads(heads=3, kv_heads=1, head_dim=8, value_dim=8, window=530,",
            "codegen/cpu/test_kernels_attention.py::test_same_bits_for_any_number_of_threads[parts, q8-1]",
            "codegen/cpu/test_races.py::test_no_races_with_a_q8_cache_for_several_sequences",
            "codegen/cuda/test_cuda_attention_extend.py::test_extends_and_attends[",
        ),
        (
            *(f"{_BLOCKS}ffn[{case}]" for case in _BLOCK_CASES),
            *(
                f"{_BLOCKS}statistics_count_computed_and_firing_neurons[{case}]"
                for case in _BLOCK_CASES
                if case[-2:] == "-1"
            ),
            *(f"{_BLOCKS}same_bits_for_any_number_of_threads[reglu-exact-{form}-" for form in ("f16", "q4")),
            f"{_BLOCKS}several_sequences[0.2-reglu-f16-masked]",
            f"{_BLOCKS}down_is_exact_for_equal_outputs[exact-1-q8]",
            f"{_BLOCKS}masks_of_a_chunk_in_tiles[reglu-masked-f16]",
            *(f"{_BLOCKS}empty_and_full_masks[{full}-reglu-" for full in (False, True)),
            *(f"{_ATTENTION[0]}::test_one_token[{at}-{shape}]" for at in (0, 64, 190) for shape in _SHAPES),
            *(f"{_ATTENTION[0]}::test_chunk[{at}-{shape}]" for at in ("1-0", "13-190") for shape in _SHAPES),
            *(f"{_ATTENTION[0]}::test_one_token[{at}-all options, parts]" for at in (512, 1399)),
            f"{_ATTENTION[0]}::test_several_sequences[3-all options, q8]",
            *(f"{_ATTENTION[1]}::test_one_token[{shape}-" for shape in ("multi-head, two parts", "q8, odd widths")),
            *(f"{_ATTENTION[1]}::test_one_token[{shape}-" for shape in ("window over a part", "all options")),
            f"{_ATTENTION[1]}::test_chunk[33-97-window, many columns]",
            f"{_ATTENTION[1]}::test_several_sequences[3-all options]",
            "codegen/cuda/test_cuda_attention_extend.py::test_extends_and_attends[0-multi-head-one-1-True]",
            f"{_BLOCKS}blocks_share_a_kernel[reglu-masked-f16-5-1]",
            "codegen/cuda/test_cuda_ffn.py::test_blocks_share_a_kernel[opt-part-f16-1-7]",
            "codegen/cuda/test_cuda_ffn.py::test_blocks_share_a_kernel[sliced-dense-q8-13-1500]",
            "codegen/cuda/test_cuda_ffn.py::test_several_sequences[0.2-swiglu-",
            *(f"codegen/cuda/test_cuda_ffn.py::test_ffn[{case}]" for case in ("reglu-masked-f16-1", "opt-exact-q4-1")),
            "codegen/cuda/test_cuda_ffn.py::test_ffn[opt-exact-q4m-1]",
            *(
                f"codegen/cuda/test_cuda_ffn.py::test_ffn[{case}]"
                for case in ("sliced-dense-q8-13", "bitnet-exact-f16-1")
            ),
        ),
    ),
    SlowTests(
        "linear layers, embeddings and predictors in all formats and sizes: fast are f16, q4 and a size of the others",
        (
            "codegen/cuda/test_cuda_linear.py::test_products_are_those_of_float64[",
            *(f"{_LINEAR}{name}" for name in ("linear[", "each_row_has_the_bits", "same_bits", "embedding[")),
            f"{_PREDICT}[",
            f"{_PREDICT}_for_several_tokens[",
        ),
        (
            *(
                f"{_LINEAR}linear[{tokens}-{shape}-{form}]"
                for tokens in (None, 1, 2, 7, 13)
                for shape in ("(64, 96)", "(10, 100)", "(1009, 1100)")
                for form in ("f16", "q4")
            ),
            *(f"{_LINEAR}linear[{tokens}-(251, 72)-" for tokens in (None, 1, 2, 7, 13)),
            *(
                f"codegen/cuda/test_cuda_linear.py::test_products_are_those_of_float64[{case}]"
                for case in ("f16-70x45-r1", "f16-5x4133-r1", "f16-70x45-r67", "q4-33x96-r1", "q4-70x45-r67")
            ),
            *(
                f"codegen/cuda/test_cuda_linear.py::test_products_are_those_of_float64[{form}-33x96-r1]"
                for form in ("q8", "q6", "q4m")
            ),
            f"{_LINEAR}each_row_has_the_bits_that_it_has_alone[(251, 72)-",
            *(
                f"{_LINEAR}same_bits_for_any_number_of_threads[{rows}-{form}]"
                for rows in (1, 13)
                for form in ("f16", "q4")
            ),
            f"{_LINEAR}embedding[100-13-13-",
            *(f"{_LINEAR}embedding[{size}-{form}]" for size in ("96-1-1", "330-13-3") for form in ("f16", "q4")),
            *(f"{_PREDICT}[{form}-" for form in ("f16", "q4")),
            *(f"{_PREDICT}[{form}-(77, 5, 72)-False]" for form in ("q8", "q6", "q4m")),
            *(f"{_PREDICT}_for_several_tokens[{form}]" for form in ("f16", "q4")),
        ),
    ),
    SlowTests(
        "blocks with limits, kernel by kernel: fast are one with each list, and one without",
        (
            *(f"{_LIMITS}{name}[" for name in ("limits", "several_sequences", "limits_of_zero_and_infinite_ones")),
            *(f"codegen/cuda/test_cuda_ffn_limits.py::test_{name}[" for name in ("limits", "several_sequences")),
        ),
        (
            *(
                f"codegen/cuda/test_cuda_ffn_limits.py::test_limits[('odd', '{case})]"
                for case in ("exact', 'go', 'f16', 1", "masked', 'go', 'f16', 1", "exact', 'go', 'f16', 13")
            ),
            *(
                f"{_LIMITS}limits[{case}]"
                for case in ("odd-exact-go-q8-1", "fatrelu-masked-g-f16-1", "gelu-dense-o-f16-1")
            ),
            f"{_LIMITS}limits[odd-exact-go-f16-13]",
            f"{_LIMITS}several_sequences[swiglu-exact-go-f16]",
            f"{_LIMITS}limits_of_zero_and_infinite_ones[('odd', ",
        ),
    ),
    SlowTests(
        "programs with limits, each of which takes seconds to compile: fast is a SwiGLU model without predictors",
        (
            "codegen/lowering/test_lower_limits.py::",
            "runtime/engine/test_runtime_limits.py::test_bytes_per_token",
            "runtime/engine/test_runtime_limits.py::test_decoding_several_threads",
        ),
        (
            *(
                f"codegen/lowering/test_lower_limits.py::test_{name}[swiglu]"
                for name in (
                    *("decoding_equals_the_eager_graph", "prompts_equal_the_eager_graph"),
                    *("several_sequences_have_the_bits_of_decoding", "no_two_tasks_of_a_region_meet"),
                    "counts_are_those_of_the_eager_graph",
                )
            ),
            "codegen/lowering/test_lower_limits.py::test_parts_without_limits_are_written_as_before",
        ),
    ),
    SlowTests(
        "cases of the command line that compile a model each: one of each kind is fast",
        (
            "artifact/test_hot_device.py::test_the_accuracy_check_reads_without_the_gpu",
            "artifact/test_hot_device.py::test_a_module_in_memory_has_no_profile",
            "artifact/test_hot_device.py::test_an_accuracy_bound_that_is_not_met_leaves_nothing",
            "artifact/test_hot_device.py::test_a_partition_of_the_cpu_is_judged_by_itself",
            "cli/test_cli_artifacts.py::test_compile_overwrites_an_artifact_when_forced",
            "cli/test_cli_artifacts.py::test_a_split_model_for_several_sequences_gives_the_same_text",
            "cli/test_cli_artifacts.py::test_synth_makes_what_compile_takes",
            "cli/test_cli_bad_input.py::test_failures_while_writing_leave_nothing[",
            "cli/test_cli_bad_input.py::test_models_that_cannot_be_compiled[norm_of_nan",
            "cli/test_cli_bad_input.py::test_files_that_are_links_to_nowhere[",
            "cli/test_cli_bad_input.py::test_files_that_would_keep_an_artifact_from_loading[",
            *(f"cli/test_cli_activation.py::test_{name}" for name in ("profile_train", "the_work_folder", "text_of")),
            *(f"cli/test_cli_activation.py::test_{name}" for name in ("plan", "imported_predictors")),
            "frontend/test_activation.py::test_a_class_that_computes_another_whatever_its_config_says",
            "cli/test_cli_artifacts.py::test_token_ids_need_no_tokenizer",
            "cli/test_cli_gguf.py::test_a_second_rounding_is_told",
            "cli/test_cli_gguf.py::test_every_command_takes_a_file",
            "cli/test_cli_gguf.py::test_compile_takes_the_predictors_of_the_file",
            "cli/test_cli_activation.py::test_the_artifact_is_that_of_the_config",
            "cli/test_cli_gguf.py::test_llama_cpp_file",
            "cli/test_cli_gpu.py::test_the_plan_is_that_of_the_same_options[",
            "cli/test_cli_gpu.py::test_a_profile_is_made_where_it_is_needed",
            "cli/test_cli_gpu.py::test_nothing_is_profiled_if_the_model_fits_the_gpu",
            "cli/test_cli_gpu.py::test_a_larger_budget_than_there_is_gets_a_warning",
            "cli/test_cli_gpu.py::test_a_gpu_that_does_not_see_what_the_host_writes",
            "cli/test_cli_plan.py::test_compile_warns_where_the_plan_does_not_hold",
            "cli/test_cli_plan.py::test_compiles_as_planned",
            "frontend/gguf/test_gguf_compile.py::test_a_powerinfer_file_is_the_artifact_of_the_folder[",
            "frontend/gguf/test_gguf_compile.py::test_every_matrix_keeps_its_numbers[",
            "frontend/test_activation.py::test_a_class_that_only_transformers_knows",
            "frontend/test_config.py::test_windows_of_single_layers",
            "predictors/test_contribution_compiled.py::",
            "test_prediction.py::test_predictors_that_compute_every_neuron_pass_any_bound",
            "test_prediction.py::test_the_artifact_says_what_its_predictors_cost",
            "test_prediction.py::test_what_would_be_refused_is_read_as_it_is_generated",
            "test_prediction.py::test_a_check_that_is_off_measures_nothing",
            "report/test_report_plan.py::test_an_artifact_shows_its_plan",
            "test_retry.py::test_a_retry_computes_predictors_alone",
            "test_retry.py::test_without_room_for_two_a_retry_computes_everything",
            "test_retry.py::test_the_last_attempt_is_refused_and_leaves_nothing",
        ),
        (
            "cli/test_cli_bad_input.py::test_failures_while_writing_leave_nothing[disk full]",
            "cli/test_cli_bad_input.py::test_files_that_are_links_to_nowhere[tokenizer.json]",
            "cli/test_cli_bad_input.py::test_files_that_would_keep_an_artifact_from_loading[tokenizer.json",
            "frontend/gguf/test_gguf_compile.py::test_every_matrix_keeps_its_numbers[llama-",
        ),
    ),
    SlowTests(
        "comparisons with the checkpoint, each of which compiles a model and reads a text several times: one is fast",
        tuple(
            f"test_accuracy_steps.py::test_{name}"
            for name in (
                "more_bits_are_nearer_to_the_checkpoint",
                "the_cache_is_rounded_as_the_artifact_rounds_it",
                "nothing_lossy_leaves_the_runtime",
                "predictors_are_to_blame",
                "an_artifact_with_predictors_has_both_figures",
                "thresholds_have_a_line",
            )
        ),
    ),
    SlowTests(
        "graphs drawn for what the properties of passes hold anyway: another order, other formats, styles one by one",
        (
            "passes/test_predictors.py::test_a_kind_of_a_package_goes_through_all_stages",
            "passes/test_properties.py::test_models_of_all_families",
            "passes/test_properties.py::test_raising_out_of_order[",
            "passes/test_properties.py::test_quantize[q",
            "passes/test_properties.py::test_quantize_leaves_what_is_packed[",
            "passes/test_reproducer.py::test_an_error_within_a_pass_says_where_and_is_reproduced",
            "passes/test_reproducer.py::test_source_builds_captured_graphs_again",
            "passes/test_reproducer.py::test_a_broken_rule_is_reproduced_on_a_small_graph",
            "testing/test_captured.py::test_every_style_is_raised",
            "testing/test_captured.py::test_every_choice_is_drawn",
            "testing/test_strategies.py::test_graphs_are_of_their_stage_and_verify[p",
            "testing/test_strategies.py::test_hot_sets_fit_their_graph",
            "testing/test_strategies.py::test_ordered_pipelines_run",
            "testing/test_strategies.py::test_predicted_graphs_lose_nothing_or_skip",
        ),
        (
            "passes/test_properties.py::test_raising_out_of_order[raise-attention]",
            "passes/test_properties.py::test_quantize[q4",
            "passes/test_properties.py::test_quantize_leaves_what_is_packed[q4]",
        ),
    ),
    SlowTests(
        "processes that are started, ended or loaded into again and again: one of each kind is fast",
        (
            "cli/test_cli_processes.py::test_closed_streams",
            "cli/test_cli_processes.py::test_a_signal_to_stop_ends_it_quietly",
            "predictors/train/test_train_run.py::test_a_ray_cluster_gives_the_same_bytes",
            "predictors/train/test_train_run.py::test_workers_give_the_same_bytes",
            "predictors/train/test_train_run.py::test_a_killed_run_goes_on",
            "runtime/engine/test_runtime_reload.py::test_several_threads_load_and_close",
            "runtime/engine/test_runtime_slots.py::test_closing_frees_the_memory_of_all_slots",
            "predictors/profile/test_calibration_text.py::test_the_library_holds_out",
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
    SlowTests(
        "compilations and readings of whole models that take ten seconds: steps of each have tests of their own",
        (
            "attack/test_checkpoints.py::test_mutated_checkpoints_are_refused_in_one_line_or_captured",
            "cli/test_cli_bad_input.py::test_fields_without_effect_are_named_once",
            "codegen/lowering/test_lower_limits.py::test_decoding_equals_the_eager_graph",
            "codegen/lowering/test_lower_predictors.py::test_counts_are_those_of_the_masks[",
            "examples/test_relufication.py::test_a_checkpoint_of_another_training_is_refused",
            "examples/test_relufication.py::test_firing_is_what_a_profile_counts",
            "examples/test_relufication.py::test_measurements_and_files",
            "frontend/test_capture_families.py::test_random_graphs_do_not_depend_on_earlier_ones",
            "frontend/test_capture_families.py::test_window_and_grouped_heads",
            "frontend/test_proof.py::test_what_changes_with_the_position_alone_is_found",
            "placement/test_planning.py::test_hot_neurons_are_those_that_fire_most",
            "rounding/test_rounding_compile.py::test_a_budget_gives_each_matrix_a_format",
            "rounding/test_rounding_compile.py::test_a_budget_with_a_pass_behind_quantization",
            "rounding/test_rounding_compile.py::test_another_budget_measures_nothing_again",
            "rounding/test_rounding_compile.py::test_standard_input_is_read_once_for_all_steps",
            "rounding/test_rounding_compile.py::test_text_or_a_work_folder_calibrates",
            "rounding/test_rounding_run.py::test_logits_are_closer_than_with_the_nearest_weights[",
            "rounding/test_rounding_run.py::test_projections_that_leave_out_inputs_are_rounded_too",
            "runtime/sampling/test_runtime_chat_limits.py::test_a_process_that_was_killed_is_started_anew",
            "runtime/sampling/test_runtime_chat_limits.py::test_one_process_renders_all_chats_and_ends_with_the_tokenizer",
            "runtime/serving/test_tools_parser.py::test_pieces_are_read_like_the_whole[",
            "skipping/test_sensitivities.py::test_the_diagonal_of_the_fisher_information[",
            "skipping/test_skipping_compile.py::test_every_place",
            "skipping/test_skipping_compile.py::test_the_command_says_what_is_left_out",
            "skipping/test_skipping_compile.py::test_the_accuracy_table_has_a_line",
            "test_accuracy_steps.py::test_weights_are_to_blame",
            "test_compile.py::test_a_failure_leaves_the_old_artifact_and_nothing_else",
            "test_compile.py::test_any_module_compiles_and_gives_its_own_logits",
        ),
        (
            "rounding/test_rounding_run.py::test_logits_are_closer_than_with_the_nearest_weights[llama-relu",
            "runtime/serving/test_tools_parser.py::test_pieces_are_read_like_the_whole[hermes]",
            "skipping/test_sensitivities.py::test_the_diagonal_of_the_fisher_information[qwen2]",
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
