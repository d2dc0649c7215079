"""What the sessions of nox ask of the engine's driver, in a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.engines.options import RayOptions
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.parsing import parse_day

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """A sweep, or a part of one.

    Attributes:
        sweep: the name of the command.
        requirements: of what runs a cell on a node.
        tests: by a cell's id, which tests of the suites run in it, as pytest's ``-m`` says it; those left out run all.
    """

    root: Path
    sweep: str
    cells: tuple[Cell, ...]
    options: RayOptions
    issues: tuple[str, ...] = ()
    fresh: bool = False
    pytest_arguments: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    tests: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        raw = dataclasses.asdict(self)
        return json.dumps(raw, default=str)

    @classmethod
    def from_json(cls, text: str) -> Request:
        """
        Raises:
            MatrixError: it was written by another release.
        """
        try:
            raw: dict[str, Any] = json.loads(text)
            cells = tuple(
                Cell(
                    cell["pins"],
                    parse_day(cell["date"]) if cell["date"] else None,
                    tuple(cell["tags"]),
                    cell["why"],
                    cell["python"],
                )
                for cell in raw.pop("cells")
            )
            options = RayOptions(**raw.pop("options"))
            texts = {name: tuple(raw.pop(name)) for name in ("issues", "pytest_arguments", "requirements")}
            return cls(Path(raw["root"]), raw["sweep"], cells, options, fresh=raw["fresh"], tests=raw["tests"], **texts)
        except (KeyError, TypeError, ValueError) as error:
            raise MatrixError(f"the request of the engine is damaged: {error!r}") from error
