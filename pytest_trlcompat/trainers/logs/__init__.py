"""Cures of what a training logs."""
