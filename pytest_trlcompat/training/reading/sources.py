"""Whatever a user names as their training: a file, a folder, or a command. Imports the standard library alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytest_trlcompat.training.axes import PARTS
from pytest_trlcompat.training.errors import TrainingError
from pytest_trlcompat.training.reading.checkpoints import of_folder
from pytest_trlcompat.training.reading.commands import of_command
from pytest_trlcompat.training.reading.configs import of_settings
from pytest_trlcompat.training.reading.engines import is_accelerate, is_deepspeed, of_accelerate, of_deepspeed
from pytest_trlcompat.training.reading.files import read_mapping
from pytest_trlcompat.training.training import Training, joined

__all__ = ["read_training"]


def read_training(sources: Sequence[str], folder: Path | None = None, trainer: str = "") -> Training:
    """One training of files, folders and commands; the last that says something about an axis counts.

    Args:
        folder: from which paths count; the current one by default.
        trainer: who trains, where the user says it; it wins over what sources say.

    Raises:
        TrainingError: a source that is none of these, or that cannot be read; or there is none.
    """
    if not sources:
        raise TrainingError("a file, a folder or a command of a training was expected, there is none; name one")
    training = joined([_one(source, folder) for source in sources])
    if not trainer:
        return training
    return Training(trainer, training.values, training.whole, training.source, training.notes)


def _one(source: str, folder: Path | None) -> Training:
    path = (folder or Path()) / source
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):  # a command is no name of a file
        is_folder = is_file = False
    if is_folder:
        return of_folder(path)
    # A command may end with the name of such a file, too, and then has spaces.
    if is_file or (source.endswith((".yaml", ".yml", ".json")) and " " not in source.strip()):
        return _of_file(path, source, folder)
    if not source.strip():
        raise TrainingError("a file, a folder or a command was expected, an empty text was found; name one")
    return of_command(source, folder)


def _of_file(path: Path, source: str, folder: Path | None) -> Training:
    document = read_mapping(path)
    if {"schema", "trainer"} <= document.keys() and set(PARTS) & document.keys():
        return Training.from_dict(document)
    if is_accelerate(document):
        return of_accelerate(document, source, folder)
    if is_deepspeed(document):
        return of_deepspeed(document, source)
    return of_settings(document, source, folder)
