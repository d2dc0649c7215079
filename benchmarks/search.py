"""Candidates that a search asks, against the bound of information: ``python benchmarks/search.py``.

For lists of several lengths in which a share of the candidates cannot tell, over every place of the turn. The ends,
which are asked first, are not counted. Imports nothing of the stack.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection

from pytest_trlcompat.bisect.search import Answer, Ask, Policy, Vote, plan

_SEED = 0


def asked(count: int, turn: int, unknown: Collection[int]) -> tuple[int, int]:
    """Questions between the ends, and how many of them could not be answered."""
    votes: dict[int, list[Vote]] = {}
    policy = Policy()
    while isinstance(step := plan(count, votes, policy), Ask):
        index = step.index
        answer = Answer.UNKNOWN if index in unknown else Answer.GOOD if index < turn else Answer.BAD
        votes[index] = [Vote(answer)]
    return len(votes) - 2, sum(index in unknown for index in votes)


def main() -> None:
    generator = random.Random(_SEED)
    print("| candidates | cannot tell | bound | asked, mean | most | of these could not tell, mean |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count in (17, 60, 240):
        for name, unknown in (
            ("none", frozenset[int]()),
            ("5 % at random", frozenset(index for index in range(1, count - 1) if generator.random() < 0.05)),
            ("a range of 20 %", frozenset(range(2 * count // 5, 3 * count // 5))),
        ):
            runs = [asked(count, turn, unknown) for turn in range(1, count)]
            questions = [number for number, _ in runs]
            skipped = statistics.mean(skips for _, skips in runs)
            bound = math.log2(count - 1)
            mean = statistics.mean(questions)
            print(f"| {count} | {name} | {bound:.1f} | {mean:.1f} | {max(questions)} | {skipped:.1f} |")


if __name__ == "__main__":
    main()
