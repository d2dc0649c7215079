"""Cures of trainings under DeepSpeed."""
