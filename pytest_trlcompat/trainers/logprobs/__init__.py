"""Cures of logits and log-probabilities: which are computed, of which positions, in which precision."""
