"""The journal: every observation as it comes, one JSON line each, so that nothing is run twice.

One journal for each predicate, shared by all commands that use it, since an observation depends on the versions alone.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_trlcompat._secrets import redacted_values
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.matrix.files import locked, write_whole
from pytest_trlcompat.matrix.locks import Lock, read_lock

__all__ = ["Entry", "Journal"]


@dataclass(frozen=True)
class Entry:
    """One observation of one candidate.

    Attributes:
        candidate: its key.
        identity: candidates that share it share their observations.
        at: when it ended, in UTC.
    """

    candidate: str
    label: str
    identity: str
    observation: Observation
    at: str

    def to_json(self) -> dict[str, Any]:
        return {
            "candidate": self.candidate,
            "label": self.label,
            "identity": self.identity,
            "at": self.at,
            "observation": self.observation.to_json(),
        }


class Journal:
    """Observations of one predicate, in ``steps.jsonl``, and the locks that they were made with, in the same folder."""

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        """
        Args:
            fresh: drop every entry, also of a journal that cannot be read.

        Raises:
            BisectError: for a journal that cannot be read.
        """
        self.folder = folder
        self._path = folder / "steps.jsonl"
        if fresh:
            self._path.unlink(missing_ok=True)
        self._entries: list[Entry] = []
        self._identities: dict[str, str] = {}
        self._read()

    @property
    def entries(self) -> Sequence[Entry]:
        return self._entries

    def identity(self, candidate: str) -> str | None:
        """The identity of a candidate that was prepared before."""
        return self._identities.get(candidate)

    def observations(self, identity: str | None) -> list[Observation]:
        return [entry.observation for entry in self._entries if entry.identity == identity]

    def first(self, identity: str) -> Entry | None:
        """The oldest entry of an identity."""
        return next((entry for entry in self._entries if entry.identity == identity), None)

    def add(self, candidate: str, label: str, identity: str, observation: Observation) -> Entry:
        """Add an observation, without secrets; it is on the disk when this returns."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        without_secrets = Observation.from_json(redacted_values(observation.to_json()))
        entry = Entry(candidate, label, identity, without_secrets, now)
        self._append({"kind": "observation", **entry.to_json()})
        self._remember(entry)
        return entry

    def alias(self, candidate: str, identity: str) -> None:
        """Record that a candidate has the identity of another one, which was observed."""
        if self._identities.get(candidate) != identity:
            self._append({"kind": "alias", "candidate": candidate, "identity": identity})
            self._identities[candidate] = identity

    def keep_lock(self, identity: str, lock: Lock) -> None:
        path = self._lock_path(identity)
        if not path.exists():
            write_whole(path, lock.to_text())

    def lock(self, identity: str | None) -> Lock | None:
        path = self._lock_path(identity or "none")
        return read_lock(path) if path.is_file() else None

    def _lock_path(self, identity: str) -> Path:
        return self.folder / "locks" / f"{identity}.txt"

    def _remember(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._identities[entry.candidate] = entry.identity

    def _append(self, raw: dict[str, Any]) -> None:
        data = (json.dumps(raw) + "\n").encode()
        with self._locked(), open(self._path, "ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                # Without a buffer a full disk may take a part of the line and raise nothing.
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), before)  # half a step is none
                raise

    def _locked(self) -> AbstractContextManager[None]:
        """Keep other commands from the journal for a block."""
        # A file of its own in the same folder, since a repaired journal is another file than before.
        return locked(self.folder / ".steps.lock")

    def _read(self) -> None:
        if not self._path.is_file():
            return
        with self._locked():
            try:
                text = self._path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError) as error:
                raise BisectError(
                    f"{self._path}: cannot be read ({error}); remove it, or start over with --fresh"
                ) from error
            whole, _, torn = text.rpartition("\n")
            if torn:
                # A command that was killed left half a line, which the next one must not be appended to.
                write_whole(self._path, whole + "\n" if whole else "")
        # splitlines() also cuts at U+2028 and the like, none of which json.dumps leaves in a line.
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                raw = json.loads(line)
                if raw["kind"] == "alias":
                    self._identities[raw["candidate"]] = raw["identity"]
                else:
                    observation = Observation.from_json(raw["observation"])
                    self._remember(Entry(raw["candidate"], raw["label"], raw["identity"], observation, raw["at"]))
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
                raise BisectError(
                    f"{self._path}, line {number}: not a step ({error!r}); remove the line, or start over with --fresh"
                ) from error
