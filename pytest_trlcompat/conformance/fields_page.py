"""Make the page of config fields, which shows ``fields.toml`` to people. The build of the site calls it; by hand:

python -m pytest_trlcompat.conformance.fields_page docs/reference/fields.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_trlcompat.conformance.field_records import EFFECTS, NEEDS, Choice, Group, Tried
from pytest_trlcompat.conformance.fields import SHARED, Fields, load

__all__ = ["main", "page"]

_HEAD = """\
# Config fields

<!-- Made by `python -m pytest_trlcompat.conformance.fields_page docs/reference/fields.md`; do not edit. -->

Every argument of `GRPOConfig`, of `DistillationConfig` from TRL 1.10 on, of `PPOConfig` (`PPOv2Config` before TRL 0.12)
and of the `RLOOConfig` that TRL had until 0.21, with those of `transformers.TrainingArguments`, in all releases of TRL
from 0.9.6 on: what conformance tries, and why the rest is not tried. The default is tried in addition to the values
below.

## A new field

A new release has new arguments. `nox -s fields` reads the sources of all releases of TRL, and of those of Transformers
that are in the locks, and names each field that has no place here, as well as each that no release has; the test of the
installed stack names those of its config classes. To give a field its place:

1. Read its documentation. If it may change what a step, a log, an evaluation, a checkpoint or a resumed run gives, give
   values to try, and what then differs (the words are below); else the reason why it cannot, or cannot be tried here.
2. Write that into `pytest_trlcompat/conformance/fields.toml`, whose head explains its keys. A new name of an argument
   that is there already becomes the name of its entry, and the older one moves into `names`.
3. Run `nox -s fields` and the unit tests. The build of the site makes this page.

## What differs

What may differ from a training without the setting:

"""

_NOT_TRIED = {
    "no_effect": ("Without effect", "What cannot change a step, a log, an evaluation, a checkpoint or a resumed run."),
    "untestable": ("Untestable", "What cannot be tried here."),
    "launch": ("Set by launches", "What belongs to a strategy or to a device."),
}
_PARTS = {
    "every": ("All trainers", "Arguments of `transformers.TrainingArguments` that mean the same for all of them."),
    "sampling": (
        "GRPO and distillation",
        "Arguments that mean the same for both, and of `transformers.TrainingArguments` what PPO has otherwise.",
    ),
    "grpo": ("GRPO", "Other arguments of `GRPOConfig`."),
    "distillation": ("Distillation", "Other arguments of `DistillationConfig`."),
    "ppo": ("PPO", "Arguments of `PPOConfig`, and of `transformers.TrainingArguments` what GRPO has otherwise."),
    "first_rloo": (
        "The legacy RLOO",
        "Arguments of the `RLOOConfig` that TRL had until 0.21. It also has those of PPO, except for {without}.",
    ),
    "first_ppo": ("The first PPO", "Arguments of the `PPOConfig` before TRL 0.12."),
}


def page(table: Fields) -> str:
    """The table as Markdown."""
    lines = [_HEAD + "| word | what may differ |", "| --- | --- |"]
    lines += [f"| {word} | {meaning} |" for word, meaning in EFFECTS.items()]
    lines += ["", "What a value needs that no argument gives:", "", "| word | meaning |", "| --- | --- |"]
    lines += [f"| {word} | {meaning} |" for word, meaning in NEEDS.items()]
    seen_tried: list[Tried] = []
    seen_groups: list[Group] = []
    rloo_fields = table.tried("first_rloo")
    without = ", ".join(_code(field.name) for field in table.tried("ppo") if field not in rloo_fields)
    for name, (title, text) in _PARTS.items():
        lines += ["", f"## {title}", "", text.replace("{without}", without)]
        trainers = SHARED.get(name, (name,))
        fields = [field for field in _in_all(table.tried, trainers) if field not in seen_tried]
        groups = [group for group in _in_all(table.groups, trainers) if group not in seen_groups]
        seen_tried += fields
        seen_groups += groups
        if fields:
            lines += ["", "| argument | values | with | never with | needs | what differs |", "| --- " * 6 + "|"]
            lines += [f"| {' | '.join(map(_escape, cells))} |" for field in fields for cells in _rows(field)]
            left_out = [field for field in fields if field.left_out]
            if left_out:
                lines += ["", "Not tried of these:", ""]
                lines += [f"- {_code(field.name)}: {field.left_out}" for field in left_out]
        lines += _not_tried(groups)
    return "\n".join(lines) + "\n"


def _in_all(read: Callable[[str], list[Any]], trainers: Sequence[str]) -> list[Any]:
    """Entries that several trainers share, in the order of the first one."""
    first, *others = [read(trainer) for trainer in trainers]
    return [entry for entry in first if all(entry in entries for entries in others)]


def _not_tried(groups: Iterable[Group]) -> Iterator[str]:
    groups = list(groups)
    for kind, (title, text) in _NOT_TRIED.items():
        chosen = [group for group in groups if group.kind == kind]
        if chosen:
            yield from ("", f"**{title}.** {text}", "")
            yield from (f"- {', '.join(map(_code, group.fields))}: {group.why}." for group in chosen)


def _rows(field: Tried) -> Iterator[tuple[str, ...]]:
    """A row for all values that have the same conditions."""
    rows: dict[tuple[str, str], list[str]] = {}
    for choice in field.choices:
        rows.setdefault((_settings(choice.with_), _never(choice)), []).append(_value(choice))
    name = " or ".join(map(_code, field.names))
    effect = field.effect
    if field.effect == "reference" and field.reference != field.name:
        effect += f", as its {_code(field.reference)}"
    for (with_, never), values in rows.items():
        yield name, ", ".join(values), with_, never, ", ".join(field.needs), effect


def _value(choice: Choice) -> str:
    return _code(choice.value) + (f" ({choice.releases})" if choice.releases else "")


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(_code(f"{name}={value!r}") for name, value in settings.items())


def _never(choice: Choice) -> str:
    parts = []
    for name, values in choice.never_with.items():
        parts += [_code(name)] if values is None else [_code(f"{name}={value!r}") for value in values]
    return ", ".join(parts)


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else repr(value)}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_trlcompat.conformance.fields_page",
        description="Write the page of the config fields, in Markdown.",
    )
    parser.add_argument("page", type=Path, metavar="FILE", help="docs/reference/fields.md of the checkout")
    parser.parse_args().page.write_text(page(load()), encoding="utf-8")


if __name__ == "__main__":
    main()
