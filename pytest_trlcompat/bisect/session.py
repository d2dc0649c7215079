"""The session of one bisect command: it tests candidates, judges them and keeps every step.

Imports only the standard library and this package.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from pytest_trlcompat.bisect.candidates import Candidate, PreparedCandidate, Source
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.failure_signature import FailureSignature, Judgement, judge
from pytest_trlcompat.bisect.journal import Journal
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.predicate import Predicate
from pytest_trlcompat.bisect.progress import Progress
from pytest_trlcompat.bisect.search import Answer, Policy
from pytest_trlcompat.matrix.errors import Unreachable, Untestable

__all__ = ["BisectSession", "Evaluation", "Step", "evaluate"]


@dataclass(frozen=True)
class Step:
    """One tested candidate, as the result lists it.

    Attributes:
        kept: it was not run by this command, but found in the journal.
    """

    phase: str
    candidate: Candidate
    identity: str
    answer: Answer
    why: str
    observation: Observation
    kept: bool


@dataclass(frozen=True)
class Evaluation:
    """What was observed of a candidate.

    Attributes:
        reused: the label of the candidate whose observation this is; ``None`` when it was run now.
    """

    identity: str
    observation: Observation
    reused: str | None = None


@dataclass
class BisectSession:
    """One predicate and one journal, for all searches of a command.

    Attributes:
        noise: probability that an answer is wrong, for observations that do not name a higher one.
        expected: what the failure at the bad end must contain.
        checks: a shell pattern; other checks (strategies of a suite) are kept in the journal but not looked at.
        steps: all steps of all searches of this command, in the order in which they became known.
    """

    predicate: Predicate
    journal: Journal
    policy: Policy
    progress: Progress
    jobs: int = 1
    noise: float = 0.0
    expected: str = ""
    checks: str = "*"
    steps: list[Step] = field(default_factory=list)

    def judge_candidate(
        self, phase: str, source: Source, candidate: Candidate, signature: FailureSignature | None
    ) -> Judgement:
        """Judge one candidate outside of a search, testing it unless the journal has it."""
        identity = self.journal.identity(candidate.key)
        known = self.journal.observations(identity)
        if identity is not None and known:
            return self.add_step(phase, candidate, identity, known[-1], signature, kept=True)
        self.progress.testing(candidate)
        done = self.evaluate(source, candidate)
        self.keep(candidate, done)
        kept = done.reused is not None
        return self.add_step(phase, candidate, done.identity, done.observation, signature, kept=kept)

    def evaluate(self, source: Source, candidate: Candidate, *, again: bool = False) -> Evaluation:
        """
        Raises:
            BisectError: when the registry cannot be reached.
        """
        try:
            return evaluate(source, candidate, self.predicate, self.journal, again=again)
        except Unreachable as error:
            raise BisectError(
                f"{candidate.label}: the package registry cannot be reached, and the cache lacks what is needed, so "
                "this candidate could not be tested. Every finished step is kept: run the same command again when "
                f"there is a network.\n{error}"
            ) from error

    def keep(self, candidate: Candidate, done: Evaluation) -> None:
        """Write what was observed into the journal."""
        if done.reused is None:
            self.journal.add(candidate.key, candidate.label, done.identity, done.observation)
        else:
            self.journal.alias(candidate.key, done.identity)

    def add_step(
        self,
        phase: str,
        candidate: Candidate,
        identity: str,
        observation: Observation,
        signature: FailureSignature | None,
        *,
        kept: bool,
        reused: str | None = None,
    ) -> Judgement:
        observation = observation.only(self.checks)
        judgement = judge(observation, signature)
        certain = signature is not None or not observation.conclusive
        self.progress.tested(candidate, judgement, observation, certain=certain, kept=kept, reused=reused)
        self.steps.append(Step(phase, candidate, identity, judgement.answer, judgement.why, observation, kept))
        return judgement

    def judge_again(self, signature: FailureSignature) -> None:
        """Judge anew what was tested before the signature was known: the first end."""
        for number, step in enumerate(self.steps):
            judgement = judge(step.observation, signature)
            self.steps[number] = dataclasses.replace(step, answer=judgement.answer, why=judgement.why)


def evaluate(
    source: Source, candidate: Candidate, predicate: Predicate, journal: Journal, *, again: bool = False
) -> Evaluation:
    """Observe a candidate, or take the observation of another one that has the same versions.

    Args:
        again: run it even if it was observed before.

    Raises:
        Unreachable: when the registry cannot be reached, so that nothing is known of the candidate itself.
        BisectError: when the arguments make no sense.
    """
    started = time.monotonic()
    try:
        prepared = source.prepare(candidate)
    except Unreachable:
        raise
    except Untestable as error:
        seconds = time.monotonic() - started
        observation = Observation(reason=f"untestable: {error}", build_seconds=seconds)
        return Evaluation(f"unresolved {candidate.key}", observation)
    if prepared.lock is not None:
        journal.keep_lock(prepared.identity, prepared.lock)
    known = journal.observations(prepared.identity)
    if known and not again:
        first = journal.first(prepared.identity)
        assert first is not None
        return Evaluation(prepared.identity, known[-1], first.label)
    return Evaluation(prepared.identity, _observe(prepared, predicate, journal.folder, started))


def _observe(prepared: PreparedCandidate, predicate: Predicate, folder: Path, started: float) -> Observation:
    build_messages: list[str] = []
    built = started
    try:
        with prepared.context(build_messages.append) as context:
            built = time.monotonic()
            (folder / "work").mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(dir=folder / "work", prefix=f"run-{os.getpid()}-"))
            try:
                observation = predicate.observe(context, work)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            ended = time.monotonic()
    except Unreachable:
        raise
    except Untestable as error:
        return Observation(reason=f"untestable: {error}", build_seconds=time.monotonic() - started)
    reused = not build_messages
    return dataclasses.replace(observation, seconds=ended - built, build_seconds=built - started, reused=reused)
