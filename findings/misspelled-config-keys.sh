#!/usr/bin/env bash
# Accelerate and DeepSpeed guard opposite ends of a config file against misspelled keys.
#
# What surprises: Accelerate refuses an unknown key at the top of its YAML by name, and passes over one inside
# `fsdp_config`: `fsdp_versoin: 2` trains under FSDP1, without a word. DeepSpeed refuses an unknown key inside
# `zero_optimization`, `bf16` and `fp16`, and passes over one at the top, and inside `optimizer`, `data_types`,
# `activation_checkpointing` and `flops_profiler`: a section named `zero_optimisation` trains at stage 0. So neither
# file is safe by the other's experience, and a file for both (`deepspeed_config_file` in Accelerate's) has a hole at
# each end.
#
# Versions: accelerate 1.15.0, deepspeed 0.19.8, torch 2.13.0, on Python 3.11.
# Output seen (2026-11-27): the lines of `expected` below. The script fails if any of them changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
# DeepSpeed has no wheel for Linux: its setup.py imports torch, so that torch comes first.
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 setuptools wheel numpy
DS_BUILD_OPS=0 "$folder/venv/bin/python" -m pip install --quiet --no-build-isolation accelerate==1.15.0 deepspeed==0.19.8
cd "$folder"

printf '%s\n' 'compute_environment: LOCAL_MACHINE' 'distributed_type: FSDP' 'num_processes: 2' 'use_cpu: true' > top.yaml
cp top.yaml nested.yaml
echo 'num_proceses: 2' >> top.yaml
printf '%s\n' 'fsdp_config:' '  fsdp_versoin: 2' >> nested.yaml

cat > look.py <<'PYTHON'
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

try:
    load_config_from_file("top.yaml")
    print("accelerate, top: accepted")
except ValueError as error:
    print("accelerate, top: refused,", "num_proceses" in str(error))
arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", "nested.yaml", "x.py"]))
print("accelerate, nested: accepted, FSDP", prepare_multi_gpu_env(arguments)["FSDP_VERSION"])

from deepspeed.runtime.config import DeepSpeedConfig

for name, section in (
    ("top, zero_optimisation", {"zero_optimisation": {"stage": 3}}),
    ("top, gradient_cliping", {"gradient_cliping": 0.5}),
    ("optimizer.typ", {"optimizer": {"typ": "AdamW"}}),
    ("data_types.grad_accum_dtyp", {"data_types": {"grad_accum_dtyp": "fp32"}}),
    ("activation_checkpointing.partition_activation", {"activation_checkpointing": {"partition_activation": True}}),
    ("flops_profiler.enable", {"flops_profiler": {"enable": True}}),
    ("zero_optimization.contigous_gradients", {"zero_optimization": {"stage": 3, "contigous_gradients": True}}),
    ("bf16.enable", {"bf16": {"enable": True}}),
    ("fp16.enabeld", {"fp16": {"enabeld": True}}),
):
    try:
        config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **section})
        print(f"deepspeed, {name}: accepted, stage {config.zero_optimization_stage}")
    except Exception as error:
        print(f"deepspeed, {name}: refused by {type(error).__name__}")
PYTHON

cat > expected <<'TEXT'
accelerate, top: refused, True
accelerate, nested: accepted, FSDP 1
deepspeed, top, zero_optimisation: accepted, stage 0
deepspeed, top, gradient_cliping: accepted, stage 0
deepspeed, optimizer.typ: accepted, stage 0
deepspeed, data_types.grad_accum_dtyp: accepted, stage 0
deepspeed, activation_checkpointing.partition_activation: accepted, stage 0
deepspeed, flops_profiler.enable: accepted, stage 0
deepspeed, zero_optimization.contigous_gradients: refused by ValidationError
deepspeed, bf16.enable: refused by ValidationError
deepspeed, fp16.enabeld: refused by ValidationError
TEXT

env RANK=0 WORLD_SIZE=1 "$folder/venv/bin/python" look.py 2> errors | grep -E '^(accelerate|deepspeed), ' > seen || { cat errors; exit 1; }
cat seen
diff expected seen && echo "as it was"
