"""Cures of resuming from a checkpoint."""
