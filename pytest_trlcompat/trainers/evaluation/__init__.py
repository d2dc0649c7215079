"""Cures of what an evaluation computes and counts."""
