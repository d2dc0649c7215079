"""The nodes of a cluster as a command sees them: which have an environment, and which get nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pytest_trlcompat.matrix.engines.messages import NodeReport
from pytest_trlcompat.matrix.errors import MatrixError

__all__ = ["ATTEMPTS", "Nodes", "Troubles"]

ATTEMPTS = 2
"""Runs of a cell or a candidate whose nodes or workers were lost, or that could not be started; then it is given up."""


class Nodes:
    """The nodes of a cluster.

    Args:
        reports: what they said of themselves at the beginning; none where the cluster starts nodes by demand.
        things: what they run, in plural: ``"cells"``.
    """

    def __init__(self, reports: Sequence[NodeReport], things: str) -> None:
        self._reports, self._things = reports, things
        self._hosts = {report.node: report.host for report in reports}
        self._avoided = {report.node for report in reports if report.problem}

    def __str__(self) -> str:
        have = sum(len(report.environments) for report in self._reports)
        hosts = ", ".join(sorted(report.host for report in self._reports))
        return f"{_count(len(self._reports), 'node')} with {_count(have, 'environment')}: {hosts}"

    @property
    def avoided(self) -> list[str]:
        """Those that get nothing more."""
        return sorted(self._avoided)

    @property
    def usable(self) -> bool:
        """Whether any is left that may run something."""
        return not self._reports or bool(set(self._hosts) - self._avoided)

    def host(self, node: str) -> str:
        """The machine of a node, as texts name it."""
        return self._hosts.get(node) or "a node"

    def avoid(self, node: str) -> None:
        """Give a node nothing more; nothing happens where it is not known which it was."""
        if node:
            self._avoided.add(node)

    def having(self, environment: str | None) -> list[str]:
        """Those that have built an environment and get something."""
        owners = [report.node for report in self._reports if environment in report.environments]
        return [node for node in owners if node not in self._avoided]

    def check(self, say: Callable[[str], None]) -> None:
        """Tell which nodes get nothing, and why.

        Raises:
            MatrixError: no node can run anything.
        """
        for report in self._reports:
            if report.problem:
                say(f"{report.host} gets no {self._things}: {report.problem}")
        if not self.usable:
            raise MatrixError(f"no node can run {self._things}, for the reasons above")


@dataclass
class Troubles:
    """Why the runs of one cell or candidate came to nothing, each with its machine."""

    reasons: list[str] = field(default_factory=list)

    def add(self, host: str, why: str) -> bool:
        """Take one more; returns whether another run is left."""
        self.reasons.append(f"{host}: {why}")
        return len(self.reasons) < ATTEMPTS

    @property
    def last(self) -> str:
        return self.reasons[-1]

    def __str__(self) -> str:
        return "; ".join(self.reasons)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
