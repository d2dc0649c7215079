"""Cures of how a loss is scaled, normalised and summed over micro-batches."""
