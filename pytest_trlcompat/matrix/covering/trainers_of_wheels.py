"""Writes which trainers each release of TRL has, from the sources in wheels, which are read and never imported.

pip download --no-deps -d WHEELS trl==1.16.0 ...
python -m pytest_trlcompat.matrix.covering.trainers_of_wheels WHEELS/*.whl
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_trlcompat.training.axes import CLASSES
from pytest_trlcompat.training.trl_trainers import FILE, Span, key_of

__all__ = ["classes_of", "main", "spans"]

_PACKAGES = ("trl/trainer/", "trl/experimental/")
"""The first of them counts where a release has a class in both, for those that still import the old name."""


def classes_of(wheel: Path) -> tuple[str, dict[str, str]]:
    """The release that a wheel has, and the package of each class whose name is a trainer's."""
    release = wheel.name.split("-")[1]
    found: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        for package in _PACKAGES:
            for name in sorted(archive.namelist()):
                if name.startswith(package) and name.endswith(".py"):
                    for node in ast.walk(ast.parse(archive.read(name))):
                        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                            found.setdefault(node.name, package.rstrip("/").replace("/", "."))
    return release, found


def spans(found: Mapping[str, Mapping[str, str]]) -> dict[str, list[Span]]:
    """By trainer where it is: of releases, each with the packages of its classes by their names."""
    releases = sorted(found, key=key_of)
    by_trainer: dict[str, list[Span]] = {}
    for name, trainer in CLASSES.items():
        here: list[Span] = []
        for number, release in enumerate(releases):
            package = found[release].get(name, "")
            after = releases[number + 1] if number + 1 < len(releases) else ""
            if package and here and here[-1].left == release and here[-1].package == package:
                here[-1] = here[-1]._replace(until=release if after else "", left=after)
            elif package:
                here.append(Span(name, package, release, release if after else "", after))
        if here:
            by_trainer[trainer] = sorted([*by_trainer.get(trainer, []), *here], key=lambda span: key_of(span.since))
    return dict(sorted(by_trainer.items()))


def main(wheels: Sequence[str]) -> int:
    """Write the table, and return the exit status."""
    found = dict(classes_of(Path(wheel)) for wheel in wheels)
    lines = [f"{json.dumps(trainer)}: {json.dumps(places)}" for trainer, places in spans(found).items()]
    releases = json.dumps(sorted(found, key=key_of))
    table = ",\n".join(lines)
    FILE.write_text(f'{{"releases": {releases},\n"trainers": {{\n{table}\n}}}}\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
