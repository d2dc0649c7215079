"""Cures of trainings with adapters; those for FSDP or DeepSpeed alone are in the rooms of these."""
