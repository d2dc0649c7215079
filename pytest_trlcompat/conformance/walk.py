"""Compare the table of config fields with the sources of many releases; ``nox -s fields`` unpacks them and runs this.

    python -m pytest_trlcompat.conformance.walk FOLDER ...

A folder contains unpacked releases, such as ``trl==1.16.0``. They are read, not imported: a field is an annotated name
in the body of a class, or of a class that it derives from. A base class that cannot be found is an error, since its
fields would be missed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from pytest_trlcompat.conformance.field_records import KINDS
from pytest_trlcompat.conformance.fields import SHARED, TRAINERS, Fields, load, trainer_of

__all__ = ["ConfigClass", "WalkError", "config_classes", "main", "problems", "summary"]

_ABOUT = "Compare the table of config fields with unpacked releases of trl and transformers."
_OWN = ("GRPOConfig", "DistillationConfig", "PPOConfig", "PPOv2Config", "RLOOConfig")
_STABLE = ("DistillationConfig",)
"""Classes whose namesake in ``trl.experimental`` belongs to another trainer."""
_OF_NEWER_RLOO = "num_generations"
"""A field that only the newer trainer's RLOOConfig has, which the table leaves out; 0.22 keeps the legacy one too."""
_COMMON = "TrainingArguments"


class WalkError(ValueError):
    """A release cannot be read; the text says where, and what was looked for."""


@dataclass(frozen=True)
class ConfigClass:
    """A config class of a release.

    Attributes:
        release: as in ``trl==1.16.0``.
        where: module and name, as in ``trl.trainer.grpo_config:GRPOConfig``.
        trainers: whose config it is.
        fields: with those of its bases, but for the ones of ``transformers.TrainingArguments``.
    """

    release: str
    where: str
    trainers: tuple[str, ...]
    fields: tuple[str, ...]


@dataclass(frozen=True)
class _Class:
    path: Path
    node: ast.ClassDef


def config_classes(release: Path) -> list[ConfigClass]:
    """The config classes of an unpacked release of TRL, or ``TrainingArguments`` of one of Transformers.

    Raises:
        WalkError: for a release that has none, and for a base class that is not found.
    """
    package = release.name.partition("==")[0]
    if package == "transformers":
        classes = [_read(release, release / package / "training_args.py", _COMMON)]
    else:
        paths = sorted((release / package).rglob("*.py"))
        classes = [_read(release, path, name) for path in paths for name in _OWN if _is_own(path, name)]
    classes = [
        config_class
        for config_class in classes
        if not config_class.where.endswith(":RLOOConfig") or _OF_NEWER_RLOO not in config_class.fields
    ]
    if not classes:
        raise WalkError(f"{release.name} has no class {', '.join(_OWN)}")
    return classes


def _read(release: Path, path: Path, name: str) -> ConfigClass:
    node = _defined(path, name)
    if node is None:
        raise WalkError(f"{release.name} has no class {name} in {path.relative_to(release)}")
    fields: dict[str, None] = {}
    common = _collect(release, _Class(path, node), fields)
    module = ".".join(path.relative_to(release).with_suffix("").parts)
    trainers = (*SHARED["every"], "first_rloo") if name == _COMMON else (trainer_of(name, common),)
    return ConfigClass(release.name, f"{module}:{name}", trainers, tuple(fields))


def _collect(release: Path, class_source: _Class, fields: dict[str, None]) -> bool:
    """Add the fields of a class and of its bases; return whether it derives from ``TrainingArguments``."""
    common = False
    for base in class_source.node.bases:
        name = ast.unparse(base).rpartition(".")[2]
        if name == _COMMON:
            common = True
            continue
        base_source = _find(release, class_source.path, name)
        if base_source is None:
            where = f"{class_source.node.name} in {class_source.path.relative_to(release)}"
            raise WalkError(f"{release.name}: {name}, a base of {where}, is not found")
        common |= _collect(release, base_source, fields)
    for statement in class_source.node.body:
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and "ClassVar" not in ast.unparse(statement.annotation)
        ):
            fields.setdefault(statement.target.id)
    return common


def _find(release: Path, path: Path, name: str) -> _Class | None:
    """A class that a module defines, or imports, directly or through other modules."""
    node = _defined(path, name)
    if node is not None:
        return _Class(path, node)
    for imported in ast.walk(_tree(path)):
        if isinstance(imported, ast.ImportFrom):
            for alias in imported.names:
                if (alias.asname or alias.name) == name:
                    for other in _module(release, path, imported):
                        return _find(release, other, alias.name)
    return None


def _module(release: Path, path: Path, imported: ast.ImportFrom) -> Iterator[Path]:
    """The file of the module that is imported from, where the release has it."""
    base = release if not imported.level else path.parents[imported.level - 1]
    module = base.joinpath(*(imported.module or "").split("."))
    yield from (candidate for candidate in (module.with_suffix(".py"), module / "__init__.py") if candidate.is_file())


def _is_own(path: Path, name: str) -> bool:
    return not (name in _STABLE and "experimental" in path.parts) and _defined(path, name) is not None


def _defined(path: Path, name: str) -> ast.ClassDef | None:
    if f"class {name}" not in _text(path):  # parsing takes far longer
        return None
    return next((node for node in _tree(path).body if isinstance(node, ast.ClassDef) and node.name == name), None)


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


def problems(classes: Sequence[ConfigClass], table: Fields) -> list[str]:
    """Fields that the table does not place, with the releases that have them; and its fields that no release has."""
    missing: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    known_fields: dict[str, set[str]] = {trainer: set() for trainer in TRAINERS}
    for config_class in classes:
        for trainer in config_class.trainers:
            known_fields[trainer] |= set(config_class.fields)
            for name in config_class.fields:
                if name not in table.placed(trainer):
                    missing[config_class.where, name, trainer].append(config_class.release)
    lines = [
        f"{where}: {name} of {trainer} stands nowhere in fields.toml; {_releases(releases)}"
        for (where, name, trainer), releases in sorted(missing.items())
    ]
    for trainer in TRAINERS:
        gone = sorted(set(table.placed(trainer)) - known_fields[trainer])
        lines += [f"fields.toml: {name} of {trainer} is a field in no release" for name in gone]
    return lines


def _releases(releases: Iterable[str]) -> str:
    names = sorted(set(releases), key=lambda name: (name.partition("==")[0], Version(name.partition("==")[2])))
    return f"in {len(names)} releases, from {names[0]} to {names[-1]}" if len(names) > 1 else f"in {names[0]}"


def summary(classes: Sequence[ConfigClass], table: Fields) -> str:
    """How many releases, classes and fields there are, and how many of the fields are in each place."""
    releases: Mapping[str, set[str]] = {
        package: {config_class.release for config_class in classes if config_class.release.startswith(f"{package}==")}
        for package in ("trl", "transformers")
    }
    lines = [
        f"{len(releases['trl'])} releases of trl, {len(releases['transformers'])} of transformers, "
        f"{len(classes)} config classes, {sum(len(config_class.fields) for config_class in classes)} fields in them"
    ]
    for trainer in TRAINERS:
        names = {name for config_class in classes if trainer in config_class.trainers for name in config_class.fields}
        placed = table.placed(trainer)
        counts = [f"{sum(placed[name].kind == kind for name in names & set(placed))} {kind}" for kind in KINDS]
        lines.append(f"{trainer}: {len(names)} names of fields: {', '.join(counts)}")
    return "\n".join(lines)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m pytest_trlcompat.conformance.walk", description=_ABOUT)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="with unpacked releases")
    folders = parser.parse_args().folders
    classes: list[ConfigClass] = []
    try:
        for package in ("trl", "transformers"):
            releases = {path.name: path for folder in folders for path in folder.glob(f"{package}==*")}
            if not releases:
                raise WalkError(f"no release of {package} in {', '.join(map(str, folders))}")
            classes += [config_class for name in sorted(releases) for config_class in config_classes(releases[name])]
    except WalkError as error:
        sys.exit(str(error))
    table = load()
    if lines := problems(classes, table):
        sys.exit("\n".join([*lines, "place each in pytest_trlcompat/conformance/fields.toml, or take it away there"]))
    print(summary(classes, table))


if __name__ == "__main__":
    main()
