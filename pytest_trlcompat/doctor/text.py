"""A diagnosis as text, in colour on a terminal if ``rich`` is installed.

Imports no package of the stack, and works without ``rich``.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import IO

from pytest_trlcompat._escaping import encodable, visible
from pytest_trlcompat.catalog.issue import STRATEGIES
from pytest_trlcompat.doctor.diagnosis import ApplicableIssue, Diagnosis
from pytest_trlcompat.doctor.effects import Effect
from pytest_trlcompat.doctor.pins import Pins
from pytest_trlcompat.doctor.stack_spec import ORDER
from pytest_trlcompat.stack import OPTIONAL
from pytest_trlcompat.trainers.curing.kinds import TRAINERS

__all__ = ["show"]

_WIDTH = 120
"""The maximum width in columns, and the width when the output is not a terminal."""
_HEIGHT = 40
"""A screen in lines, when the output is not a terminal."""
_COUNTING = 4
"""Lines of a screen that say how many issues are not shown."""
_INDENT = 2
_LABEL = 11
_SEVERITY = 9

Line = tuple[str, str]
"""A style of rich's and a text."""


def show(diagnosis: Diagnosis, file: IO[str], *, everything: bool = True) -> None:
    """Print a diagnosis to ``file``.

    Args:
        everything: each issue in full; otherwise in a line, with its siblings, where that is more than a screen.
    """
    terminal = file.isatty()
    width, height = _WIDTH, _HEIGHT
    if terminal:
        import shutil

        size = shutil.get_terminal_size((_WIDTH, _HEIGHT))
        width, height = min(_WIDTH, size.columns), size.lines - 1
    lines = _in_full(diagnosis, width) if everything else _on_a_screen(diagnosis, width, height)
    if terminal:
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            console = Console(file=file, highlight=False)
            for style, text in lines:
                console.print(Text(encodable(text, getattr(file, "encoding", None)), style=style), soft_wrap=True)
            return
    file.write(encodable("".join(f"{text}\n" for _, text in lines), getattr(file, "encoding", None)))


def _in_full(diagnosis: Diagnosis, width: int) -> list[Line]:
    return [*_head(diagnosis, width), *_issues(diagnosis, width)]


def _on_a_screen(diagnosis: Diagnosis, width: int, height: int) -> list[Line]:
    """Everything where it fits; else as many issues as do, the worst first, and how many are not shown."""
    head = list(_head(diagnosis, width))
    # What does not fit is not made: remedies and lines of a hundred issues take a tenth of an answer.
    in_full = list(itertools.islice(_issues(diagnosis, width), max(0, height - len(head)) + 1))
    if len(head) + len(in_full) <= height:
        return [*head, *in_full]
    groups: dict[tuple[bool, str, str], list[ApplicableIssue]] = {}
    for applicable in diagnosis.issues:
        groups.setdefault((applicable.judged, applicable.issue.severity, applicable.siblings), []).append(applicable)
    entries = [(len(group), list(_in_brief(group, width))) for (judged, *_), group in groups.items() if judged]
    advice = [("", ""), *_advice(diagnosis, width, brief=True)]
    room = max(1, height - len(head) - len(advice) - _COUNTING)
    shown, lines = 0, [("", "")]
    for number, entry in entries:
        if shown and len(lines) + len(entry) > room:
            break
        shown += number
        lines += entry
    counts = diagnosis.counts
    parts = [
        f"{shown} of {counts['affect']} are shown, {counts['affect'] - shown} are not",
        *([f"{counts['cannot_be_judged']} more cannot be judged"] if counts["cannot_be_judged"] else []),
        *([f"of {counts['not_predicted']} nothing is predicted"] if counts["not_predicted"] else []),
    ]
    sentence = f"{'; '.join(parts)}. --all shows each with its cure, trlcompat issue ID one of them."
    return [*head, *lines, ("", ""), *_wrapped("bold", sentence, width), *advice]


def _in_brief(group: Sequence[ApplicableIssue], width: int) -> Iterator[Line]:
    first = group[0].issue
    names = ", ".join(applicable.issue.id for applicable in group)
    yield from (
        ("", line) for line in _fill(f"{names}: {first.title}", width, first.severity.ljust(_SEVERITY), " " * _SEVERITY)
    )


def _head(diagnosis: Diagnosis, width: int) -> Iterator[Line]:
    yield from _wrapped("", _stack(diagnosis), width)
    for note in diagnosis.notes:
        yield from _wrapped("yellow", f"note: {note}", width)
    if diagnosis.left_out:
        yield from _wrapped("", f"not considered: {diagnosis.left_out}", width)
    if diagnosis.torch:
        yield from _wrapped("yellow", f"torch: {diagnosis.torch}", width)
    if diagnosis.python:
        yield from _wrapped("yellow", f"python: {diagnosis.python}", width)
    if missing := diagnosis.unmeasured_text:
        caveat = "what follows is predicted from other releases, also that an issue does not affect this stack"
        yield from _wrapped("yellow", f"not measured: {missing}; {caveat}", width)
    yield "", ""
    yield from _summary(diagnosis, width)


def _issues(diagnosis: Diagnosis, width: int) -> Iterator[Line]:
    named: dict[str, list[str]] = {}
    described = {
        effect.why for applicable in diagnosis.issues for effect in applicable.effects if not effect.blocked_by
    }
    for applicable in diagnosis.issues:
        if diagnosis.stopped_by(applicable):
            named.setdefault(_unjudged(applicable), []).append(applicable.issue.id)
        else:
            yield "", ""
            elsewhere = diagnosis.unmeasured_trainer
            yield from _issue(applicable, diagnosis.remedy(applicable), width, described, elsewhere)
    if named:
        yield "", ""
    for reason, names in named.items():
        yield from _wrapped("", f"{reason}: {', '.join(names)}.", width)
    if diagnosis.issues:
        yield "", ""
        yield from _advice(diagnosis, width)


def _stack(diagnosis: Diagnosis) -> str:
    spec = diagnosis.spec
    texts = ", ".join(f"{package} {text}" for package, text in spec.texts.items())
    unnamed = [package for package in ORDER if package not in {*spec.texts, *OPTIONAL}]
    parts = [f"{texts} ({spec.source})"]
    if unnamed:
        parts.append(f"{'not installed' if unnamed == spec.absent else 'not specified'}: {', '.join(unnamed)}")
    return "; ".join(parts)


def _issue(
    applicable: ApplicableIssue, remedy: str, width: int, described: Collection[str], elsewhere: str
) -> Iterator[Line]:
    """
    Args:
        elsewhere: the trainer that the question is about, where it was not measured.
    """
    issue = applicable.issue
    yield from _wrapped("bold red", f"{issue.id} ({issue.severity}): {issue.title}", width)
    for effect in applicable.effects:
        yield from _entry(effect.verdict.value, _effect(effect, described), width)
    if elsewhere:
        yield from _entry("but", f"measured with GRPO alone, not with {elsewhere}", width)
    yield from _entry("symptom", issue.wrong, width)
    yield from _entry("cure", remedy, width, style="green")
    if applicable.uncured:
        yield from _entry("but", f"the corrected trainer is {applicable.uncured}", width)
    for number, link in enumerate(issue.upstream):
        yield from _entry("upstream" if not number else "", link, width)


def _unjudged(applicable: ApplicableIssue) -> str:
    """``Cannot be judged here, because one stops their tests first``, for all issues with the same reason."""
    blockers: dict[str, set[str]] = {}
    for effect in applicable.effects:
        blockers.setdefault(effect.condition, set()).add(effect.blocked_by)
    reasons = []
    for condition, by in blockers.items():
        where = f"with {condition}" if condition else "here"
        verb = "stops" if len(by) == 1 else "stop"
        reasons.append(f"{where}, because {' and '.join(sorted(by))} {verb} their tests first")
    return f"Cannot be judged {', nor '.join(reasons)}"


def _effect(effect: Effect, described: Collection[str]) -> str:
    """
    Args:
        described: the reasons that are given with other issues; for an issue that is stopped they are not repeated.
    """
    only = f", only with {effect.condition}" if effect.condition else ""
    under = _under(effect.strategies).strip() or "under every strategy"
    why = effect.why
    if effect.blocked_by:
        why = f"{effect.blocked_by} stops its test first" + ("" if why in described else f": {why}")
    if effect.otherwise:
        why += f"; where it does not, {effect.otherwise}"
    return f"{under}{only}: {why} [{effect.confidence.describe()}]"


def _summary(diagnosis: Diagnosis, width: int) -> Iterator[Line]:
    first = diagnosis.summary
    if diagnosis.issues:
        yield from _wrapped("bold", f"{first[0].upper()}{first[1:]}.", width)
    else:
        near = f"; the nearest measured cell is {diagnosis.nearest.id}" if diagnosis.nearest else ""
        if name := diagnosis.unmeasured_trainer:
            sentence = f"No known issue that was measured with GRPO and may meet {name} affects this stack{near}."
            yield from _wrapped("bold", sentence, width)
        else:
            style = "bold green" if diagnosis.is_clear and not diagnosis.predicted else "bold yellow"
            yield from _wrapped(style, f"{first[0].upper()}{first[1:]}{near}.", width)
    stopped = ", ".join(diagnosis.stopped_for_others)
    if unpredicted := ", ".join(name for name in diagnosis.unpredicted if name not in diagnosis.stopped_for_others):
        yield from _wrapped("", f"The catalogue makes no prediction for this stack about {unpredicted}.", width)
    if stopped:
        sentence = (
            f"Known issues of other trainers stop the tests of {stopped}, so that nothing is known with this stack."
        )
        yield from _wrapped("", sentence, width)


def _advice(diagnosis: Diagnosis, width: int, *, brief: bool = False) -> Iterator[Line]:
    if advice := diagnosis.own_trainer:
        of_mixins = "; a mixin in parentheses above"
        yield from _wrapped("", f"{advice.partition(of_mixins)[0]}." if brief else advice, width)
        yield "", ""
    if name := diagnosis.unmeasured_trainer:
        yield from _wrapped("", f"No measured pins are recommended, since no sweep trains with {name}.", width)
        return
    sweep = f"the sweep of {diagnosis.measured.date}" if diagnosis.measured.date else "any sweep"
    if diagnosis.nobody_measured:
        unmeasured = _under(diagnosis.nobody_measured) or " under any strategy"
        sentence = (
            f"No cell of {sweep} was measured with {TRAINERS[diagnosis.trainer]}{unmeasured}, so that no pins are "
            "recommended for that."
        )
        yield from _wrapped("", sentence, width)
    strategies = tuple(name for name in diagnosis.strategies if name not in diagnosis.nobody_measured)
    for pins in diagnosis.pins:
        under = _under(pins.strategies) or " under every strategy"
        sentence = (
            f"Nearest measured pins, ok for all issues{under}{_measured_with(pins, diagnosis)}: {_versions(pins)}"
        )
        yield from _wrapped("", sentence, width)
    if strategies and not any(pins.strategies == strategies for pins in diagnosis.pins):
        under = _under(strategies) or " under every strategy"
        narrow = (
            "" if diagnosis.pins or diagnosis.fewest else "; --strategy and --trainer leave out what you do not use"
        )
        yield from _wrapped("", f"No cell of {sweep} is ok for all issues{under}{narrow}.", width)
    if diagnosis.fewest:
        names = str(len(diagnosis.fewest.issues)) if brief else ", ".join(diagnosis.fewest.issues)
        alone = _measured_with(diagnosis.fewest, diagnosis)
        sentence = f"Measured pins with the fewest known issues ({names}){alone}: {_versions(diagnosis.fewest)}"
        yield from _wrapped("", sentence, width)


def _measured_with(pins: Pins, diagnosis: Diagnosis) -> str:
    """``, measured with GRPOTrainer alone``, where no trainer is asked about."""
    if diagnosis.trainer or not pins.trainers:
        return ""
    return f", measured with {', '.join(TRAINERS[name] for name in pins.trainers)} alone"


def _versions(pins: Pins) -> str:
    versions: Mapping[str, str] = pins.cell.versions
    exact = " ".join(f"{package}=={versions[package]}" for package in ORDER[:2] if package in versions)
    beside = ", ".join(f"{package} {versions[package]}" for package in ORDER[2:] if package in versions)
    return exact + (beside and f" (with {beside})")


def _under(strategies: Sequence[str]) -> str:
    """`` under A, B``; empty for every strategy, which is understood if none is named."""
    return "" if set(STRATEGIES) <= set(strategies) else f" under {', '.join(strategies)}"


def _entry(label: str, text: str, width: int, style: str = "") -> Iterator[Line]:
    margin = " " * (_INDENT + _LABEL)
    first = " " * _INDENT + label.ljust(_LABEL)
    yield from ((style, line) for line in _fill(text, width, first, margin))


def _wrapped(style: str, text: str, width: int) -> Iterator[Line]:
    yield from ((style, line) for line in _fill(text, width, "", " " * _INDENT))


def _fill(text: str, width: int, first: str, margin: str) -> list[str]:
    return textwrap.wrap(
        visible(text),
        width,
        initial_indent=first,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
