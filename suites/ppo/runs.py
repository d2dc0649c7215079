"""The launches behind the PPO suites: each subject runs once under each strategy, for all suites together.

Runs in the test process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_trlcompat import _location, stack
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.conformance.ppo import objects as ppo
from pytest_trlcompat.plugin.judging import Absent, Finding
from pytest_trlcompat.strategies import family_of

from ..in_rank import ppo_stages
from ..launches import distinct
from ..measured import largest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pytest_trlcompat.catalog.issue import KnownIssue
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

__all__ = [
    "TOLERANCE",
    "PPORun",
    "PPORuns",
    "greatest_difference_of_logs",
    "require_ppo",
    "saves_verdict",
]

Log: TypeAlias = "list[dict[str, float]]"
"""The numbers of each step, by name."""

KL_TOLERANCE = 1e-5
"""Of the first step, where both models are equal."""
_BEFORE_ALL = "construct_again"
"""The stage without which there is none of the others."""
TOLERANCE = 1e-3
"""Of every logged number against DDP's. Seen are 0; a wrong gather shows 0.1 and more."""


@dataclass
class PPORun:
    """What every rank saw, and what a fresh process read of what was saved.

    Attributes:
        failures: stage to the first rank's exception: ``type``, ``text``, ``traceback``, ``location``, and ``artefact``
            where it is one; and ``other_ranks`` where others failed otherwise, by rank.
        log: the numbers of each step on rank 0; empty where training failed.
        saved: stage to folder, where saving did not fail.
        reloaded: stage to what was read of it; ``None`` before :meth:`PPORuns.read_back`.
    """

    failures: dict[str, dict[str, Any]]
    log: Log
    policy_tensors: int
    moved_tensors: int
    engines: dict[str, Any]
    saved: dict[str, str]
    reloaded: dict[str, dict[str, Any]] | None = None

    @property
    def trained(self) -> bool:
        """All steps, every number finite, no divergence from itself at the first, and all of the policy moved."""
        return (
            "train" not in self.failures
            and len(self.log) == ppo.STEPS
            and all(abs(value) < float("inf") for entry in self.log for value in entry.values())
            and abs(self.log[0]["objective/kl"]) <= KL_TOLERANCE
            and 0 < self.policy_tensors == self.moved_tensors
        )

    def difference(self, other: PPORun) -> float:
        """See :func:`greatest_difference_of_logs`."""
        return greatest_difference_of_logs(self.log, other.log)

    def failed(self, stages: Iterable[str], issue: KnownIssue) -> Finding | None:
        """The first failure among these stages: ``broken`` where it is the issue's symptom, ``error`` otherwise."""
        failure = next((self.failures[stage] for stage in stages if stage in self.failures), None)
        if failure is None:
            return None
        known = issue.shows((failure["type"],), failure["text"], failure["location"])
        return Finding(Verdict.BROKEN if known else Verdict.ERROR, failure)

    def evidence(self, stages: Iterable[str]) -> dict[str, Any]:
        """What a report shows of these stages, of a construction that failed before them, and which limits of the
        software accelerator were met in any.
        """
        shown: dict[str, Any] = {"trained": self.trained, "engines": self.engines}
        met = {failure["artefact"] for failure in self.failures.values() if "artefact" in failure}
        if met:
            shown["artefacts"] = sorted(met)
        for stage in [_BEFORE_ALL, *stages]:
            if stage in self.failures:
                first, *others = _texts(self.failures[stage])
                shown[stage] = first
                if others:
                    shown.setdefault("failures_of_other_ranks", {})[stage] = others
            elif self.reloaded is not None and stage in self.reloaded:
                shown[stage] = self.reloaded[stage]
        return shown


class PPORuns:
    """Trains on first use, once for each subject and strategy.

    Args:
        launches: makes each launch once.
        folder: below which each run has a folder of its own.
    """

    def __init__(self, launches: LaunchCache, model: TinyModel, folder: Path) -> None:
        self._launch, self._model, self._folder = launches, model, folder
        self._known: dict[tuple[str, str], PPORun] = {}

    def __call__(self, subject: str, strategy: str) -> PPORun:
        """The run of ``subject`` under ``strategy`` on two ranks.

        Raises:
            Absent: see :func:`require_ppo`.
            LaunchError: the launch did not return.
        """
        require_ppo(strategy)
        key = (subject, strategy)
        if key not in self._known:
            self._known[key] = self._train(subject, strategy)
        return self._known[key]

    def read_back(self, subject: str, strategy: str) -> PPORun:
        """The same, and what it saved was read in a fresh process: one for all runs that wait for it.

        Raises:
            Absent, LaunchError: as above.
        """
        requested = self(subject, strategy)
        # test_construction.py comes before test_saving.py, and trains most of them: a launch reads all that there are.
        unread = {"/".join(key): run for key, run in self._known.items() if run.reloaded is None}
        saved = {f"{key}/{stage}": path for key, run in unread.items() for stage, path in run.saved.items()}
        read = self._launch(ppo_stages.reload, saved, strategy="single").values[0] if saved else {}
        for key, run in unread.items():
            run.reloaded = {stage: read[f"{key}/{stage}"] for stage in run.saved}
        return requested

    def saved(self, subject: str, strategy: str, issue: KnownIssue) -> Finding:
        """Whether what a run saved reads back; the corrected trainer must have trained as well."""
        run = self.read_back(subject, strategy)
        verdict = saves_verdict(run, ppo_stages.SAVES, issue)
        if subject == "corrected":
            assert run.trained, run
        return Finding(verdict, run.evidence(ppo_stages.SAVES))

    def _train(self, subject: str, strategy: str) -> PPORun:
        folder = self._folder / f"{subject}-{strategy}"
        folder.mkdir(exist_ok=True)
        # What fails before it has wrapped anything is judged by its failure.
        result = self._launch(ppo_stages.run, subject, self._model, folder, strategy=strategy, sharded=False)
        ranks = result.values
        stages = dict.fromkeys(stage for rank in ranks for stage in rank["failures"])
        failures = {stage: _of_all_ranks([rank["failures"].get(stage) for rank in ranks]) for stage in stages}
        return PPORun(
            failures=failures,
            log=ranks[0].get("log", []),
            policy_tensors=ranks[0].get("policy_tensors", 0),
            moved_tensors=ranks[0].get("moved_tensors", 0),
            engines=result.ranks[0].proof["engines"],
            saved={stage: path for stage, path in ranks[0]["saved"].items() if stage not in failures},
        )


def _of_all_ranks(failures: Sequence[Mapping[str, str] | None]) -> dict[str, Any]:
    """What the first rank raised in a stage, and in ``other_ranks`` what others raised that says something else.

    That another rank had ended is kept only where no rank said anything else.

    Args:
        failures: by rank; ``None`` where it did not fail.
    """
    # Reversed, so that the first of the ranks with the same text stays.
    by_text = {_text(failure): (str(rank), failure) for rank, failure in reversed([*enumerate(failures)]) if failure}
    (_, first), *others = [by_text[text] for text in distinct(_text(failure) for failure in failures if failure)]
    return {**first, **({"other_ranks": {rank: dict(failure) for rank, failure in others}} if others else {})}


def _text(failure: Mapping[str, str]) -> str:
    return _location.with_location(f"{failure['type']}: {failure['text']}", failure["location"])


def _texts(failure: Mapping[str, Any]) -> list[str]:
    return [_text(raised) for raised in (failure, *failure.get("other_ranks", {}).values())]


def greatest_difference_of_logs(log: Log, other: Log) -> float:
    """The greatest difference of any number; infinity if one is NaN, or only one of the two logs has it."""
    return largest(
        abs(entry.get(key, math.nan) - same.get(key, math.nan))
        for entry, same in zip(log, other, strict=True)
        for key in entry.keys() | same.keys()
    )


def require_ppo(strategy: str = "single") -> None:
    """
    Raises:
        Absent: this release of TRL has no PPO trainer, or this stack lacks what PPO needs to train under the strategy.
    """
    if reason := ppo.absence():
        raise Absent(reason)
    for need in family_of(strategy).needs:
        if "ppo" not in need.except_for and not stack.satisfied({need.package: f">={need.since}"}, stack.installed()):
            raise Absent(need.reason)


def saves_verdict(run: PPORun, stages: Iterable[str], issue: KnownIssue) -> Verdict:
    """``ok`` where every folder that was written reads bitwise equal, ``silent`` where one does not.

    A stage that a release has not (0.9.6 writes no checkpoints) is passed over, but there must be one.
    """
    stages = list(stages)
    failed = run.failed([_BEFORE_ALL, *stages], issue)
    if failed is not None:
        return failed.verdict
    read = [reading for stage, reading in (run.reloaded or {}).items() if stage in stages]
    if not read:  # it was never built
        return Verdict.ERROR
    return Verdict.OK if all(0 < reading["tensors"] == reading["equal"] for reading in read) else Verdict.SILENT
