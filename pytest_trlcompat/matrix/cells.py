"""Cells, the points of the version matrix, and the settings that they share."""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from packaging.version import Version

from pytest_trlcompat.inference.recording_engine import released
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.stack import PACKAGES, distributions_of

__all__ = [
    "ADDED_TAGS",
    "DATED_TAG",
    "DEFAULT_TAG",
    "FULL_TAG",
    "ORDER",
    "PAIRS_TAG",
    "PAIRWISE_TAG",
    "PINNED",
    "Cell",
    "Excluded",
    "Matrix",
    "age",
    "check_python",
]

DEFAULT_TAG = "default"
"""Cells with this tag are swept by a plain ``nox -s matrix``."""

FULL_TAG = "full"
"""Cells with this tag are swept by ``nox -s matrix -- --full``."""

DATED_TAG = "dated"
"""Cells with this tag are swept by ``nox -s matrix -- --torch dated``, in addition to the default ones."""

PAIRWISE_TAG = "pairwise"
"""Cells with this tag are swept by ``nox -s matrix -- --pairwise``."""

PAIRS_TAG = "pairs"
"""Cells with this tag are swept by ``nox -s matrix -- --pairwise-strength 2`` as well. The repository keeps no locks
of them."""

ADDED_TAGS = ("vllm", "liger", "images")
"""A cell with one of these tags has the package that it names (``images``: Pillow) in addition to the stack.
``nox -s matrix -- --vllm``, ``--liger`` or ``--images`` sweeps them, with the tests of that marker alone."""

_CUDA_ALONE = ("vllm",)
"""Distributions that are built for CUDA alone. A cell pins the one for CPUs of the same package."""
_SHORT = {"trl": "trl", "transformers": "tf"}
PINNED = tuple(name for package in PACKAGES for name in distributions_of(package) if name not in _CUDA_ALONE)
"""What a cell may pin: the distributions of the stack's packages."""
# A cell's id has its pins in this order, so that one combination has one id, however a person writes it.
ORDER = ("trl", "transformers", *(name for name in PINNED if name not in ("trl", "transformers")))


@dataclass(frozen=True)
class Cell:
    """One combination of versions, by the few pins that a person writes down.

    Attributes:
        pins: package to version, in the order of the cell's id, without the default pins.
        date: the day as of which the cell is resolved; ``None``: from the release date of its newest pin.
        python: the interpreter, as uv understands it (``3.12``); ``None``: the one of the matrix.
    """

    pins: Mapping[str, str]
    date: datetime.date | None = None
    tags: tuple[str, ...] = ()
    why: str = ""
    python: str | None = None

    @property
    def id(self) -> str:
        """``trl0.15.2-tf4.48.3``, other pins appended by their full names (``-accelerate1.3.0``), last ``-py3.12``."""
        parts = [f"{_SHORT.get(package, package)}{version}" for package, version in self.pins.items()]
        return "-".join([*parts, *([f"py{self.python}"] if self.python else [])])


@dataclass(frozen=True)
class Excluded:
    """A combination that no covering array chooses, though it may be installed.

    Attributes:
        when: package to the range of versions that is meant.
    """

    when: Mapping[str, str]
    why: str


@dataclass(frozen=True)
class Matrix:
    """The cells, and the settings that they share.

    Attributes:
        python: the interpreter of every cell that names no other, as uv understands it (``3.11``).
        pins: pins that a cell has unless it names another version (torch).
        stack: packages of the stack that every cell gets; one that is not pinned, at its version on the cell's date.
        harness: requirements of the plugin and of building packages, which are not part of the stack.
        undated: packages that are taken in their current version: torch, and build requirements.
        settle_days: a cell without a date is resolved as of this many days after the release of its newest pin.
        not_before: dependencies of the undated packages, and the days as of which older cells take them.
        torch: releases of torch that the harness supports, oldest first, and the days when the index got them.
        excluded: combinations that no covering array chooses.
        left_out: by a distribution that a cell pins, the requirements of it that are not installed.
        needed: by a distribution that a cell pins, the requirements of it that no other cell has.
        beside: by a distribution that a cell pins, further requirements of that cell.
    """

    python: str
    pins: Mapping[str, str]
    stack: tuple[str, ...]
    harness: tuple[str, ...]
    undated: tuple[str, ...]
    settle_days: int
    not_before: Mapping[str, datetime.date] = field(default_factory=dict)
    cells: tuple[Cell, ...] = field(default=())
    torch: Mapping[str, datetime.date] = field(default_factory=dict)
    excluded: tuple[Excluded, ...] = ()
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def default(self) -> tuple[Cell, ...]:
        """The cells of a plain ``nox -s matrix``: few, and the most informative."""
        return self._tagged(DEFAULT_TAG)

    def full(self) -> tuple[Cell, ...]:
        """The cells of a full sweep, oldest first."""
        return tuple(sorted(self._tagged(FULL_TAG), key=age))

    def tagged_dated(self) -> tuple[Cell, ...]:
        """The cells of ``--torch dated`` other than the default ones, each for one release of torch."""
        return self._tagged(DATED_TAG)

    def with_added(self, tag: str) -> tuple[Cell, ...]:
        """Those with one of :data:`ADDED_TAGS`, oldest first."""
        return tuple(sorted(self._tagged(tag), key=age))

    def pairwise(self, strength: int) -> tuple[Cell, ...]:
        """The cells that covering arrays have chosen: of strength 1 for each release, of strength 2 for each pair."""
        return tuple(
            cell for cell in self.cells if {PAIRWISE_TAG, *([PAIRS_TAG] if strength > 1 else [])} & {*cell.tags}
        )

    def cell(self, cell_id: str) -> Cell:
        """The cell of this id.

        Raises:
            MatrixError: when there is none.
        """
        for cell in self.cells:
            if cell.id == cell_id:
                return cell
        near = difflib.get_close_matches(cell_id, [cell.id for cell in self.cells], n=4, cutoff=0.3)
        raise MatrixError(
            f"no cell {cell_id!r} in the matrix"
            + (f"; similar ones are: {', '.join(near)}" if near else "")
            + "; nox -l -- --full lists all, and nox -s cell -- trl=VERSION transformers=VERSION runs any combination"
        )

    def _tagged(self, tag: str) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if tag in cell.tags)

    def all_pins(self, cell: Cell) -> dict[str, str]:
        """The cell's pins, and the default ones of packages that it does not pin."""
        return {**cell.pins, **{name: version for name, version in self.pins.items() if name not in cell.pins}}

    def left_out_of(self, cell: Cell) -> tuple[str, ...]:
        """Distributions that are not installed in this cell, unless it pins them, though some package requires them."""
        return tuple(
            name
            for pinned, names in self.left_out.items()
            if pinned in cell.pins
            for name in names
            if name not in cell.pins
        )

    def needed_of(self, cell: Cell) -> tuple[str, ...]:
        """Distributions that are installed in this cell if something requires them, and in other cells never."""
        return tuple(name for pinned, names in self.needed.items() if pinned in cell.pins for name in names)

    def python_of(self, cell: Cell) -> str:
        """The interpreter of the cell's environment."""
        return cell.python or self.python

    def on_python(self, cell: Cell, python: str) -> Cell:
        """The cell on another interpreter; ``python`` stays ``None`` if that is the matrix's.

        Raises:
            MatrixError: for a text that is not a version of Python.
        """
        return replace(cell, python=None if python == self.python else check_python(python, "a cell's"))

    def requirements(self, cell: Cell) -> list[str]:
        """The requirements for the resolver: without the recording engine, which is part of this project."""
        pins = released(self.all_pins(cell))
        free = [package for package in self.stack if package not in pins]
        beside = [text for pinned, texts in self.beside.items() if pinned in cell.pins for text in texts]
        return [*(f"{name}=={version}" for name, version in sorted(pins.items())), *free, *self.harness, *beside]


def age(cell: Cell) -> tuple[Version, ...]:
    """A sort key: the versions of the pins, that of TRL first."""
    # Every key names all packages, or the version of one would be compared with that of another.
    return tuple(Version(cell.pins.get(package, "0")) for package in ORDER)


def check_python(text: str, whose: str) -> str:
    """``text``, if it is a version of Python.

    Raises:
        MatrixError: if it is not.
    """
    parts = text.split(".")
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
        raise MatrixError(f"malformed {whose} python {text!r}; write for example '3.11'")
    return text
