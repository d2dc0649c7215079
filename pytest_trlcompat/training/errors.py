"""The one error of this package; imports nothing."""

__all__ = ["TrainingError"]


class TrainingError(ValueError):
    """What was to be read is no training; the text says what was asked, what was found, and what to do."""
