"""The table of config fields, ``fields.toml``: for every argument, the values that are tried, or why none is.

tried = fields.load().tried("grpo")
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from pytest_trlcompat.conformance.field_records import (
    ANY,
    EFFECTS,
    KINDS,
    NEEDS,
    Choice,
    FieldsError,
    Group,
    Placement,
    Tried,
    may_stand_together,
    same,
)
from pytest_trlcompat.training.aliases import names_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "ANY",
    "EFFECTS",
    "KINDS",
    "NEEDS",
    "SHARED",
    "TRAINERS",
    "Choice",
    "Fields",
    "FieldsError",
    "Group",
    "Placement",
    "Tried",
    "load",
    "may_stand_together",
    "trainer_of",
    "unplaced",
]

TABLE = Path(__file__).with_name("fields.toml")
TRAINERS = ("grpo", "distillation", "ppo", "first_rloo", "first_ppo")
"""Trainers whose configs the table places. ``first_rloo`` is the RLOOTrainer that TRL had until 0.21, with most of
PPO's fields; ``first_ppo`` is the PPOTrainer before TRL 0.12, none of whose fields is tried."""
SHARED = {"every": ("grpo", "distillation", "ppo"), "sampling": ("grpo", "distillation")}
"""Parts of the table that belong to several trainers."""
_OF_ONE = {"GRPOConfig": "grpo", "DistillationConfig": "distillation", "RLOOConfig": "first_rloo"}
_WITHOUT = "without"
_GROUP_KEYS = {"effect", "with", "never_with", "needs"}
_FIELD_KEYS = {*_GROUP_KEYS, "values", "choices", "reference", "left_out"}
_CHOICE_KEYS = {"value", "releases", "with", "never_with", "as"}
# TOML has no null.
_NONE = {"none": True}


@dataclass(frozen=True)
class Fields:
    """The table, by trainer.

    A part of :data:`SHARED` belongs to each of its trainers. The part ``ppo`` belongs to ``first_rloo`` too, except for
    the fields that ``first_rloo`` lists as PPO's alone.
    """

    _tried: Mapping[str, tuple[Tried, ...]]
    _groups: Mapping[str, tuple[Group, ...]]
    _bases: Mapping[str, Mapping[str, Any]]

    def tried(self, trainer: str, versions: Mapping[str, str] | None = None) -> list[Tried]:
        """The fields that are tried.

        Args:
            versions: by package; leaves out values that these releases do not document, and fields without any value.
                :meth:`Tried.name_in` says whether a config has a field at all.

        Raises:
            FieldsError: for an unknown trainer, or where the version of a package is missing.
        """
        tried = list(_of(self._tried, trainer))
        if versions is None:
            return tried
        documented = (
            replace(field, choices=tuple(choice for choice in field.choices if choice.holds_for(versions)))
            for field in tried
        )
        return [field for field in documented if field.choices]

    def groups(self, trainer: str) -> list[Group]:
        """The fields that are not tried, in groups with the same reason."""
        return list(_of(self._groups, trainer))

    def base(self, trainer: str) -> dict[str, Any]:
        """The settings that values are chosen to fit, in place of the defaults of their fields."""
        return dict(_of(self._bases, trainer))

    def placed(self, trainer: str) -> dict[str, Placement]:
        """The place of every name of a field, older names included."""
        tried = {name: Placement("try", field.title) for field in self.tried(trainer) for name in field.names}
        return tried | {
            name: Placement(group.kind, group.why) for group in self.groups(trainer) for name in group.fields
        }


def trainer_of(name: str, is_training_arguments: bool) -> str:
    """Whose config a class is, by its name and by whether it derives from ``transformers.TrainingArguments``.

    A ``RLOOConfig`` is taken to be the one that TRL had until 0.21.

    Raises:
        FieldsError: for another class.
    """
    if name in _OF_ONE:
        return _OF_ONE[name]
    if name in ("PPOConfig", "PPOv2Config"):
        return "ppo" if is_training_arguments else "first_ppo"
    raise FieldsError(
        f"{name} is the config of no trainer in the table: {', '.join(_OF_ONE)}, PPOConfig and PPOv2Config are"
    )


def unplaced(config_classes: Iterable[type], table: Fields | None = None) -> list[str]:
    """Fields of installed config classes that the table does not place, as ``GRPOConfig.name``."""
    table = table or load()
    missing = []
    for config_class in config_classes:
        trainer = trainer_of(
            config_class.__name__, any(base.__name__ == "TrainingArguments" for base in config_class.__mro__)
        )
        placed = table.placed(trainer)
        missing += [
            f"{config_class.__name__}.{field.name}" for field in fields(config_class) if field.name not in placed
        ]
    return missing


@lru_cache
def load(path: Path = TABLE) -> Fields:
    """Read and check the table.

    Raises:
        FieldsError: for something that is unknown, missing, contradictory, or placed twice.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise FieldsError(f"the table {path} cannot be read: {error}") from error
    _check_keys("the table", raw, {*SHARED, *TRAINERS})
    for name, part in raw.items():
        extra_keys = ["base"] if name in SHARED["every"] else [_WITHOUT] if name == "first_rloo" else []
        _check_keys(f"[{name}]", part, {*KINDS, *extra_keys})
    parts = {trainer: [raw.get(trainer, {})] for trainer in TRAINERS}
    for name, trainers in SHARED.items():
        for trainer in trainers:
            parts[trainer].append(raw.get(name, {}))
    less = raw.get("first_rloo", {}).get(_WITHOUT, ())
    bases = {trainer: raw.get("ppo" if trainer == "first_rloo" else trainer, {}) for trainer in TRAINERS}
    tried = {
        trainer: [field for part in tables for field in _tried(trainer, part)] for trainer, tables in parts.items()
    }
    groups = {
        trainer: [group for part in tables for group in _groups(trainer, part)] for trainer, tables in parts.items()
    }
    more = parts["ppo"]
    tried["first_rloo"] += [field for part in more for field in _tried("first_rloo", part) if field.name not in less]
    for group in (group for part in more for group in _groups("first_rloo", part)):
        groups["first_rloo"].append(replace(group, fields=tuple(name for name in group.fields if name not in less)))
    table = Fields(
        {trainer: tuple(entries) for trainer, entries in tried.items()},
        {trainer: tuple(entries) for trainer, entries in groups.items()},
        {trainer: _decoded(part.get("base", {})) for trainer, part in bases.items()},
    )
    for trainer in TRAINERS:
        _check(trainer, table)
    return table


def _tried(trainer: str, part: Mapping[str, Any]) -> Iterator[Tried]:
    for group in part.get("try", []):
        where = f"{trainer}: the group {group.get('title', '?')!r}"
        _check_keys(where, group, {"title", "fields", *_GROUP_KEYS}, {"title", "fields"})
        common = {key: group[key] for key in _GROUP_KEYS if key in group}
        for name, raw in group["fields"].items():
            entry = {"values": raw} if isinstance(raw, list) else raw
            _check_keys(f"{where}: {name}", entry, _FIELD_KEYS)
            yield _field(f"{where}: {name}", name, {**common, **entry}, group["title"])


def _field(where: str, name: str, entry: Mapping[str, Any], title: str) -> Tried:
    _check_keys(where, entry, _FIELD_KEYS, {"effect"})  # of the field, or of its group
    if ("values" in entry) == ("choices" in entry):
        raise FieldsError(f"{where} needs either values or choices")
    raw_choices = entry["choices"] if "choices" in entry else [{"value": value} for value in entry["values"]]
    if not raw_choices:
        raise FieldsError(f"{where} has no value")
    if entry["effect"] not in EFFECTS:
        raise FieldsError(f"{where}: unknown effect {entry['effect']!r}; known are {', '.join(EFFECTS)}")
    if odd := set(entry.get("needs", [])) - set(NEEDS):
        raise FieldsError(f"{where}: unknown needs {', '.join(sorted(odd))}; known are {', '.join(NEEDS)}")
    if entry["effect"] != "reference" and (
        "reference" in entry or any("as" in raw_choice for raw_choice in raw_choices)
    ):
        raise FieldsError(f"{where}: 'reference' and 'as' are for the effect \"reference\" alone")
    with_, never_with = _decoded(entry.get("with", {})), _never(entry.get("never_with", {}))
    choices = []
    for raw_choice in raw_choices:
        _check_keys(where, raw_choice, _CHOICE_KEYS, {"value"})
        value = _decoded(raw_choice["value"])
        choices.append(
            Choice(
                value,
                {**with_, **_decoded(raw_choice.get("with", {}))},
                {**never_with, **_never(raw_choice.get("never_with", {}))},
                _releases(where, raw_choice.get("releases")),
                _decoded(raw_choice["as"]) if "as" in raw_choice else value,
            )
        )
    reference = entry.get("reference", name) if entry["effect"] == "reference" else ""
    return Tried(
        name,
        tuple(choices),
        with_,
        never_with,
        entry["effect"],
        names_of(name),
        tuple(entry.get("needs", [])),
        reference,
        entry.get("left_out", ""),
        title,
    )


def _releases(where: str, text: str | None) -> Requirement | None:
    if text is None:
        return None
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise FieldsError(f"{where}: releases {text!r}: {error}") from error
    if requirement.name not in ("trl", "transformers") or not requirement.specifier:
        raise FieldsError(f"{where}: releases {text!r} are to be those of trl or of transformers")
    return requirement


def _groups(trainer: str, part: Mapping[str, Any]) -> Iterator[Group]:
    for kind in KINDS[1:]:
        for group in part.get(kind, []):
            where = f"{trainer}: a group of {kind} ({', '.join(group.get('fields', ['?'])[:3])})"
            _check_keys(where, group, {"fields", "why"}, {"fields", "why"})
            if not group["fields"] or not group["why"].strip():
                raise FieldsError(f"{where} has no field or no reason")
            yield Group(kind, tuple(group["fields"]), group["why"])


def _check(trainer: str, table: Fields) -> None:
    """Refuse names that are placed twice, and conditions that are no settings or contradict themselves."""
    tried = {field.name: field for field in table.tried(trainer)}
    names = [name for field in table.tried(trainer) for name in field.names]
    names += [name for group in table.groups(trainer) for name in group.fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FieldsError(f"{trainer}: {', '.join(twice)} stand in two places")
    for field in tried.values():
        for choice in field.choices:
            where = f"{trainer}: {field.name}={choice.value!r}"
            conditions = {*choice.with_, *choice.never_with}
            if field.name in conditions:
                raise FieldsError(f"{where} is a condition of itself")
            if odd := sorted(conditions - set(tried)):
                raise FieldsError(f"{where}: its conditions name {', '.join(odd)}, which nothing tries")
            for other, value in choice.with_.items():
                values = choice.never_with.get(other, ())
                if values is None or any(same(value, excluded) for excluded in values):
                    raise FieldsError(f"{where}: {other}={value!r} is with it and never with it")


def _never(raw: Mapping[str, Any]) -> dict[str, Sequence[Any] | None]:
    for name, values in raw.items():
        if values != ANY and not isinstance(values, list):
            raise FieldsError(f'never_with: {name} needs a list of values, or "any", not {values!r}')
    return {name: None if values == ANY else tuple(_decoded(values)) for name, values in raw.items()}


def _decoded(value: Any) -> Any:
    """With ``None`` where the table writes ``{none = true}``."""
    if value == _NONE:
        return None
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _check_keys(where: str, table: Mapping[str, Any], known: set[str], needed: Collection[str] = ()) -> None:
    if not isinstance(table, Mapping):
        raise FieldsError(f"{where} is to be a table, not {table!r}")
    if odd := sorted((set(table) - known) | (set(needed) - set(table))):
        raise FieldsError(f"{where}: missing or unknown: {', '.join(odd)}; known are {', '.join(sorted(known))}")


def _of(by_trainer: Mapping[str, Any], trainer: str) -> Any:
    if trainer not in by_trainer:
        raise FieldsError(f"unknown trainer {trainer!r}; known are {', '.join(TRAINERS)}")
    return by_trainer[trainer]
