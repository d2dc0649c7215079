"""Candidates that a search tests, compared with the information bound: ``python benchmarks/search.py``.

For ranges of several lengths in which a share of the candidates is inconclusive, over every position of the change. The
ends, which are tested first, are not counted. Imports nothing of the stack.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection

from pytest_trlcompat.bisect.search import Answer, NextTest, Policy, Vote, plan

_SEED = 0


def count_tests(count: int, change: int, inconclusive: Collection[int]) -> tuple[int, int]:
    """Candidates tested between the ends, and how many of them were inconclusive."""
    votes: dict[int, list[Vote]] = {}
    policy = Policy()
    while isinstance(step := plan(count, votes, policy), NextTest):
        index = step.index
        answer = Answer.INCONCLUSIVE if index in inconclusive else Answer.GOOD if index < change else Answer.BAD
        votes[index] = [Vote(answer)]
    return len(votes) - 2, sum(index in inconclusive for index in votes)


def main() -> None:
    generator = random.Random(_SEED)
    print("| candidates | inconclusive | bound | tested, mean | most | of these inconclusive, mean |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count in (17, 60, 240):
        for name, inconclusive in (
            ("none", frozenset[int]()),
            ("5 % at random", frozenset(index for index in range(1, count - 1) if generator.random() < 0.05)),
            ("a range of 20 %", frozenset(range(2 * count // 5, 3 * count // 5))),
        ):
            runs = [count_tests(count, change, inconclusive) for change in range(1, count)]
            tests = [number for number, _ in runs]
            skipped = statistics.mean(skips for _, skips in runs)
            bound = math.log2(count - 1)
            mean = statistics.mean(tests)
            print(f"| {count} | {name} | {bound:.1f} | {mean:.1f} | {max(tests)} | {skipped:.1f} |")


if __name__ == "__main__":
    main()
