"""Conformance: trainings over the whole space of settings, held against the independent reference."""
