"""Cures of trainings that generate with vLLM."""
