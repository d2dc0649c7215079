"""The session of one bisect command: it tests candidates, judges them and keeps every step."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pytest_trlcompat.bisect.candidates import Candidate, PreparedCandidate, Source
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.failure_signature import FailureSignature, Judgement, judge
from pytest_trlcompat.bisect.journal import Journal
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.predicate import Predicate
from pytest_trlcompat.bisect.progress import Progress
from pytest_trlcompat.bisect.search import Answer, Policy
from pytest_trlcompat.bisect.workers import SerialWorker
from pytest_trlcompat.matrix.errors import Unreachable, Untestable

__all__ = ["BisectSession", "CandidateTest", "Evaluation", "Step", "Workers", "observe"]


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
    from_journal: bool


@dataclass(frozen=True)
class Evaluation:
    """What was observed of a candidate.

    Attributes:
        reused: the label of the candidate whose observation this is; ``None`` when it was run now.
    """

    identity: str
    observation: Observation
    reused: str | None = None


@dataclass(frozen=True)
class CandidateTest:
    """The test of one candidate: its versions are resolved, then it is observed.

    Attributes:
        again: observe it even if that was done before.
    """

    source: Source
    candidate: Candidate
    predicate: Predicate
    journal: Journal
    again: bool = False

    def __call__(self) -> Evaluation:
        """Do all of it here.

        Raises:
            BisectError: when the registry cannot be reached, or the arguments make no sense.
        """
        started = time.monotonic()
        prepared = self.prepare()
        if isinstance(prepared, Evaluation):
            return prepared
        try:
            return Evaluation(prepared.identity, observe(prepared, self.predicate, self.journal.folder, started))
        except Unreachable as error:
            raise self.unreachable(error) from error

    def prepare(self) -> PreparedCandidate | Evaluation:
        """Resolve its versions; an evaluation, where those cannot be had, or were observed before.

        Raises:
            BisectError: as above.
        """
        started = time.monotonic()
        try:
            prepared = self.source.prepare(self.candidate)
        except Unreachable as error:
            raise self.unreachable(error) from error
        except Untestable as error:
            seconds = time.monotonic() - started
            observation = Observation(reason=f"untestable: {error}", build_seconds=seconds)
            return Evaluation(f"unresolved {self.candidate.key}", observation)
        # Also where it was observed before: what narrows a result down reads the locks of both ends.
        if prepared.lock is not None:
            self.journal.keep_lock(prepared.identity, prepared.lock)
        known = self.journal.observations(prepared.identity)
        if known and not self.again:
            first = self.journal.first(prepared.identity)
            assert first is not None
            return Evaluation(prepared.identity, known[-1], first.label)
        return prepared

    def unreachable(self, error: object) -> BisectError:
        """The error of a candidate of which nothing is known, since the registry cannot be reached."""
        return BisectError(
            f"{self.candidate.label}: the package registry cannot be reached, and the cache lacks what is needed, so "
            "this candidate could not be tested. Every finished step is kept: run the same command again when "
            f"there is a network.\n{error}"
        )


class Workers(Protocol):
    """Tests candidates, and returns what came of them as it comes; see :mod:`.workers` and :mod:`.node_workers`."""

    def running(self) -> set[int]: ...

    def start(self, key: int, test: CandidateTest, /) -> None: ...

    def next(self) -> tuple[int, Evaluation]:
        """Wait for a result; an exception of the test is raised here."""
        ...

    def stop(self, keys: Iterable[int]) -> None: ...


@dataclass
class BisectSession:
    """One predicate and one journal, for all searches of a command.

    Attributes:
        workers: makes what tests candidates.
        jobs: candidates that are tested at a time.
        noise: probability that an answer is wrong, for observations that do not name a higher one.
        expected: what the failure at the bad end must contain.
        checks: a shell pattern; other checks (strategies of a suite) are kept in the journal but not looked at.
        steps: all steps of all searches of this command, in the order in which they became known.
    """

    predicate: Predicate
    journal: Journal
    policy: Policy
    progress: Progress
    workers: Callable[[], Workers] = SerialWorker
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
            return self.add_step(phase, candidate, identity, known[-1], signature, from_journal=True)
        self.progress.testing(candidate)
        workers = self.workers()
        try:
            workers.start(0, self.test(source, candidate))
            _, done = workers.next()
        finally:
            workers.stop(workers.running())
        self.keep(candidate, done)
        from_journal = done.reused is not None
        return self.add_step(phase, candidate, done.identity, done.observation, signature, from_journal=from_journal)

    def test(self, source: Source, candidate: Candidate, *, again: bool = False) -> CandidateTest:
        return CandidateTest(source, candidate, self.predicate, self.journal, again)

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
        from_journal: bool,
        reused: str | None = None,
    ) -> Judgement:
        observation = observation.only(self.checks)
        judgement = judge(observation, signature)
        certain = signature is not None or not observation.conclusive
        self.progress.tested(
            candidate, judgement, observation, certain=certain, from_journal=from_journal, reused=reused
        )
        self.steps.append(Step(phase, candidate, identity, judgement.answer, judgement.why, observation, from_journal))
        return judgement

    def judge_again(self, signature: FailureSignature) -> None:
        """Judge anew what was tested before the signature was known: the first end."""
        for number, step in enumerate(self.steps):
            judgement = judge(step.observation, signature)
            self.steps[number] = dataclasses.replace(step, answer=judgement.answer, why=judgement.why)


def observe(prepared: PreparedCandidate, predicate: Predicate, folder: Path, started: float) -> Observation:
    """Make a candidate's environment, and observe it.

    Args:
        folder: for files of the predicate.
        started: when its versions began to be resolved, in seconds of the monotonic clock.

    Raises:
        Unreachable: when the registry cannot be reached, so that nothing is known of the candidate itself.
    """
    build_messages: list[str] = []
    built = started
    try:
        with prepared.context(build_messages.append) as context:
            built = time.monotonic()
            (folder / "work").mkdir(parents=True, exist_ok=True)
            # By the number in its name leftovers knows whose run it was.
            work = Path(tempfile.mkdtemp(dir=folder / "work", prefix=f"run-{os.getpid()}-"))
            try:
                observation = predicate.observe(context, work)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            ended = time.monotonic()
    # Also an Untestable, but one that says nothing about the candidate.
    except Unreachable:
        raise
    except Untestable as error:
        return Observation(reason=f"untestable: {error}", build_seconds=time.monotonic() - started)
    reused = not build_messages
    return dataclasses.replace(observation, seconds=ended - built, build_seconds=built - started, reused=reused)
