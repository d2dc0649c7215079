"""Cures of trainings under FSDP1 and FSDP2."""
