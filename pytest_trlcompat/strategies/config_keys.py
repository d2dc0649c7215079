"""What a launch does with each setting of Accelerate's and DeepSpeed's configuration files, and of launchers' options.

A user's file is launched as it is. Each key that these libraries read is therefore listed here: it is passed on, it has
no effect in a launch, it must say what holds anyway, or it is refused. A key that is not listed is refused too, and a
test compares these lists with what the installed releases know. Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

__all__ = [
    "ACCELERATE",
    "ACCELERATE_OPTIONS",
    "ACCELERATE_SECTIONS",
    "DEEPSPEED",
    "DEEPSPEED_OPTIONS",
    "DEEPSPEED_SECTIONS",
    "SAGEMAKER_KEYS",
    "TORCHRUN_OPTIONS",
    "Fixed",
    "Key",
    "Passed",
    "Refused",
    "WithoutEffect",
    "problem_of",
    "problems_of_accelerate",
    "problems_of_deepspeed",
    "section_key",
]


@dataclass(frozen=True)
class Key:
    """What a launch does with a setting.

    Attributes:
        reason: why, or for what is refused what to do instead.
    """

    reason: str


class Passed(Key):
    """It reaches the ranks as Accelerate or DeepSpeed itself would hand it on."""


class WithoutEffect(Key):
    """A launch does by itself what this is about, and it says nothing about the training."""


@dataclass(frozen=True)
class Fixed(Key):
    """It may only say what holds in every launch.

    Attributes:
        values: what it may be; compared as text without regard to case.
    """

    values: tuple[Any, ...] = ()


class Refused(Key):
    """No launch can honour it."""


_STRATEGY = Passed("decides about the strategy")
_TO_RANKS = Passed("becomes a variable of the ranks")
_MEETING = WithoutEffect("the ranks of a launch meet in a file or at the launch's own port")
_LOGS = WithoutEffect("the launch keeps what ranks print")
_RESTARTS = WithoutEffect("ranks are started once")
_THREADS = WithoutEffect("ranks share the cores of this machine; OMP_NUM_THREADS in env= says how")
_TPU = WithoutEffect("only TPUs read it")
_ONE_MACHINE = "a launch runs on this machine, as it is"
_TPUS = "a launch has no TPU"
_SAGEMAKER = "a launch runs on this machine, not in SageMaker"
_SEVERAL_MACHINES = WithoutEffect("it chooses machines, and only where num_machines is 2 or more")
_NOTHING: tuple[Any, ...] = (None, "", False, "no", (), [], {})

ACCELERATE: Mapping[str, Key] = {
    "compute_environment": Fixed(_SAGEMAKER, ("LOCAL_MACHINE",)),
    "distributed_type": _STRATEGY,
    "mixed_precision": _TO_RANKS,
    "fp16": _TO_RANKS,  # how releases before 0.12 called mixed precision
    "debug": _TO_RANKS,
    "use_cpu": Passed("the device of the launch must be the CPU where it is set"),
    "num_processes": Passed("the number of ranks, unless the launch says another"),
    "num_machines": Fixed(_ONE_MACHINE, (None, 1)),
    "machine_rank": Fixed(_ONE_MACHINE, (None, 0)),
    "gpu_ids": Fixed("which devices ranks see is said by env={'CUDA_VISIBLE_DEVICES': ...}", (None, "all")),
    "main_process_ip": _MEETING,
    "main_process_port": _MEETING,
    "rdzv_backend": _MEETING,
    "rdzv_conf": _MEETING,
    "same_network": _MEETING,
    "main_training_function": _TPU,
    "enable_cpu_affinity": _TO_RANKS,
    "deepspeed_config": _STRATEGY,
    "fsdp_config": _STRATEGY,
    "dynamo_config": _TO_RANKS,
    "dynamo_backend": _TO_RANKS,  # the older form of dynamo_config
    "fp8_config": _TO_RANKS,
    "parallelism_config": _TO_RANKS,
    "tp_config": Fixed("tensor parallelism of Accelerate before 1.10 is no strategy of a launch", _NOTHING),
    "megatron_lm_config": Fixed("Megatron-LM is no strategy of a launch", _NOTHING),
    "ipex_config": Passed("becomes a variable of ranks on the CPU"),
    "mpirun_config": Passed("its host file is refused"),
    "downcast_bf16": _TPU,
    "tpu_name": Fixed(_TPUS, _NOTHING),
    "tpu_zone": Fixed(_TPUS, _NOTHING),
    "tpu_use_cluster": Fixed(_TPUS, _NOTHING),
    "tpu_use_sudo": Fixed(_TPUS, _NOTHING),
    "tpu_vm": Fixed(_TPUS, _NOTHING),
    "tpu_env": Fixed(_TPUS, _NOTHING),
    "command_file": Fixed(_TPUS, _NOTHING),
    "commands": Fixed(_TPUS, _NOTHING),
}
"""The keys of Accelerate's configuration files, of all releases: the fields of ``ClusterConfig``."""

SAGEMAKER_KEYS = (
    *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "pytorch_version"),
    *("transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args"),
)

_FSDP = (
    *("version", "offload_params", "min_num_params", "sharding_strategy", "reshard_after_forward", "auto_wrap_policy"),
    *("transformer_layer_cls_to_wrap", "backward_prefetch", "state_dict_type", "forward_prefetch", "use_orig_params"),
    *("cpu_ram_efficient_loading", "sync_module_states", "activation_checkpointing"),
    *("activation_checkpointing_offload", "ignored_modules"),
)
_DYNAMO = ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
_FP8 = (
    *("backend", "use_autocast_during_eval", "margin", "interval", "format", "amax_history_len", "amax_compute_algo"),
    *("override_linear_precision", "opt_level", "enable_fsdp_float8_all_gather", "pad_inner_dim"),
)
_PARALLEL = "a launch has no strategy with this dimension"

ACCELERATE_SECTIONS: Mapping[str, Mapping[str, Key]] = {
    "deepspeed_config": {
        "deepspeed_config_file": Passed("is looked for in the working directory of the ranks"),
        "zero_stage": _STRATEGY,
        "offload_optimizer_device": _TO_RANKS,
        "offload_param_device": _TO_RANKS,
        "offload_optimizer_nvme_path": Passed("Accelerate's launcher reads it and hands nothing on"),
        "offload_param_nvme_path": Passed("Accelerate's launcher reads it and hands nothing on"),
        "gradient_accumulation_steps": _TO_RANKS,
        "gradient_clipping": _TO_RANKS,
        "zero3_init_flag": _TO_RANKS,
        "zero3_save_16bit_model": _TO_RANKS,
        "deepspeed_moe_layer_cls_names": _TO_RANKS,
        "deepspeed_hostfile": _SEVERAL_MACHINES,
        "deepspeed_inclusion_filter": _SEVERAL_MACHINES,
        "deepspeed_exclusion_filter": _SEVERAL_MACHINES,
        "deepspeed_multinode_launcher": _SEVERAL_MACHINES,
    },
    "fsdp_config": {f"fsdp_{name}": _TO_RANKS for name in _FSDP},
    "dynamo_config": {f"dynamo_{name}": _TO_RANKS for name in _DYNAMO},
    "fp8_config": {f"fp8_{name}": _TO_RANKS for name in _FP8},
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": _TO_RANKS,
        "parallelism_config_dp_shard_size": _TO_RANKS,
        "parallelism_config_tp_size": Fixed(_PARALLEL, (1,)),
        "parallelism_config_cp_size": Fixed(_PARALLEL, (1,)),
        "parallelism_config_cp_backend": _TO_RANKS,
        "parallelism_config_cp_comm_strategy": _TO_RANKS,
        "parallelism_config_sp_size": Fixed(_PARALLEL, (1,)),
        "parallelism_config_sp_backend": _TO_RANKS,
        "parallelism_config_sp_seq_length": _TO_RANKS,
        "parallelism_config_sp_seq_length_is_variable": _TO_RANKS,
        "parallelism_config_sp_attn_implementation": _TO_RANKS,
    },
    "mpirun_config": {
        "mpirun_hostfile": Fixed("a launch starts its ranks itself, without MPI", _NOTHING),
        "mpirun_ccl": WithoutEffect("it is about MPI's workers"),
    },
    "ipex_config": {"ipex": _TO_RANKS, "use_xpu": WithoutEffect("Accelerate reads it only for XPUs")},
}
"""The keys of the sections of Accelerate's files; those of FSDP, Dynamo and FP8 also stand there without the prefix."""

_PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "fp8_config": "fp8_"}
_MEGATRON = (
    *("tp_degree", "use_custom_fsdp", "no_load_optim", "eod_mask_loss", "overlap_cpu_optimizer_d2h_h2d"),
    *("no_save_optim", "optimizer_cpu_offload", "use_precision_aware_optimizer", "decoder_last_pipeline_num_layers"),
    *("pp_degree", "num_micro_batches", "sequence_parallelism", "recompute_activations", "use_distributed_optimizer"),
    *("gradient_clipping", "recompute_granularity", "recompute_method", "recompute_num_layers", "attention_backend"),
    *("expert_model_parallel_size", "context_parallel_size", "attention_dropout", "hidden_dropout"),
    *("attention_softmax_in_fp32", "expert_tensor_parallel_size", "calculate_per_token_loss"),
    "use_rotary_position_embeddings",
)
_NOT_PYTHON = Refused("ranks are interpreters; give the script or -m MODULE")
_ELSEWHERE = Refused("the device of a launch is said by device=")

ACCELERATE_OPTIONS: Mapping[str, Key] = {
    "config_file": _STRATEGY,
    "use_deepspeed": _STRATEGY,
    "use_fsdp": _STRATEGY,
    "use_parallelism_config": _STRATEGY,
    "multi_gpu": _STRATEGY,
    "mixed_precision": _TO_RANKS,
    "debug": _TO_RANKS,
    "enable_cpu_affinity": _TO_RANKS,
    "num_processes": ACCELERATE["num_processes"],
    "module": Passed("says that the script is a module"),
    **{
        name: key
        for section in ("deepspeed_config", "fsdp_config", "dynamo_config", "fp8_config", "parallelism_config")
        for name, key in ACCELERATE_SECTIONS[section].items()
    },
    "num_machines": ACCELERATE["num_machines"],
    "machine_rank": ACCELERATE["machine_rank"],
    **dict.fromkeys(("main_process_ip", "main_process_port", "same_network", "rdzv_backend", "rdzv_conf"), _MEETING),
    **dict.fromkeys(("quiet", "tee", "log_dir", "role"), _LOGS),
    **dict.fromkeys(("max_restarts", "monitor_interval"), _RESTARTS),
    "num_cpu_threads_per_process": _THREADS,
    "main_training_function": _TPU,
    "downcast_bf16": _TPU,
    "gpu_ids": Refused("which devices ranks see is said by env={'CUDA_VISIBLE_DEVICES': ...}"),
    "no_python": _NOT_PYTHON,
    **dict.fromkeys(("cpu", "ipex", "use_xpu"), _ELSEWHERE),
    **dict.fromkeys(("tpu", "tpu_use_cluster", "tpu_use_sudo", "vm", "env"), Refused(_TPUS)),
    **dict.fromkeys(("use_tp", "tp_size"), Refused(ACCELERATE["tp_config"].reason)),
    "use_megatron_lm": Refused(ACCELERATE["megatron_lm_config"].reason),
    **{f"megatron_lm_{name}": Refused(ACCELERATE["megatron_lm_config"].reason) for name in _MEGATRON},
    **dict.fromkeys(("aws_access_key_id", "aws_secret_access_key"), Refused(_SAGEMAKER)),
    **dict.fromkeys(("mpirun_hostfile", "mpirun_ccl"), Refused("a launch starts its ranks itself, without MPI")),
}
"""The options of ``accelerate launch``, of all releases."""

TORCHRUN_OPTIONS: Mapping[str, Key] = {
    "nproc_per_node": ACCELERATE["num_processes"],
    "module": ACCELERATE_OPTIONS["module"],
    "nnodes": Fixed(_ONE_MACHINE, ("1", "1:1")),
    "node_rank": Fixed(_ONE_MACHINE, (0,)),
    **dict.fromkeys(("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"), _MEETING),
    **dict.fromkeys(("master_addr", "master_port", "local_addr"), _MEETING),
    **dict.fromkeys(("max_restarts", "monitor_interval", "start_method"), _RESTARTS),
    **dict.fromkeys(("role", "log_dir", "redirects", "tee"), _LOGS),
    "no_python": _NOT_PYTHON,
    "run_path": Refused("the script runs as __main__ in every launch; leave it out"),
    **dict.fromkeys(
        (
            *("local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters", "logs_specs"),
            *("event_log_handler", "numa_binding", "signals_to_handle", "shutdown_timeout", "virtual_local_rank"),
        ),
        Refused("the ranks are the launch's own"),
    ),
}
"""The options of ``torchrun``, of all releases."""

DEEPSPEED_OPTIONS: Mapping[str, Key] = {
    "num_gpus": ACCELERATE["num_processes"],
    "module": ACCELERATE_OPTIONS["module"],
    "no_local_rank": Passed("whether --local_rank stands before the program's arguments"),
    "num_nodes": Fixed(_ONE_MACHINE, (1,)),
    "node_rank": Fixed(_ONE_MACHINE, (0,)),
    **dict.fromkeys(("master_port", "master_addr", "no_ssh_check"), _MEETING),
    "hostfile": Refused(_ONE_MACHINE),
    **dict.fromkeys(("log_level", "quiet"), _LOGS),
    "no_python": _NOT_PYTHON,
    **dict.fromkeys(
        (
            *("include", "exclude", "launcher", "launcher_args", "no_ssh", "force_multi", "save_pid", "ssh_port"),
            *("enable_each_rank_log", "autotuning", "bind_cores_to_rank", "bind_core_list", "venv_script"),
            *("elastic_training", "min_elastic_nodes", "max_elastic_nodes"),
        ),
        Refused("the ranks are the launch's own"),
    ),
}
"""The options of the ``deepspeed`` launcher, of all releases."""

_ENGINE = Passed("DeepSpeed's engine reads it")
_MONITOR = Passed("DeepSpeed writes to it from the ranks")
DEEPSPEED: Mapping[str, Key] = {
    **dict.fromkeys(
        (
            *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print"),
            *("gradient_clipping", "gradient_predivide_factor", "gradient_allreduce_op", "prescale_gradients"),
            *("managed_gradient_accumulation", "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "amp"),
            *("torch_autocast", "data_types", "communication_data_type", "seq_parallel_communication_data_type"),
            *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
            *("sparse_gradients", "disable_allgather", "activation_checkpointing", "checkpoint", "compile", "aio"),
            *("compression_training", "curriculum_learning", "data_efficiency", "progressive_layer_drop"),
            *("quantize_training", "weight_quantization", "sparse_attention", "eigenvalue", "hybrid_engine"),
            *("graph_harvesting", "pipeline", "tensor_parallel", "expert_parallel", "sequence_parallel_size"),
            *("data_parallel_size", "use_data_before_expert_parallelism", "dataloader_drop_last", "vocabulary_size"),
            *("disable_python_gc", "dump_state", "memory_breakdown", "wall_clock_breakdown", "timers", "log_level"),
            *("comms_logger", "flops_profiler", "nebula", "datastates_ckpt", "msamp"),
        ),
        _ENGINE,
    ),
    **dict.fromkeys(("tensorboard", "wandb", "comet", "csv_monitor"), _MONITOR),
    "autotuning": Passed("only where it is not enabled: DeepSpeed's launcher would start other launches"),
    "elasticity": Passed("only where it is not enabled: DeepSpeed's launcher would choose the number of ranks"),
}
"""The top-level keys of DeepSpeed's configuration, of all releases."""

_STAGE3 = (
    *("allgather_sequential", "gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save"),
    *("max_live_parameters", "max_reuse_distance", "model_persistence_threshold", "module_granularity_threshold"),
    *("param_persistence_threshold", "prefetch_bucket_size", "use_all_reduce_for_fetch_params"),
)
_ZERO = (
    *("stage", "allgather_bucket_size", "allgather_partitions", "compute_grad_norm", "contiguous_gradients"),
    *("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "elastic_checkpoint", "enable_sanity_checks"),
    *("ignore_unused_parameters", "leaf_module", "legacy_stage1", "load_from_fp32_weights"),
    *("log_trace_cache_warnings", "memory_efficient_linear", "mics_hierarchical_params_gather", "mics_shard_size"),
    *("offload_optimizer", "offload_param", "overlap_comm", "override_module_apply", "parameter_alignment"),
    *("pipeline_loading_checkpoint", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients"),
    *("save_muon_momentum_buffer_in_memory", "sub_group_size", "use_multi_rank_bucket_allreduce", "zenflow"),
    *("zero_hpz_partition_size", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
    *("zero_quantized_weights", "zeropp_loco_param"),
    *_STAGE3,
    *(f"stage3_{name}" for name in _STAGE3),
)
_FP16 = (
    *("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
    *("consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"),
)
_BF16 = (
    *("enabled", "immediate_grad_update", "bf16_master_weights_and_grads", "bf16_optimizer_states"),
    "check_grad_overflow",
)
DEEPSPEED_SECTIONS: Mapping[str, Mapping[str, Key]] = {
    "zero_optimization": dict.fromkeys(_ZERO, _ENGINE),
    "fp16": dict.fromkeys(_FP16, _ENGINE),
    "bf16": dict.fromkeys(_BF16, _ENGINE),
    "bfloat16": dict.fromkeys(_BF16, _ENGINE),
    "data_types": {"grad_accum_dtype": _ENGINE},
    "optimizer": dict.fromkeys(("type", "params", "legacy_fusion"), _ENGINE),
    "scheduler": dict.fromkeys(("type", "params"), _ENGINE),
    "activation_checkpointing": dict.fromkeys(
        (
            *("partition_activations", "number_checkpoints", "contiguous_memory_optimization", "profile"),
            *("synchronize_checkpoint_boundary", "cpu_checkpointing"),
        ),
        _ENGINE,
    ),
}
"""The keys of those of DeepSpeed's sections in which some releases pass by what they do not know, without a word."""


def section_key(section: str, name: str) -> str:
    """The full name of a key in a section of Accelerate's file, where it may stand without its prefix."""
    prefix = _PREFIXES.get(section, "")
    return name if name.startswith(prefix) else prefix + name


def problem_of(known: Mapping[str, Key], name: str, value: Any) -> str | None:
    """Why a setting cannot be honoured, as it follows its name and value; ``None`` where it can."""
    key = known.get(name)
    if key is None:
        return f"nobody reads it{_nearest(name, known)}"
    if isinstance(key, Refused) or (isinstance(key, Fixed) and not _is_among(value, key.values)):
        return key.reason
    return None


def _is_among(value: Any, values: Iterable[Any]) -> bool:
    return any(str(value).lower() == str(allowed).lower() for allowed in values)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def problems_of_accelerate(config: Mapping[str, Any]) -> Iterator[str]:
    """What of an Accelerate configuration file cannot be honoured, each as ``key: value: reason``."""
    if str(config.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        yield f"compute_environment: {config['compute_environment']}: {_SAGEMAKER}"
        # Such a file has other keys altogether, and each would be refused for the same reason.
        return
    for name, value in config.items():
        reason = _SAGEMAKER if name in SAGEMAKER_KEYS else problem_of(ACCELERATE, name, value)
        if reason is not None:
            yield f"{name}: {value}: {reason}"
        elif name in ACCELERATE_SECTIONS and value is not None:
            if not isinstance(value, Mapping):
                yield f"{name}: {value}: it must be a mapping, as `accelerate config` writes it"
                continue
            known = ACCELERATE_SECTIONS[name]
            for inner, setting in value.items():
                reason = problem_of(known, section_key(name, str(inner)), setting)
                if reason is not None:
                    yield f"{inner}: {setting} in {name}: {reason}"


def problems_of_deepspeed(config: Mapping[str, Any]) -> Iterator[str]:
    """What of a DeepSpeed configuration cannot be honoured, each as ``key: reason``."""
    for name, value in config.items():
        reason = problem_of(DEEPSPEED, name, value)
        if reason is not None:
            yield f"{name}: {reason}"
        elif name in ("autotuning", "elasticity") and isinstance(value, Mapping) and value.get("enabled"):
            yield f"{name}: {DEEPSPEED[name].reason.partition(': ')[2]}, and a launch has its own"
        elif name in DEEPSPEED_SECTIONS and isinstance(value, Mapping):
            for inner, setting in value.items():
                reason = problem_of(DEEPSPEED_SECTIONS[name], str(inner), setting)
                if reason is not None:
                    yield f"{name}.{inner}: {reason}"
