"""The bisector: one search over one source of candidates, step by step, each step kept as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_trlcompat.bisect.candidates import Candidate, Source
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.failure_signature import FailureSignature, NoSignature, judge, signature_of
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.search import Answer, Found, InvalidRange, NextTest, RangeProblem, Vote, plan
from pytest_trlcompat.bisect.session import BisectSession, Evaluation, Workers

__all__ = ["ChangePoint", "bisect"]

Votes = dict[int, list[Vote]]


@dataclass(frozen=True)
class ChangePoint:
    """Where the answer changes.

    Attributes:
        before: the last candidate that answers as the first one does.
        after: the first candidate that answers as the last one does.
        inconclusive: candidates between the two.
        signature: what "bad" means; also used by the searches that narrow this result down.
        count: candidates in the range.
        tested: candidates that were tested, the ends among them.
        skipped: those of them that were inconclusive.
    """

    before: Candidate
    after: Candidate
    before_identity: str
    after_identity: str
    inconclusive: tuple[Candidate, ...]
    confidence: float
    signature: FailureSignature
    count: int
    tested: int
    skipped: int


def bisect(
    session: BisectSession, phase: str, source: Source, signature: FailureSignature | None = None
) -> ChangePoint:
    """Find where the answer changes.

    Args:
        signature: where an earlier search has found it; otherwise the two ends define it.

    Raises:
        BisectError: when the ends do not differ as they should, or the registry cannot be reached.
    """
    return _Bisector(session, phase, source, signature).run()


@dataclass
class _Bisector:
    session: BisectSession
    phase: str
    source: Source
    signature: FailureSignature | None

    def __post_init__(self) -> None:
        self.candidates: Sequence[Candidate] = self.source.candidates
        self.count = len(self.candidates)
        self.reported: set[int] = set()

    def run(self) -> ChangePoint:
        if self.count < 2:
            raise BisectError(self._invalid_range(RangeProblem.TOO_FEW))
        workers = self.session.workers()
        try:
            while True:
                self._define_signature()
                # From the journal each time, so that a search that was interrupted is planned like this one.
                votes = self._votes()
                self._report_kept(votes)
                step = plan(self.count, votes, self.session.policy)
                if isinstance(step, Found):
                    return self._change_point(step, votes)
                if isinstance(step, InvalidRange):
                    raise BisectError(self._invalid_range(step.problem, step.index))
                self._start(workers, step, votes)
                index, done = workers.next()
                self._finish(index, done)
        finally:
            workers.stop(workers.running())
            self.source.clean_up()

    # Testing

    def _start(self, workers: Workers, step: NextTest, votes: Votes) -> None:
        """Run this step's candidate, and as many of the next possible ones as there are jobs."""
        planned = self._next_possible(step, votes)
        # The last answer has ruled these out.
        workers.stop(workers.running() - set(planned))
        for index in planned:
            if index not in workers.running():
                candidate = self.candidates[index]
                if index == step.index:
                    self.session.progress.testing(candidate, step.steps_left, again=step.again)
                else:
                    self.session.progress.testing_ahead(candidate)
                again = bool(votes.get(index))
                workers.start(index, self.session.test(self.source, candidate, again=again))

    def _next_possible(self, step: NextTest, votes: Votes) -> list[int]:
        """This step's candidate, and those that would come next after either answer."""
        planned, futures = [step.index], [(step.index, votes)]
        while futures and len(planned) < self.session.jobs:
            # Breadth first: the sooner a test may come, the likelier it is needed.
            index, known = futures.pop(0)
            for answer in (Answer.GOOD, Answer.BAD):
                # As doubtful as a real answer is at least.
                assumed = {**known, index: [*known.get(index, []), Vote(answer, self.session.noise)]}
                then = plan(self.count, assumed, self.session.policy)
                if isinstance(then, NextTest) and then.index not in planned and not then.again:
                    planned.append(then.index)
                    futures.append((then.index, assumed))
        # The last candidate may have brought one for either answer.
        return planned[: self.session.jobs]

    def _finish(self, index: int, done: Evaluation) -> None:
        candidate = self.candidates[index]
        # Before anything else, since the next line may end the search, and no step is to be run twice.
        self.session.keep(candidate, done)
        self._define_signature()
        self._report(index, done.identity, done.observation, from_journal=done.reused is not None, reused=done.reused)

    # What is known

    def _observations(self, index: int) -> list[Observation]:
        journal = self.session.journal
        observations = journal.observations(journal.identity(self.candidates[index].key))
        return [observation.only(self.session.checks) for observation in observations]

    def _votes(self) -> Votes:
        votes = {}
        for index in range(self.count):
            of_candidate = [self._vote(observation) for observation in self._observations(index)]
            if of_candidate:
                votes[index] = of_candidate
        return votes

    def _vote(self, observation: Observation) -> Vote:
        return Vote(judge(observation, self.signature).answer, max(self.session.noise, observation.doubt))

    def _report_kept(self, votes: Votes) -> None:
        """Report the steps of earlier commands, once, when both ends are known."""
        if self.signature is None:
            return
        for index in sorted(set(votes) - self.reported):
            identity = self.session.journal.identity(self.candidates[index].key)
            assert identity is not None
            self._report(index, identity, self._observations(index)[-1], from_journal=True)

    def _report(
        self, index: int, identity: str, observation: Observation, *, from_journal: bool, reused: str | None = None
    ) -> None:
        self.reported.add(index)
        self.session.add_step(
            self.phase,
            self.candidates[index],
            identity,
            observation,
            self.signature,
            from_journal=from_journal,
            reused=reused,
        )

    def _define_signature(self) -> None:
        """As soon as both ends are known, unless an earlier search has done it."""
        if self.signature is not None:
            return
        first, last = self._observations(0), self._observations(self.count - 1)
        if not first or not last or not first[-1].conclusive or not last[-1].conclusive:
            return
        good, bad = (last[-1], first[-1]) if self.session.policy.find_fix else (first[-1], last[-1])
        try:
            signature = signature_of(good, bad)
        except NoSignature as error:
            raise BisectError(self._invalid_range(error.problem)) from error
        if self.session.expected and self.session.expected not in str(signature):
            raise BisectError(f"--expect {self.session.expected!r}: the bad end fails differently: {signature}")
        self.signature = signature
        self.session.progress.signature(signature)
        self.session.judge_again(signature)

    # The end

    def _change_point(self, change: Found, votes: Votes) -> ChangePoint:
        assert self.signature is not None
        journal = self.session.journal
        before, after = self.candidates[change.before], self.candidates[change.after]
        return ChangePoint(
            before=before,
            after=after,
            before_identity=journal.identity(before.key) or "",
            after_identity=journal.identity(after.key) or "",
            inconclusive=tuple(self.candidates[change.before + 1 : change.after]),
            confidence=change.confidence,
            signature=self.signature,
            count=self.count,
            tested=len(votes),
            skipped=sum(
                all(vote.answer is Answer.INCONCLUSIVE for vote in of_candidate) for of_candidate in votes.values()
            ),
        )

    def _invalid_range(self, problem: RangeProblem, index: int | None = None) -> str:
        """What is wrong with the range, and what to do."""
        if problem is RangeProblem.TOO_FEW:
            only = f", only {self.candidates[0].label}" if self.candidates else ""
            return f"there is nothing to search{only}; name two different ends"
        first, last = self.candidates[0], self.candidates[-1]
        find_fix = self.session.policy.find_fix
        good, bad = (last, first) if find_fix else (first, last)
        outcome = {end: self._outcome(number) for end, number in ((first, 0), (last, self.count - 1))}
        ends = f"{good.label} (--good) is {outcome[good]}; {bad.label} (--bad) is {outcome[bad]}"
        if problem is RangeProblem.SWAPPED:
            option = "remove --find-fix" if find_fix else "add --find-fix"
            return f"good and bad are swapped. {ends}. Swap them, and {option}"
        if problem is RangeProblem.BOTH_GOOD:
            return f"both ends are good, so there is no change to find. {ends}. Name a --bad end that is bad"
        if problem is RangeProblem.BOTH_BAD:
            return f"both ends are bad, so there is no change to find. {ends}. Name a --good end that is good"
        unclear = [end.label for end in (first, last) if outcome[end].startswith(str(Answer.INCONCLUSIVE))]
        verb = "is" if len(unclear) == 1 else "are"
        return f"{' and '.join(unclear)} {verb} inconclusive, so the search cannot start. {ends}. Name another end"

    def _outcome(self, number: int) -> str:
        observations = self._observations(number)
        if not observations:
            return "not tested"
        judgement = judge(observations[-1], None)
        return f"{judgement.answer} ({judgement.why})"
