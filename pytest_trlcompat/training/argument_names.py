"""Which part of a training each field of a config is about: every name that a config of TRL's, of Transformers' or of
TRL's command line has in some release.

A field that a release adds fails ``tests/stack/test_axes.py`` until it has its place here. Older names are in
:mod:`~pytest_trlcompat.training.aliases` alone. Imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ARGUMENTS", "words"]


def words(text: str) -> list[str]:
    """The words of a text, for tables of names."""
    return text.split()


_NAMES: Mapping[str, str] = {
    "trainer": """
        adap_kl_ctrl add_tail_bucket alpha async_reward_computation base_model beta beta1 beta2
        center_rewards_coefficient clip_ratio_c cliprange cliprange_value config cpo_alpha delta
        der_loss_weight1 der_loss_weight2 desirable_weight diagnostics_flat_tolerance
        diagnostics_warning_interval discopop_tau distillation_add_tail distillation_alpha distillation_is_clip
        distillation_mode distillation_objective distillation_topk distillation_weight divergence_topk
        divergence_type dont_reprompt_on_self_success ema_update_rate entropy_coef entropy_coef_delta
        entropy_coef_max entropy_coef_min entropy_target environment_feedback_only_without_solution epsilon
        epsilon_high f_alpha_divergence_coef f_divergence_type feedback_template filter_all_incorrect
        filter_empty fork_threshold_tokens full_logit_distillation gamma generate_from_teacher
        generation_batch_size generation_kwargs heartbeat_stale_after_s horizon ignore_bias_buffers
        importance_sampling_level init_kl_coef iw_opd_epsilon iw_opd_gamma judge kd_temperature kl_coef
        kl_estimator kl_penalty label_smoothing label_smoothing_factor lam ld_alpha length_normalization lmbda
        loss_add_tail loss_top_k loss_type loss_weights mask_ratio mask_truncated_completions mask_type
        max_completion_length max_density_ratio max_inflight_tasks max_new_tokens max_reprompt_len max_staleness
        max_tool_calling_iterations max_workers min_density_ratio min_p missing_eos_penalty mixture_coef
        multi_objective_aggregation negative_prompts non_eos_penalty normalize_advantage normalize_advantages
        normalize_reward num_completions_to_print num_generations num_generations_eval num_iterations
        num_loss_tokens_to_skip num_mini_batches num_of_sequences num_ppo_epochs num_remains_in_group
        num_value_samples off_policy_mask_threshold penalty_reward_value perception_loss_weight ppo_epochs
        precompute_ref_batch_size precompute_ref_log_probs prompt_sample_size query_dataset queue_maxsize
        ratio_threshold ref_model_mixup_alpha ref_model_sync_steps reference_free
        remove_thinking_from_demonstration repetition_penalty replay_buffer_size reprompt_template
        request_timeout response_length reverse_kl_top_1_mode reward_clip_range reward_weights rkl_advantage
        rloo_k rpo_alpha sample_eta sample_guidance_scale sample_num_batches_per_epoch sample_num_steps
        sanity_check sapo_temperature_neg sapo_temperature_pos scale_rewards score_clip sdpo_policy_loss_mode
        seq_kd sft_model_path simpo_gamma single_step_decomposition solution_template step_separator
        steps_per_generation stop_token stop_token_id success_reward_threshold target target_kl task_name
        teacher_prompt_template teacher_regularization teacher_server_urls teacher_sync_steps
        teacher_temperature teacher_top_k teacher_update_rate temperature token_budget token_level_kl
        top_entropy_quantile top_k top_p tpo_alpha tpo_l_gamma train_adv_clip_max train_cfg train_clip_range
        train_gradient_accumulation_steps train_num_inner_epochs train_on_last_step_only train_timestep_fraction
        truncated_backprop_rand truncated_backprop_timestep truncated_rand_backprop_minmax
        uld_crossentropy_weight uld_distillation_weight uld_hybrid_matched_weight uld_hybrid_unmatched_weight
        uld_skip_student_eos uld_skip_teacher_eos uld_student_temperature uld_teacher_temperature
        uld_token_merge_strategy uld_use_hybrid_loss undesirable_weight use_adaptive_entropy
        use_bias_correction_kl use_extended_uld use_logits_to_keep use_num_logits_to_keep use_score_norm
        use_score_scaling use_seq2seq use_successful_as_teacher use_teacher_server use_uld_loss use_weighting
        vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vf_coef weight_sync_steps weight_sync_timeout
        whiten_rewards
    """,
    "model": """
        attn_implementation base_model_attribute_name bnb_4bit_quant_storage bnb_4bit_quant_type disable_dropout
        dtype force_use_ref_model load_in_4bit load_in_8bit model model_init_kwargs model_name
        model_name_or_path model_revision neftune_noise_alpha pretrained_model pretrained_revision
        ref_model_init_kwargs revision reward_model reward_model_path router_aux_loss_coef
        student_model_revision teacher_model_init_kwargs teacher_model_kind teacher_model_name_or_path
        teacher_model_revision teacher_model_server_url teacher_tokenizer_name_or_path trust_remote_code
        use_bnb_nested_quant use_safetensors
    """,
    "adapter": """
        is_peft_model lora_alpha lora_dropout lora_modules_to_save lora_r lora_target_modules
        lora_target_parameters lora_task_type model_adapter_name ref_adapter_name use_dora use_lora use_peft
        use_rslora
    """,
    "optimizer": """
        adafactor adam_beta1 adam_beta2 adam_epsilon learning_rate lr_scheduler_kwargs lr_scheduler_type
        max_grad_norm optim optim_args optim_target_modules optimize_cuda_cache optimize_device_cache
        train_adam_beta1 train_adam_beta2 train_adam_epsilon train_adam_weight_decay train_learning_rate
        train_max_grad_norm train_use_8bit_adam warmup_ratio warmup_steps weight_decay
    """,
    "data": """
        assistant_only_loss chars_per_token chat_template_kwargs chat_template_path completion_only_loss
        data_dir data_files data_seed dataloader_drop_last dataloader_in_order
        dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
        dataloader_pin_memory dataloader_prefetch_factor dataset dataset_batch_size dataset_config
        dataset_kwargs dataset_name dataset_num_proc dataset_streaming dataset_test_split dataset_text_field
        dataset_train_split eos_token eval_packing group_by_length ignore_data_skip is_encoder_decoder
        label_names label_pad_token_id length_column_name log_with max_length max_prompt_length max_seq_length
        max_target_length packing packing_strategy pad_to_multiple_of pad_token padding_free padding_value
        remove_unused_columns shuffle_dataset streaming test_split_size tools train_sampling_strategy
        truncation_mode
    """,
    "parallel": """
        accelerator_config accelerator_kwargs average_tokens_across_devices ddp_backend ddp_broadcast_buffers
        ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout deepspeed dispatch_batches
        ds3_gather_for_generation fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap
        local_rank mp_parameters no_cuda parallelism_config ray_scope split_batches tp_size tpu_num_cores
        use_cpu use_ipex use_mps_device world_size
    """,
    "engine": """
        activation_checkpointing activation_checkpointing_kwargs activation_offloading allow_tf32 bf16
        bf16_full_eval cache_implementation cast_lm_head_to_fp32 enable_prefix_caching enforce_eager fp16
        fp16_backend fp16_full_eval fp16_opt_level full_determinism gpu_memory_utilization
        gradient_checkpointing_use_reentrant half_precision_backend jit_mode_eval liger_kernel_config
        max_model_len mixed_precision tensor_parallel_size tf32 torch_compile torch_compile_backend
        torch_compile_mode torch_empty_cache_steps transformers_continuous_batching_config use_cache use_liger
        use_liger_kernel use_liger_loss use_transformers_continuous_batching use_transformers_paged use_vllm
        vllm_device vllm_dtype vllm_enable_prefix_caching vllm_enable_sleep_mode vllm_gpu_memory_utilization
        vllm_group_port vllm_guided_decoding_regex vllm_importance_sampling_cap
        vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_max_model_len vllm_max_model_length vllm_mode vllm_model_impl
        vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
        vllm_sync_frequency vllm_tensor_parallel_size
    """,
    "life": """
        auto_find_batch_size backward_batch_size batch_eval_metrics batch_size callbacks compare_steps debug
        disable_tqdm do_eval do_predict do_train early_stopping enable_jit_checkpoint eval_accumulation_steps
        eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object exp_name
        forward_batch_size generate_during_eval global_backward_batch_size global_batch_size
        gradient_accumulation_steps greater_is_better hub_always_push hub_model_id hub_model_revision
        hub_private_repo hub_revision hub_strategy hub_token include_environment_feedback include_for_metrics
        include_inputs_for_metrics include_num_input_tokens_seen include_tokens_per_second
        load_best_model_at_end local_batch_size local_mini_batch_size local_rollout_forward_batch_size
        log_completions log_completions_hub_repo log_completions_steps log_image_freq log_level
        log_level_replica log_multimodal log_on_each_node log_unique_prompts logdir logging_dir
        logging_first_step logging_nan_inf_filter logging_steps logging_strategy max_steps metric_for_best_model
        micro_batch_size mini_batch_size num_checkpoint_limit num_epochs num_sample_generations
        num_total_batches num_train_epochs num_updates output_dir overwrite_hub_revision overwrite_output_dir
        past_index per_device_eval_batch_size per_device_train_batch_size per_prompt_stat_tracking
        per_prompt_stat_tracking_buffer_size per_prompt_stat_tracking_min_count prediction_loss_only project
        project_kwargs push_to_hub push_to_hub_if_best_kwargs push_to_hub_model_id push_to_hub_organization
        push_to_hub_revision push_to_hub_token report_to restore_callback_states_from_checkpoint resume_from
        resume_from_checkpoint run_name sample_batch_size save_freq save_on_each_node save_only_model
        save_safetensors save_steps save_strategy save_total_limit seed skip_memory_metrics steps sync_ref_model
        total_episodes tpu_metrics_debug tracker_kwargs tracker_project_name trackio_bucket_id trackio_space_id
        trackio_static_space_id train_batch_size trl_project use_legacy_prediction_loop wandb_entity
        wandb_project wandb_run_group
    """,
}

ARGUMENTS: Mapping[str, str] = MappingProxyType({name: part for part, names in _NAMES.items() for name in words(names)})
"""The newest name of a field to the part of a training that it is about; ``trainer`` has what its loss is made of."""
