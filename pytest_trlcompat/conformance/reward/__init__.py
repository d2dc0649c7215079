"""Reward models held against the reference: their rows of settings, and what documentation leaves open."""
