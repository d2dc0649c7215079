"""Files of settings as JSON or YAML gives them; imports PyYAML where a file is YAML, otherwise the standard library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_trlcompat.training.errors import TrainingError

__all__ = ["MOST", "read_mapping", "scalar", "text_of"]

MOST = 1 << 20
"""Bytes of a file of settings that are read; none of a real project comes near."""
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None, "null": None}


def text_of(path: Path) -> str:
    """
    Raises:
        TrainingError: a file that is not there, no regular one, too large, or no text.
    """
    try:
        if not path.is_file():
            raise TrainingError(f"{path}: a file of settings was expected, there is no such file; give its path")
        with path.open("rb") as file:
            data = file.read(MOST + 1)
        if len(data) > MOST:
            raise TrainingError(f"{path}: a file of settings was expected, this one has more than {MOST} bytes")
        return data.decode("utf-8-sig")
    except TrainingError:
        raise
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: a file of settings was expected, it cannot be read: {error}") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """What a file of JSON or YAML has, by key. YAML is loaded safely: it makes no objects.

    Raises:
        TrainingError: as :func:`text_of`; neither JSON nor YAML, no keys and values, or YAML without PyYAML.
    """
    text = text_of(path)
    if path.suffix == ".json":
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TrainingError(f"{path}: JSON was expected: {error}; correct it, or give another file") from error
    else:
        document = _yaml(text, path)
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        found = "nothing" if document is None else f"a {type(document).__name__}"
        raise TrainingError(f"{path}: names and values were expected, {found} was found; is this the right file?")
    return document


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise TrainingError(
            f"{path}: to read YAML takes PyYAML, which is not installed here; install it (the project's extra "
            "training), or give the file as JSON"
        ) from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # where libyaml is there, in a tenth of the time
    try:
        # A few aliases make a document of gigabytes.
        if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, loader)):
            raise TrainingError(f"{path}: YAML with aliases (&name, *name) is not read; write the values out")
        return yaml.load(text, loader)  # noqa: S506 - either loader is a safe one
    except TrainingError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Its text repeats the line, which may have a token.
        reason, mark = getattr(error, "problem", None) or "it cannot be read", getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise TrainingError(f"{path}: YAML was expected: {reason}{where}; correct it, or give another file") from error


def scalar(text: Any) -> Any:
    """A word of a command line, or a text of YAML that is a number to the command line (``1e-5``), as its value."""
    if not isinstance(text, str):
        return text
    if text.casefold() in _WORDS:
        return _WORDS[text.casefold()]
    if text[:1] in "[{":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    for number in (int, float):
        try:
            return number(text) if "_" not in text and text.casefold() not in ("nan", "inf", "infinity") else text
        except ValueError:
            continue
    return text
