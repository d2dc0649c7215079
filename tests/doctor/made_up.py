"""A catalogue of one known issue, cells that have measured it, and the doctor's answers from them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction, Symptom
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.measurements import Measurements
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.diagnosis import ApplicableIssue, Diagnosis, diagnose
from pytest_trlcompat.doctor.requirements import of_pins
from pytest_trlcompat.doctor.stack_spec import of_mentions

Run = Callable[..., tuple[int, str, str]]
"""What the fixture ``doctor`` is: arguments to status, output and errors."""
LINK = "https://github.com/huggingface/trl/issues/1"


def predict(verdict: str, strategies: tuple[str, ...] = (), subject: str = "upstream", **when: str) -> Prediction:
    return Prediction(Verdict(verdict), subject, when, strategies, f"{verdict} because")


def issue(
    *predictions: Prediction,
    name: str = "one",
    strategies: tuple[str, ...] = ("single", "zero3"),
    needs: tuple[str, ...] = (),
    cure: str = "",
) -> KnownIssue:
    symptoms = (Symptom("RuntimeError", "on the same device"),)
    return KnownIssue(
        name, "title", "wrong", (LINK,), "s", cure, symptoms, predictions, strategies, needs, workaround="workaround"
    )


def cell(
    trl: str, transformers: str = "4.49.0", *, torch: str = "", corrected: str = "ok", **verdicts: str
) -> MeasuredCell:
    """``single="ok"``: the verdict of issue ``one`` under ``single``."""
    found = {("one", "upstream", strategy): Verdict(verdict) for strategy, verdict in verdicts.items()}
    found |= {("one", "corrected", strategy): Verdict(corrected) for strategy in verdicts}
    versions = {"trl": trl, "transformers": transformers, **({"torch": torch} if torch else {})}
    name = f"trl{trl}-tf{transformers}" + (f"-torch{torch}" if torch else "")
    return MeasuredCell(name, versions, found)


BROKEN_BEFORE_018 = issue(predict("broken", trl="<0.18"), predict("ok"))


def ask(
    *pins: str,
    issues: Sequence[KnownIssue] = (BROKEN_BEFORE_018,),
    cells: Sequence[MeasuredCell] = (),
    strategies: Sequence[str] = (),
    complete: bool = False,
    trainer: str = "",
) -> Diagnosis:
    spec = of_mentions(of_pins(pins), "the command line", complete=complete)
    known = Catalog({each.id: each for each in issues})
    return diagnose(spec, known, Measurements.of(known, Evidence("2026-11-21", tuple(cells))), strategies, trainer)


def effects(diagnosis: Diagnosis) -> list[tuple[tuple[str, ...], str, str]]:
    """Of all issues: strategies, verdict and condition."""
    return [
        (effect.strategies, effect.verdict.value, effect.condition)
        for applicable in diagnosis.issues
        for effect in applicable.effects
    ]


def only(diagnosis: Diagnosis) -> ApplicableIssue:
    """The one issue that affects the stack."""
    (applicable,) = diagnosis.issues
    return applicable
