"""What `make test` leaves to `make test-every`: of tests that take long, most cases, and of some all.

Whoever changes what such a test is about runs it with ``--every``. Everything that takes less is run every time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import pytest

KEPT: dict[str, dict[str, int | tuple[str, ...]]] = {
    "test_adamw.py": {
        "test_another_layout_goes_on_to_the_same_bits": 1,
        "test_exact_sums_give_the_same_bits_at_any_number_of_ranks": 0,
        "test_experts_and_tied_weights_too": 1,
        "test_it_learns_as_with_wide_moments": 0,
        "test_layouts_keep_what_one_device_keeps": ("float8-3",),
    },
    "test_cli_new.py": {
        "test_it_trains_as_it_is_written": ("task",),
    },
    "checkpoint/test_frozen.py": {
        "test_a_run_begins_and_goes_on_from_a_folder_and_is_exported": 0,
        "test_hashes_are_those_of_one_device": ("pp=2",),
    },
    "test_epochs.py": {
        "test_a_run_by_epochs_goes_on_by_more": 0,
    },
    "test_families.py": {
        "test_it_is_proven": ("ernie-moe", "llama4"),
    },
    "kernels/test_fp8.py": {
        "test_the_kernel_is_its_twin": 0,
    },
    "kernels/test_fp8_triton.py": {
        "test_the_kernel_compiles": 0,
    },
    "launch/test_hosts.py": {
        "test_two_hosts_train_to_the_same_bits_as_this_machine": 0,
        "test_what_is_wrong_ends_it_before_anything_is_started": 0,
    },
    "watch/test_why.py": {
        "test_nothing_is_wrong_with_a_healthy_run": ("dp=2",),
        "test_a_rank_asleep_in_the_data": 0,
        "test_a_worker_asleep_in_the_data": 0,
        "test_a_rank_that_computes_for_ever": 0,
        "test_a_rank_that_was_stopped": 0,
        "test_a_collective_that_one_rank_launches_alone": 0,
        "test_two_axes_in_a_ring": 0,
        "test_a_rank_that_touches_what_is_not_its_own": 0,
        "test_a_killed_supervisor": 0,
        "test_data_that_is_slow": 0,
        "test_a_loss_that_is_not_a_number": 0,
        "test_a_hang_that_was_survived_is_told_of": 0,
        "test_a_rank_that_went_past_what_the_others_called": 0,
        "test_a_module_that_makes_it_not_a_number": 0,
        "test_replicas_that_drift_apart": 0,
        "test_weights_that_learn_nothing": 0,
    },
    "test_cli_tune.py": {
        "test_a_rate_is_found_drawn_and_written": ("dp=1",),
        "test_a_rate_that_nothing_learns_at_is_no_rate": 0,
        "test_the_curve_is_drawn_and_a_rate_said": 0,
        "test_the_largest_micro_batch_by_memory_that_ranks_hold": 0,
        "test_what_cannot_be_is_refused": 1,
    },
    "train/test_parameter_groups.py": {
        "test_exact_sums_give_the_same_bits_at_any_number_of_ranks": 0,
        "test_it_is_proven": 0,
        "test_layouts_train_like_a_loop_by_hand": ("fsdp=2,tp=2",),
        "test_muon_for_matrices_of_blocks_too": ("fsdp=2",),
    },
    "train/test_turns.py": {
        "test_a_run_that_takes_turns_goes_on_to_the_same_bits": 0,
    },
    "train/test_changes.py": {
        "test_a_run_that_goes_on_with_other_code_and_data_says_so": 0,
    },
    "launch/test_ray_worker.py": {
        "test_a_child_gives_its_exit_code_and_knows_no_launcher": 0,
        "test_ranks_end_with_the_worker_that_is_killed": 0,
    },
    "bench/test_table.py": {
        "test_who_is_not_installed_or_dies_is_named": 0,
        "test_json_is_one_object_and_nothing_else": 0,
        "test_one_command_measures_and_names_what_is_missing": 0,
    },
    "checkpoint/test_commits.py": {
        "test_a_run_on_s3": 0,
        "test_an_object_is_created_once": 1,
        "test_an_old_generation_does_not_overwrite_a_newer_ones_checkpoint": 1,
    },
    "checkpoint/test_export.py": {
        "test_hugging_face_reads_it_and_so_do_we": 1,
    },
    "checkpoint/test_owed.py": {
        "test_a_run_goes_on_to_the_same_bits": ("dp=2,fsdp=2,comm=int4",),
        "test_another_layout_owes_as_much": 0,
        "test_what_nobody_will_send_is_said": 0,
    },
    "parallel/weights/test_coded.py": {
        "test_every_rank_goes_the_same_way": ("dp=4,comm=int4-0.2",),
        "test_bytes_are_those_of_codes": 0,
    },
    "prove/reference/test_coded.py": {
        "test_layouts_train_as_one_device_says_they_do": 0,
        "test_a_codec_that_forgets_what_it_owes_is_found": 0,
        "test_what_only_float64_can_show_is_said": 0,
    },
    "checkpoint/test_state.py": {
        "test_every_optimizer_goes_on_where_it_was": 2,
    },
    "kernels/test_adamw.py": {
        "test_narrow_moments_are_rounded_as_by_the_twin": 0,
        "test_the_kernel_is_its_twin": 0,
    },
    "kernels/test_adamw_triton.py": {
        "test_the_kernel_compiles": 0,
    },
    "kernels/test_cross_entropy.py": {
        "test_kernels_are_their_twins": 0,
    },
    "kernels/test_cross_entropy_triton.py": {
        "test_kernels_compile": 0,
    },
    "launch/test_forkserver.py": {
        "test_a_proof_starts_a_server_of_its_own": 1,
    },
    "launch/test_local.py": {
        "test_no_rank_outlives_the_process_that_forked_it": 1,
        "test_ranks_share_the_cores": 0,
    },
    "launch/test_local_leader.py": {
        "test_a_rank_is_lost_under_another_launcher_and_the_bits_are_the_same": 0,
    },
    "train/test_doctor.py": {
        "test_hosts_are_examined_together": 0,
        "test_a_clock_that_is_off_by_a_day_is_named_before_the_first_step": 0,
        "test_hosts_with_other_code_are_named_before_the_first_step": 0,
    },
    "launch/test_host_check.py": {
        "test_a_port_that_is_taken_and_a_folder_that_is_not_shared": 0,
    },
    "launch/test_host_side.py": {
        "test_a_supervisor_does_not_wait_for_a_link_that_takes_nothing": 0,
    },
    "launch/test_kubernetes.py": {
        "test_the_commands_of_the_page_are_described": 0,
        "test_a_jobset_is_created_and_followed_to_its_end": 0,
        "test_a_pod_that_waits_is_named": 0,
        "test_the_unet_learns_the_same_on_two_ranks": 0,
    },
    "launch/test_ray.py": {
        "test_a_run_on_two_nodes_ends_with_the_same_bits": 0,
        "test_a_node_that_is_lost_is_waited_for": 0,
        "test_a_task_is_tuned": 0,
        "test_a_task_that_is_refused_is_not_started_again": 0,
        "test_a_worker_that_is_killed_is_started_again": 0,
        "test_ctrl_c_ends_a_cluster_of_our_own_too": 0,
        "test_from_python_there_is_a_result": 0,
        "test_what_would_wait_for_ever_is_refused": 0,
        "test_who_cancels_keeps_what_was_done": 0,
    },
    "launch/test_started.py": {
        "test_hosts_of_a_cloud_find_each_other": ("SageMaker",),
    },
    "launch/test_slurm.py": {
        "test_a_job_that_cannot_work_is_withdrawn": 0,
        "test_a_job_that_is_preempted_goes_on_where_it_was": 0,
        "test_a_job_that_loses_a_node_goes_on_when_there_is_another": 0,
        "test_a_job_whose_time_is_over_queues_up_again": 0,
        "test_who_looks_away_looks_again_and_cancels": 0,
    },
    "parallel/axes/test_hugging_face.py": {
        "test_attention_of_other_kinds": 3,
        "test_in_fewer_bits": 2,
        "test_each_axis": 1,
        "test_every_two_axes": 0,
    },
    "parallel/axes/test_pipeline.py": {
        "test_offload_and_pipelines": 0,
        "test_half_precision_stays_near": 1,
        "test_models_that_cannot_be_cut_are_refused": 1,
    },
    "parallel/axes/test_samples.py": {
        "test_a_pipeline_takes_one_micro_batch": 0,
        "test_a_contrastive_loss_trains_like_on_one_device": ("1",),
        "test_the_example_is_the_same_at_any_number_of_ranks": 0,
        "test_with_experts": 0,
    },
    "parallel/blocks/test_assembly.py": {
        "test_a_block_prints_what_is_done_around_it": 1,
    },
    "parallel/blocks/test_compiling.py": {
        "test_compiled_blocks_train_like_one_device": 0,
        "test_with_kernels_of_the_compilers_own": 0,
    },
    "parallel/blocks/test_fp8.py": {
        "test_every_layout_trains_like_one_device_and_has_the_same_scales": ("tp=2",),
    },
    "parallel/blocks/test_probe.py": {
        "test_what_can_be_followed_is_equal": 1,
        "test_what_cannot_be_followed_is_refused": 2,
    },
    "parallel/test_compile.py": {
        "test_a_compiled_step_in_8_bits_is_that_step": 0,
        "test_a_compiled_step_is_the_step": 0,
    },
    "parallel/test_odd_models.py": {
        "test_odd_models_train_like_one_device": ("CalledTwice", "Recurrent"),
    },
    "parallel/test_spmd_types.py": {
        "test_gradients_are_partial_on_cp": 0,
        "test_gradients_are_partial_where_they_are_summed_over_tp": 1,
    },
    "parallel/weights/test_keras.py": {
        "test_a_model_that_imports_keras_itself_begins_like_all_others": 0,
    },
    "prove/bugs/test_known.py": {
        "test_a_planted_bug_is_caught_and_named": ("a_rank_is_killed",),
        "test_what_crosses_ranks_is_looked_for_where_it_does": 0,
    },
    "prove/ranks/test_resuming.py": {
        "test_a_trial_of_one_step_is_resumed_too": 0,
        "test_the_layout_before_is_taken_up": 0,
        "test_what_no_checkpoint_has_is_found": 0,
    },
    "prove/reference/test_evaluation.py": {
        "test_a_mean_of_means_is_named_where_it_is": 0,
        "test_all_that_is_measured_is_compared": 0,
    },
    "prove/test_findings.py": {
        "test_the_smallest_layout_is_named_with_what_to_do": 0,
    },
    "prove/test_proof.py": {
        "test_a_head_whose_bias_is_tied_can_be_cut": 0,
        "test_all_layouts_of_two_ranks": 0,
        "test_a_layout_that_a_narrow_dtype_cannot_is_not_called_equal": 0,
        "test_a_narrow_dtype_is_proven_beside_float64": 0,
        "test_a_piece_updated_where_the_whole_is_needed_is_found": 0,
        "test_callbacks_that_differ_between_ranks_or_forget_are_found": 0,
        "test_experts_and_batch_norm_raise_no_alarm": 0,
        "test_losses_that_compare_samples_are_proven_with_several_micro_batches": 0,
        "test_odd_tasks_raise_no_alarm": 1,
        "test_optimizers_of_whole_matrices_are_proven": 0,
        "test_right_layouts_are_equal": 0,
        "test_tasks_with_callbacks_are_proven": 0,
        "test_weights_in_no_group_of_the_optimizer_stay_as_they_are": 0,
        "test_whoever_counts_what_it_gathered_is_told_so": 0,
    },
    "prove/test_report.py": {
        "test_buffers_have_a_bar_of_their_own": 0,
    },
    "data/test_token_folder.py": {
        "test_every_kind_of_file_gives_the_same_tokens": ("jsonl.zst", "txt"),
        "test_who_is_killed_goes_on_to_the_same_bytes": ("2",),
        "test_a_bad_row_stops_or_is_left_out": ("2",),
    },
    "data/test_streaming_s3.py": {
        "test_s3_is_read_by_workers_of_the_loader": 0,
    },
    "test_cli_tokenize.py": {
        "test_a_folder_is_made_verified_and_not_made_twice": 0,
    },
    "recipes/test_pretrain.py": {
        "test_it_learns_each_source_by_its_weight": 0,
        "test_a_mixture_is_certified_and_other_weights_are_other_samples": 0,
        "test_a_configuration_of_hugging_face_is_trained": 0,
    },
    "recipes/test_bert.py": {
        "test_it_tells_hidden_letters_from_both_sides": 0,
    },
    "data/test_chat_tokenizer.py": {
        "test_it_is_the_same_in_every_process": 0,
    },
    "models/test_hugging_face.py": {
        "test_what_is_no_such_model_is_refused": 0,
    },
    "recipes/test_sft.py": {
        "test_it_begins_with_the_weights_of_a_folder": ("3",),
        "test_it_learns_the_shipped_answers": 0,
    },
    "recipes/test_dpo.py": {
        "test_it_learns_to_prefer_the_better_answers": 0,
        "test_other_methods_learn_too": ("kto",),
        "test_a_model_kept_beside_is_the_one_it_began_as": 0,
        "test_a_model_beside_is_spread_with_it": ("tp=2",),
        "test_ranks_compute_the_reference_together": 0,
    },
    "recipes/test_dpo_peers.py": {
        "test_losses_are_those_of_trl": 0,
        "test_losses_are_those_of_a_plain_loop": 0,
    },
    "recipes/test_reward.py": {
        "test_it_learns_to_tell_answers_apart": 0,
        "test_losses_are_those_of_trl": 0,
        "test_hugging_face_reads_what_was_trained": 0,
    },
    "recipes/test_distil.py": {
        "test_a_student_comes_near_its_teacher": 0,
        "test_both_models_are_spread": ("tp=2",),
        "test_it_trains_as_it_comes": 0,
        "test_what_cannot_be_is_refused": 0,
    },
    "recipes/test_fine_tuning.py": {
        "test_each_is_made_small_on_the_shipped_rows": ("Distil",),
        "test_a_model_and_the_one_beside_it_begin_in_folders_of_their_own": 0,
    },
    "prove/reference/test_beforehand.py": {
        "test_layouts_hold_and_a_mistake_in_it_is_seen": 0,
    },
    "train/test_beforehand.py": {
        "test_ranks_that_start_again_read_it": 0,
    },
    "recipes/test_gpt.py": {
        "test_it_learns_more_than_letter_frequencies": 0,
    },
    "test_callbacks.py": {
        "test_frozen_and_averaged_weights_are_those_of_one_device": 3,
    },
    "test_cli.py": {
        "test_prove_tells_and_train_knows_of_it": 0,
        "test_exact_runs_leave_the_same_bytes": 0,
        "test_prove_prints_json_and_an_exit_code": 0,
        "test_a_mistake_is_one_clear_screen": 10,
        "test_a_task_in_a_package_is_found_from_any_folder": 0,
    },
    "test_docs.py": {
        "test_commands_run": ("README.md", "check.md"),
        "test_python_runs": 3,
        "test_what_make_train_suggests_runs": 0,
    },
    "test_examples.py": {
        "test_a_gan_is_the_same_at_1_2_and_4_ranks": 0,
        "test_auc_and_f1_are_the_same_at_1_2_and_4_ranks": 0,
        "test_the_detector_is_proven": 0,
        "test_the_gan_is_proven": 0,
    },
    "test_processes.py": {
        "test_a_job_survives_without_what_only_linux_has": 0,
    },
    "test_recovery.py": {
        "test_a_second_run_on_one_folder_is_refused_and_harms_nothing": 0,
        "test_a_longer_run_is_not_finished_by_the_shorter_ones_certificate": 0,
        "test_a_signal_that_is_repeated_to_the_end_changes_nothing": 1,
        "test_every_other_blow": 0,
        "test_hosts_come_and_go": 0,
        "test_ranks_killed_at_random_moments": 0,
        "test_settings_that_were_lost_are_not_taken_to_be_the_usual": 1,
        "test_signals_that_are_repeated_lose_nothing": 0,
    },
    "watch/page/test_watching.py": {
        "test_a_run_is_seen_while_it_trains": 0,
    },
    "test_user_code.py": {
        "test_a_proof_is_void_when_an_imported_file_changes_and_only_then": 0,
    },
    "train/check/test_checking.py": {
        "test_a_mistake_is_found": 10,
        "test_there_are_enough_and_nearly_all_name_a_line": 0,
    },
    "train/check/test_false_alarms.py": {
        "test_examples": 3,
        "test_losses_that_are_right": 5,
        "test_recipes": 2,
    },
    "train/check/test_samples.py": {
        "test_train_says_what_it_would_without_the_check": 2,
    },
    "train/test_calling.py": {
        "test_one_rank_ends_the_run_for_all_and_it_is_finished": 0,
        "test_a_run_that_stopped_early_can_have_been_interrupted": 0,
        "test_averages_are_left_beside_the_weights": 0,
    },
    "train/test_checkpointing.py": {
        "test_a_kill_leaves_what_is_whole_and_nothing_else": 3,
    },
    "train/test_collecting.py": {
        "test_every_sample_once_and_in_order": 1,
    },
    "train/test_engine.py": {
        "test_a_loop_of_ones_own_runs_under_torchrun_unchanged": 0,
    },
    "train/test_exporting_lora.py": {
        "test_of_a_run_without_lora_nothing_is_merged": 0,
        "test_peft_reads_it_and_we_read_peft": ("dora",),
    },
    "train/test_answering.py": {
        "test_answers_are_those_that_transformers_generates": 0,
    },
    "train/test_evaluated_beside.py": {
        "test_checkpoints_are_evaluated_to_the_last": 0,
        "test_a_failure_of_it_is_told_and_the_run_comes_to_its_end": 0,
    },
    "train/test_harness.py": {
        "test_the_harness_runs_a_task_with_it": 0,
    },
    "train/test_evaluating.py": {
        "test_measures_are_those_that_training_found": 0,
    },
    "recipes/test_embed.py": {
        "test_any_layout_and_micro_batch_gives_the_losses_and_measures_of_one_device": 0,
        "test_it_learns_to_find": 0,
    },
    "recipes/test_embed_peers.py": {
        "test_losses_are_those_of_sentence_transformers": 0,
    },
    "recipes/test_sentence_transformers.py": {
        "test_vectors_are_equal": ("Llama",),
    },
    "recipes/test_sft_peers.py": {
        "test_losses_are_those_of_trl": 0,
        "test_losses_are_those_of_peft_in_a_plain_loop": 0,
    },
    "train/test_exact.py": {
        "test_more_virtual_micro_batches_than_samples_of_a_rank": 0,
        "test_any_number_of_ranks_gives_the_same_bits": 0,
    },
    "train/test_folders.py": {
        "test_a_run_goes_on_from_another_folder": 1,
    },
    "train/test_guard.py": {
        "test_weights_that_lead_nowhere_are_not_certified_and_cost_no_good_checkpoint": 1,
    },
    "train/test_logged.py": {
        "test_any_layout_gives_the_same": 3,
        "test_compiled_blocks_log_in_every_step": 0,
        "test_what_the_model_logs_reaches_all_ranks_from_every_stage": 4,
    },
    "train/test_matrices.py": {
        "test_weights_are_chosen_by_their_whole_shape": 0,
        "test_exact_sums_give_the_same_bits_at_any_number_of_ranks": 0,
        "test_on_eight_ranks": 0,
        "test_state_is_taken_up_under_other_layouts": 0,
        "test_a_stage_without_whole_matrices_and_an_optimizer_that_begins_state_for_all": 0,
        "test_whole_matrices_are_updated_as_on_one_device": 0,
        "test_wide_weights_of_narrow_computation_and_on_the_host": 1,
    },
    "train/test_memory.py": {
        "test_frozen_weights_are_held_once_and_narrow": 0,
        "test_what_optimizers_keep": 7,
    },
    "train/test_parity.py": {
        "test_accumulation_changes_nothing": ("language-1-4", "vision-1-1"),
        "test_every_layout_trains_like_one_device": (
            "False-1-0",
            "False-2-0",
            "False-2-1",
            "False-2-2",
            "False-2-3",
            "True-2-0",
            "True-2-1",
            "True-2-2",
            "True-2-3",
        ),
        "test_experts_with_limited_room": 0,
        "test_packed_documents_stay_apart": 0,
        "test_sixteen_ranks": 0,
    },
    "train/test_recording.py": {
        "test_a_run_of_short_lines_is_restarted_resumed_certified_and_explained": 0,
    },
    "train/test_replay.py": {
        "test_the_rank_that_computes_other_bits_is_named": 1,
    },
    "train/test_replicas.py": {
        "test_a_run_goes_back_to_before_it_was_corrupted": 0,
    },
    "train/profile/test_host_clocks.py": {
        "test_a_host_whose_clock_is_ahead_is_seen_at_the_same_moments": 0,
    },
    "train/profile/test_modules.py": {
        "test_a_rank_that_is_killed_does_not_cost_what_was_counted": 0,
        "test_a_run_that_goes_on_with_that_step_says_what_it_did_not_count": 0,
        "test_compiled_blocks_are_timed_as_wholes": 0,
        "test_flops_are_those_of_the_model": ("fsdp=2,zero=3",),
        "test_the_numbers_of_the_run_are_the_same": 0,
    },
    "train/profile/test_recorder.py": {
        "test_a_rank_that_is_killed_meanwhile": 1,
        "test_a_run_that_ends_meanwhile_leaves_what_was_done": 0,
        "test_some_ranks_of_a_pipeline": 0,
    },
    "train/test_restoring.py": {
        "test_a_run_taken_up_half_way_ends_as_if_it_had_gone_on": 1,
        "test_state_goes_from_layout_to_layout_unchanged": ("vision",),
        "test_state_is_found_in_memory": 2,
    },
    "train/test_rounds.py": {
        "test_narrow_dtypes_and_their_scale": 1,
    },
    "train/test_shrink.py": {
        "test_a_hugging_face_model_is_shrunk_by_its_configuration": 0,
    },
    "train/test_totals.py": {
        "test_each_loss_is_divided_by_its_own_count": 1,
    },
    "train/test_streaming.py": {
        "test_pieces_are_updated_as_the_whole": 0,
    },
    "train/test_update.py": {
        "test_an_update_in_one_pass_is_the_optimizers_own": 0,
        "test_narrow_moments_in_one_pass_are_the_optimizers_own": 0,
    },
    "watch/loggers/test_base.py": {
        "test_a_task_may_have_one_among_its_callbacks": 0,
    },
    "watch/loggers/test_mlflow_run.py": {
        "test_each_step_is_in_one_run_once": 0,
    },
    "watch/loggers/test_wandb_run.py": {
        "test_each_step_is_in_one_run_once": 0,
        "test_who_is_not_logged_in_is_told_what_to_do": 0,
    },
}
"""By file and test: how many of its cases stay, spread over all of them, or which."""


def left_out(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Those of these tests that are not run every time."""
    for (file, test), group in groupby(items, key=_place):
        kept = KEPT.get(file, {}).get(test)
        if kept is None:
            continue
        cases = [item for item in group if not item.get_closest_marker("every")]
        if isinstance(kept, int):
            chosen = {cases[index * len(cases) // kept] for index in range(kept)} if cases else set()
        else:
            chosen = {item for item in cases if item.name.partition("[")[2].removesuffix("]") in kept}
        yield from (item for item in cases if item not in chosen)


def _place(item: pytest.Item) -> tuple[str, str]:
    path, _, test = item.nodeid.partition("::")
    return path.removeprefix("tests/"), test.partition("[")[0]
