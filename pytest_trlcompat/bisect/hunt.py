"""The hunt: one search over one source of candidates, step by step, each step kept as it comes.

Imports only the standard library and this room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from pytest_trlcompat.bisect.candidates.base import Candidate, Source
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.examine import Examined, examine
from pytest_trlcompat.bisect.journal import Journal
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.predicate import Predicate
from pytest_trlcompat.bisect.progress import Progress
from pytest_trlcompat.bisect.search import Answer, Ask, Found, Policy, Refusal, Refused, Vote, plan
from pytest_trlcompat.bisect.standard import Judgement, NoStandard, Standard, judge, set_standard
from pytest_trlcompat.bisect.workers import Forked, Here, Workers
from pytest_trlcompat.matrix.errors import Unreachable

__all__ = ["Hunt", "Step", "Turn"]


@dataclass(frozen=True)
class Step:
    """One examination, as the result tells it.

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
class Turn:
    """Where a search ended.

    Attributes:
        standard: what "bad" means; carried over to the searches that narrow this result down.
        unknown: candidates between the two, which cannot tell.
        count: candidates that were there to search.
        asked: candidates that were asked, the ends among them.
        skipped: those of them that could not tell.
    """

    before: Candidate
    after: Candidate
    before_identity: str
    after_identity: str
    unknown: tuple[Candidate, ...]
    confidence: float
    standard: Standard
    count: int
    asked: int
    skipped: int


@dataclass
class Hunt:
    """Searches with one predicate and one journal.

    Attributes:
        noise: probability that an answer is wrong, for observations that do not say more themselves.
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

    def search(self, phase: str, source: Source, standard: Standard | None = None) -> Turn:
        """Find where the answer turns.

        Args:
            standard: where an earlier search has set it; else the two ends do.

        Raises:
            BisectError: when the ends do not differ as they should, or the registry cannot be reached.
        """
        return _Search(self, phase, source, standard).run()

    def examine(self, phase: str, source: Source, candidate: Candidate, standard: Standard | None) -> Judgement:
        """Judge one candidate, outside of a search."""
        identity = self.journal.identity(candidate.key)
        known = self.journal.observations(identity)
        if identity is not None and known:
            return self.note(phase, candidate, identity, known[-1], standard, kept=True)
        self.progress.testing(candidate)
        done = self._examined(candidate, self._run(source, candidate, again=False))
        return self.note(phase, candidate, done.identity, done.observation, standard, kept=done.reused is not None)

    def note(
        self,
        phase: str,
        candidate: Candidate,
        identity: str,
        observation: Observation,
        standard: Standard | None,
        *,
        kept: bool,
        reused: str | None = None,
    ) -> Judgement:
        observation = observation.only(self.checks)
        judgement = judge(observation, standard)
        certain = standard is not None or not observation.told
        self.progress.tested(candidate, judgement, observation, certain=certain, kept=kept, reused=reused)
        self.steps.append(Step(phase, candidate, identity, judgement.answer, judgement.why, observation, kept))
        return judgement

    def judge_again(self, standard: Standard) -> None:
        """Hold the first end, which was seen before there was a standard, against it."""
        for number, step in enumerate(self.steps):
            judgement = judge(step.observation, standard)
            self.steps[number] = dataclasses.replace(step, answer=judgement.answer, why=judgement.why)

    def workers(self) -> Workers[int]:
        return Here() if self.jobs == 1 else Forked()

    def _run(self, source: Source, candidate: Candidate, *, again: bool) -> Examined:
        try:
            return examine(source, candidate, self.predicate, self.journal, again=again)
        except Unreachable as error:
            raise BisectError(
                f"{candidate.label}: the package registry cannot be reached and the cache does not do, so nothing is "
                f"known of it; every finished step is kept, run the same command again with a network.\n{error}"
            ) from error

    def _examined(self, candidate: Candidate, done: Examined) -> Examined:
        if done.reused is None:
            self.journal.add(candidate.key, candidate.label, done.identity, done.observation)
        else:
            self.journal.alias(candidate.key, done.identity)
        return done


@dataclass
class _Search:
    hunt: Hunt
    phase: str
    source: Source
    standard: Standard | None

    def __post_init__(self) -> None:
        self.candidates: Sequence[Candidate] = self.source.candidates
        self.count = len(self.candidates)
        self.noted: set[int] = set()
        self.fresh: dict[int, Examined] = {}

    def run(self) -> Turn:
        self._may_be_searched()
        workers = self.hunt.workers()
        try:
            while True:
                self._set_standard()
                votes = self._votes()
                self._note_kept(votes)
                step = plan(self.count, votes, self.hunt.policy)
                if isinstance(step, Found):
                    return self._turn(step, votes)
                if isinstance(step, Refused):
                    raise BisectError(self._refusal(step.why, step.index))
                self._start(workers, step, votes)
                index, done = workers.next()
                self._take(index, done)
        finally:
            workers.stop(workers.running())
            self.source.tidy()

    # Asking

    def _start(self, workers: Workers[int], step: Ask, votes: dict[int, list[Vote]]) -> None:
        """Have this step's candidate running, and beside it as many of the next possible ones as there are jobs."""
        wanted = self._ahead(step, votes)
        workers.stop(workers.running() - set(wanted))
        for index in wanted:
            if index not in workers.running():
                candidate = self.candidates[index]
                if index == step.index:
                    self.hunt.progress.testing(candidate, step.steps_left, again=step.again)
                else:
                    self.hunt.progress.ahead(candidate)
                again = bool(votes.get(index))
                workers.start(index, partial(self.hunt._run, self.source, candidate, again=again))

    def _ahead(self, step: Ask, votes: dict[int, list[Vote]]) -> list[int]:
        """This step's candidate, and those that either answer would ask for next."""
        wanted, open_worlds = [step.index], [(step.index, votes)]
        while open_worlds and len(wanted) < self.hunt.jobs:
            index, world = open_worlds.pop(0)
            for answer in (Answer.GOOD, Answer.BAD):
                assumed = {**world, index: [*world.get(index, []), Vote(answer, self.hunt.noise)]}
                then = plan(self.count, assumed, self.hunt.policy)
                if isinstance(then, Ask) and then.index not in wanted and not then.again:
                    wanted.append(then.index)
                    open_worlds.append((then.index, assumed))
        return wanted[: self.hunt.jobs]

    def _take(self, index: int, done: Examined) -> None:
        candidate = self.candidates[index]
        self.hunt._examined(candidate, done)
        self._set_standard()
        self.noted.add(index)
        self.hunt.note(
            self.phase,
            candidate,
            done.identity,
            done.observation,
            self.standard,
            kept=done.reused is not None,
            reused=done.reused,
        )

    # What is known

    def _observations(self, index: int) -> list[Observation]:
        journal = self.hunt.journal
        kept = journal.observations(journal.identity(self.candidates[index].key))
        return [observation.only(self.hunt.checks) for observation in kept]

    def _votes(self) -> dict[int, list[Vote]]:
        votes = {}
        for index in range(self.count):
            given = [self._vote(observation) for observation in self._observations(index)]
            if given:
                votes[index] = given
        return votes

    def _vote(self, observation: Observation) -> Vote:
        return Vote(judge(observation, self.standard).answer, max(self.hunt.noise, observation.doubt))

    def _note_kept(self, votes: dict[int, list[Vote]]) -> None:
        """Tell the steps that an earlier command left, once, when both ends are known."""
        if self.standard is None:
            return
        for index in sorted(set(votes) - self.noted):
            identity = self.hunt.journal.identity(self.candidates[index].key)
            assert identity is not None
            self.noted.add(index)
            self.hunt.note(
                self.phase, self.candidates[index], identity, self._observations(index)[-1], self.standard, kept=True
            )

    def _set_standard(self) -> None:
        """As soon as both ends are known, unless an earlier search has done it."""
        if self.standard is not None:
            return
        first, last = self._observations(0), self._observations(self.count - 1)
        if not first or not last or not first[-1].told or not last[-1].told:
            return
        good, bad = (last[-1], first[-1]) if self.hunt.policy.find_fix else (first[-1], last[-1])
        try:
            standard = set_standard(good, bad)
        except NoStandard as error:
            raise BisectError(self._refusal(error.why)) from error
        if self.hunt.expected and self.hunt.expected not in str(standard):
            raise BisectError(
                f"the failure at the bad end is not the one that was asked for: --expect {self.hunt.expected!r}, "
                f"found: {standard}"
            )
        self.standard = standard
        self.hunt.progress.standard(standard)
        self.hunt.judge_again(standard)

    # The end

    def _may_be_searched(self) -> None:
        if self.count < 2:
            raise BisectError(self._refusal(Refusal.TOO_FEW))

    def _turn(self, found: Found, votes: dict[int, list[Vote]]) -> Turn:
        assert self.standard is not None
        journal = self.hunt.journal
        before, after = self.candidates[found.before], self.candidates[found.after]
        return Turn(
            before=before,
            after=after,
            before_identity=journal.identity(before.key) or "",
            after_identity=journal.identity(after.key) or "",
            unknown=tuple(self.candidates[found.before + 1 : found.after]),
            confidence=found.confidence,
            standard=self.standard,
            count=self.count,
            asked=len(votes),
            skipped=sum(all(vote.answer is Answer.UNKNOWN for vote in given) for given in votes.values()),
        )

    def _refusal(self, why: Refusal, index: int | None = None) -> str:
        if why is Refusal.TOO_FEW:
            only = f": only {self.candidates[0].label}" if self.candidates else ""
            return f"there is nothing to search{only}; name two different ends"
        first, last = self.candidates[0], self.candidates[-1]
        good, bad = (last, first) if self.hunt.policy.find_fix else (first, last)
        saw = {end: self._saw(number) for end, number in ((first, 0), (last, self.count - 1))}
        both = f"{good.label}, given as good: {saw[good]}; {bad.label}, given as bad: {saw[bad]}"
        if why is Refusal.SWAPPED:
            other = "leave --find-fix away" if self.hunt.policy.find_fix else "add --find-fix"
            return f"good and bad are swapped. {both}. Swap them, and {other}"
        if why is Refusal.BOTH_GOOD:
            return f"both ends are good, so nothing turns between them. {both}. Name an end that is bad"
        if why is Refusal.BOTH_BAD:
            return f"both ends are bad, so nothing turns between them. {both}. Name an end that is good"
        blamed = [end.label for end in (first, last) if saw[end].startswith("cannot tell")]
        return f"{' and '.join(blamed)} cannot tell, so the search has no end to start from. {both}. Name another end"

    def _saw(self, number: int) -> str:
        observations = self._observations(number)
        if not observations:
            return "not asked"
        judgement = judge(observations[-1], None)
        return f"{judgement.answer} ({judgement.why})"
