"""Three answers to whether something holds of a training, and how several of them make one.

It is Kleene's logic: what is not known decides only where nothing else does. Imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Answer", "Bite", "all_of", "any_of", "negated"]


class Bite(Enum):
    """Whether a known issue bites a training."""

    BITES = "bites"
    CANNOT_TELL = "cannot tell"
    DOES_NOT = "does not"


@dataclass(frozen=True)
class Answer:
    """An answer, and on what it rests.

    Attributes:
        because: values of the training that decided, as texts: ``adapter.type='lora'``.
        look: where the answer is ``cannot tell``, what to look at; else empty.
    """

    bite: Bite
    because: tuple[str, ...] = ()
    look: tuple[str, ...] = ()

    @property
    def bites(self) -> bool:
        return self.bite is Bite.BITES

    @property
    def is_open(self) -> bool:
        """Whether it cannot be told from here."""
        return self.bite is Bite.CANNOT_TELL


def all_of(answers: Iterable[Answer]) -> Answer:
    """Whether all hold: one that does not decides, then one that cannot be told. Nothing to hold is true."""
    return _deciding(list(answers), (Bite.DOES_NOT, Bite.CANNOT_TELL), Bite.BITES)


def any_of(answers: Iterable[Answer]) -> Answer:
    """Whether one holds: one that does decides, then one that cannot be told. Nothing to choose from is false."""
    return _deciding(list(answers), (Bite.BITES, Bite.CANNOT_TELL), Bite.DOES_NOT)


def negated(answer: Answer) -> Answer:
    """The opposite; what cannot be told stays so."""
    opposite = {Bite.BITES: Bite.DOES_NOT, Bite.DOES_NOT: Bite.BITES, Bite.CANNOT_TELL: Bite.CANNOT_TELL}
    return Answer(opposite[answer.bite], answer.because, answer.look)


def _deciding(answers: list[Answer], decisive: tuple[Bite, ...], otherwise: Bite) -> Answer:
    for bite in (*decisive, otherwise):
        deciding = [answer for answer in answers if answer.bite is bite]
        if deciding:
            because = dict.fromkeys(text for answer in deciding for text in answer.because)
            look = dict.fromkeys(text for answer in deciding for text in answer.look)
            return Answer(bite, tuple(because), tuple(look))
    return Answer(otherwise)
