"""Distillation's room: :class:`~pytest_trlcompat.conformance.distillation.room.DistillationRoom`, its rows, and what
TRL does where documentation leaves it open."""
