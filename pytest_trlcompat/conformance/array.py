"""Make the rows of a covering array: every two values of a ``space.toml`` stand together in some row; ``nox -s rows``.

It rewrites each trainer's ``rows.toml``: first the rows that people wrote, with each value alone, then the rows of the
array. The same space gives the same rows. ``covertable`` is needed to make rows, not to try them. It takes exclusions
as conditions; ``allpairspy``, which can only refuse rows that it has begun, left out 47 of 2,263 pairs here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from pytest_trlcompat.conformance.rows import OF_ARRAY, TRAINERS

__all__ = ["MADE", "Space", "covered_pairs", "main", "spaces", "with_made_rows"]

MADE = "# Made by pytest_trlcompat.conformance.array; what stands below is overwritten.\n"
"""The line between rows that people write and rows of the array."""


@dataclass(frozen=True)
class Space:
    """
    Attributes:
        factors: values by name; the first of each stands for the default; an empty text: the name is left out.
        never: combinations of values that exclude each other.
        also: by ``name=value``, further values that are set with it.
    """

    factors: Mapping[str, Sequence[Any]]
    never: Sequence[Mapping[str, Any]]
    also: Mapping[str, Mapping[str, Any]]

    def is_possible(self, values: Mapping[str, Any]) -> bool:
        """Whether values of some or all factors contain no combination that is excluded."""
        return not any(
            all(name in values and _same(values[name], value) for name, value in excluded.items())
            for excluded in self.never
        )

    def setting(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The row for one value of each factor; an empty text is left out."""
        row = {name: value for name, value in values.items() if value != ""}
        for name, value in values.items():
            row |= self.also.get(f"{name}={value}", {})
        return row

    def pairs(self) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
        """Every two values of different factors that may stand together."""
        for factor, other in itertools.combinations(self.factors, 2):
            for first, second in itertools.product(self.factors[factor], self.factors[other]):
                if self.is_possible({factor: first, other: second}):
                    yield (factor, first), (other, second)

    def rows(self, strength: int = 2) -> list[dict[str, Any]]:
        """Rows in which every ``strength`` values stand together that may."""
        import covertable

        never = [_not_together(values) for values in self.never]
        rows: list[dict[str, Any]] = covertable.make(
            {name: list(values) for name, values in self.factors.items()}, strength=strength, constraints=never
        )
        return [{name: row[name] for name in self.factors} for row in rows]


def _not_together(values: Mapping[str, Any]) -> dict[str, Any]:
    """Excluded values as a condition of ``covertable``."""
    conditions = [{"operator": "eq", "left": name, "value": value} for name, value in values.items()]
    return {"operator": "not", "condition": {"operator": "and", "conditions": conditions}}


def _same(value: Any, other: Any) -> bool:
    # In Python True equals 1, and a space may have both.
    return type(value) is type(other) and bool(value == other)


def spaces(trainer: str) -> Mapping[str, Space]:
    """The spaces by the prefix of the names of their rows: ``pair``, in one process; ``ranks``, with several."""
    raw = tomllib.loads(Path(__file__).with_name(trainer).joinpath("space.toml").read_text(encoding="utf-8"))
    return {
        prefix: Space(part["factors"], [entry["values"] for entry in part.get("never", [])], part.get("also", {}))
        for prefix, part in raw.items()
    }


def covered_pairs(factors: Mapping[str, Sequence[Any]], rows: Sequence[Mapping[str, Any]]) -> set[Any]:
    """The pairs of values that stand together in rows; a factor that a row leaves out has its first value."""
    pairs = set()
    for row in rows:
        values = [(name, json.dumps(row.get(name, known[0]))) for name, known in factors.items()]
        pairs |= set(itertools.combinations(values, 2))
    return pairs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pytest_trlcompat.conformance.array", description=__doc__)
    parser.add_argument("--strength", type=int, default=2, help="values that stand together (2)")
    chosen = parser.parse_args(arguments)
    for trainer in TRAINERS:
        path = Path(__file__).with_name(trainer) / "rows.toml"
        lines = []
        for prefix, known in spaces(trainer).items():
            rows = [known.setting(row) for row in known.rows(chosen.strength)]
            lines += [f"{prefix}_{number:02} = {_toml(row)}" for number, row in enumerate(rows, 1)]
            print(f"{trainer}: {len(rows)} rows named {prefix} hold {len(list(known.pairs()))} pairs of values")
        path.write_text(with_made_rows(path.read_text(encoding="utf-8"), lines), encoding="utf-8")
    return 0


def with_made_rows(text: str, lines: Sequence[str]) -> str:
    """The text of a ``rows.toml`` with these rows behind those that people wrote.

    Raises:
        ValueError: something that people wrote stands behind the line from which on everything is made.
    """
    written, _, generated = text.partition(MADE)
    other = [line for line in generated.splitlines() if line.strip() and not OF_ARRAY.match(line)]
    if other:
        raise ValueError(
            f"{len(other)} lines stand below {MADE.strip()!r} and are no rows of the array, first {other[0]!r}; "
            "move them above it, or they would be lost"
        )
    return "\n".join([written.rstrip("\n"), "", MADE + "\n".join(lines)]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(entry)}" for name, entry in value.items()) + " }"
    return json.dumps(value)


if __name__ == "__main__":
    raise SystemExit(main())
