"""Look for faults that TRL has mended, before and after it did so, with the rows of the conformance suite.

    nox -s upstream_fixes -- --clone ../trl              all of fixes.toml
    nox -s upstream_fixes -- --clone ../trl 6439 3029    pull requests, or positions in the file, from 0 on
    nox -s upstream_fixes -- --count                     what was found until now

A fault is seen where a row shows something with the parent of the commit that mended it, and no longer with that
commit; all else is the same. Where no commit is known, the last release with the fault and the first one without it
are compared, and what counts are the stages that the entry names. What was found is kept in
``build/upstream-fixes``, and not looked for again without --rows. An entry with a known issue is seen by that issue's
suite, whose boundaries the catalogue has; without numbers it is not looked for.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks.upstream_fixes.comparing import Shown, changed, gone, share, troubled
from pytest_trlcompat.bisect.candidates import ExecutionContext, lock_near
from pytest_trlcompat.bisect.candidates.commits import Clone, Commits
from pytest_trlcompat.matrix import locks, process
from pytest_trlcompat.matrix.environments import ensure
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.sessions import Project

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FIXES = Path(__file__).with_name("fixes.toml")
RESULTS = ROOT / "build" / "upstream-fixes"
BESIDE = ("jmespath",)
"""What tools need in releases of TRL until 1.9. Cells' environments do not get it: they hold what their locks name."""
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Fix:
    """An entry of fixes.toml; README.md says what its fields mean."""

    number: int
    entry: Mapping[str, Any]

    @cached_property
    def requirements(self) -> list[Requirement]:
        """Other packages that it takes; those of :data:`BESIDE` are always there."""
        wanted = [Requirement(each) for each in self.entry.get("requires", ())]
        return [each for each in wanted if each.name not in BESIDE]

    def __str__(self) -> str:
        return f"{self.number:3} {self.entry['after']:7} {self.entry['trainer']} {self.entry['title'][:90]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="nox -s upstream_fixes --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="all by default")
    parser.add_argument("--clone", type=Path, metavar="FOLDER", help="a git clone of TRL; its checkout is not touched")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="these alone, and keep what the others showed")
    parser.add_argument("--count", action="store_true", help="look for nothing")
    options = parser.parse_args()
    fixes = read_fixes()
    chosen = [
        each
        for each in fixes
        if (_is_named(each, options.numbers) if options.numbers else not each.entry.get("catalogue"))
    ]
    if not chosen:
        parser.error(f"no fix {' '.join(map(str, options.numbers))}: there are {len(fixes)}, see {FIXES.name}")
    if options.count:
        return _count(fixes)
    if options.clone is None:
        parser.error("--clone: name a git clone of TRL, with its tags")
    project = Project(ROOT)
    look = _Look(project, Clone(options.clone.resolve()), options.rows)
    failed = 0
    for fix in chosen:
        try:
            result = look(fix)
        except MatrixError as error:
            failed += 1
            print(f"{fix}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            continue
        print(f"{fix}: {_in_words(result)}", flush=True)
    _count(fixes)
    return 1 if failed else 0


def read_fixes() -> list[Fix]:
    with open(FIXES, "rb") as file:
        return [Fix(number, entry) for number, entry in enumerate(tomllib.load(file)["fix"])]


def _is_named(fix: Fix, numbers: Sequence[int]) -> bool:
    return fix.number in numbers or fix.entry.get("pr") in numbers


@dataclass(frozen=True)
class _Look:
    """
    Attributes:
        rows: labels of rows that alone are tried; ``None``: all.
    """

    project: Project
    clone: Clone
    rows: Sequence[str] | None

    def __call__(self, fix: Fix) -> dict[str, Any]:
        """What was found, which is kept.

        Raises:
            MatrixError: there is no environment, or the rows could not be tried.
        """
        path, kept = _result_of(fix), _kept(fix)
        if kept is not None and self.rows is None:
            return dict(kept)
        lock = self._lock(fix)
        with contextlib.ExitStack() as exits:
            before, after = self._contexts(fix, lock, exits)
            shown = self._shown(fix, before, self.rows)
            rows = troubled(shown)
            later = self._shown(fix, after, rows) if rows else {}
        if "commit" in fix.entry:
            seen, other = gone(shown, later), changed(shown, later)
        else:
            seen, other = gone(shown, later, fix.entry.get("stages", ())), {}
        found: dict[str, Mapping[str, Any]] = {
            "seen": seen,
            "changed": other,
            "before": {label: shown[label] for label in rows},
            "after": later,
        }
        earlier = kept or {}
        result = {
            "title": fix.entry["title"],
            "lock": {name: lock.packages[name] for name in ("torch", "transformers", "peft", "deepspeed")},
            "rows": len(shown) + earlier.get("rows", 0),
            **{name: {**earlier.get(name, {}), **by_row} for name, by_row in found.items()},
        }
        RESULTS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return result

    def _lock(self, fix: Fix) -> Lock:
        """Of a cell near the release, with what the fault takes."""
        matrix, layout = self.project.matrix, self.project.layout
        wanted = Version(fix.entry["before"])
        near = [each for each in matrix.full() if Version(each.pins.get("trl", "0")) <= wanted]
        newest = max(Version(each.pins["trl"]) for each in near)
        cells = [each for each in near if Version(each.pins["trl"]) == newest]
        known = [locks.lock_for(matrix, each, layout) for each in cells]
        # What was newest on the day of the release comes first.
        known.sort(key=lambda each: Version(each.packages["transformers"]), reverse=True)
        known.sort(key=lambda each: each.date)
        for lock in known:
            if all(_allows(each, lock.packages[each.name]) for each in fix.requirements):
                return lock
        base = known[0]
        pins = {each.name: self._release(each, base) for each in fix.requirements}
        return lock_near(matrix, f"upstream-fixes-{fix.number}", pins, base)

    def _release(self, wanted: Requirement, base: Lock) -> str:
        """The release that a requirement allows and that is nearest to one, among those of the matrix's locks."""
        releases = {each.partition("==")[2] for each in self.project.environments.locked_releases([wanted.name])}
        ordered = sorted(releases, key=Version)
        place = ordered.index(base.packages[wanted.name])
        allowed = [each for each in ordered if _allows(wanted, each)]
        if not allowed:
            raise MatrixError(f"no lock of the matrix has {wanted}")
        return min(allowed, key=lambda each: abs(ordered.index(each) - place))

    def _contexts(self, fix: Fix, lock: Lock, exits: contextlib.ExitStack) -> tuple[ExecutionContext, ExecutionContext]:
        """Of what has the fault, and of what has it no longer."""
        if "commit" not in fix.entry:
            one, other = (self._release_context(fix.entry[name], lock) for name in ("before", "after"))
            return one, other
        mended = self.clone.commit(fix.entry["commit"])
        parent = self.clone.commit(f"{mended.sha}^1")
        layout = self.project.layout
        source = Commits(self.clone, [parent, mended], "trl", lock, layout, ROOT, layout.root / ".nox" / "fixes")
        exits.callback(source.clean_up)
        one, other = (exits.enter_context(source.prepare(each).context(self.project.say)) for each in source.candidates)
        return one, other

    def _release_context(self, release: str, lock: Lock) -> ExecutionContext:
        environment = ensure(lock, self.project.layout, self.project.say)
        folder = self.project.layout.root / ".nox" / "fixes" / "releases"
        target = folder / f"trl=={release}"
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                self.project.environments.unpack(f"trl=={release}", environment, scratch).rename(target)
        return ExecutionContext(environment, ROOT, target)

    def _shown(self, fix: Fix, context: ExecutionContext, rows: Sequence[str] | None) -> Shown:
        assert context.environment is not None
        (packages,) = (self.project.environments.tools("upstream-fixes", BESIDE).root / "lib").glob(
            "python*/site-packages"
        )
        RESULTS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=RESULTS) as folder:
            answer, log = Path(folder, "shown.json"), RESULTS / f"{_result_of(fix).stem}.log"
            command = [
                *(str(context.environment.python), "-m", "benchmarks.upstream_fixes.looking"),
                *(fix.entry["trainer"], str(answer)),
                *(["--ranks"] if fix.entry.get("ranks") else []),
                *(["--rows", *rows] if rows else []),
            ]
            variables = _variables(context, ROOT, packages)
            with open(log, "wb") as output:
                status = process.run(command, env=variables, cwd=ROOT, output=output, timeout=TIMEOUT_S)
            if status != 0:
                raise MatrixError(f"looking ended with exit status {status}: see {log.relative_to(ROOT)}")
            return dict(json.loads(answer.read_text(encoding="utf-8")))


def _allows(wanted: Requirement, version: str) -> bool:
    return wanted.specifier.contains(version, prereleases=True)


def _variables(context: ExecutionContext, *behind: Path) -> dict[str, str]:
    """A context's, with more packages behind its own."""
    variables = context.variables
    return {**variables, "PYTHONPATH": os.pathsep.join([variables["PYTHONPATH"], *map(str, behind)])}


def _in_words(result: Mapping[str, Any]) -> str:
    for found, beside in ((result["seen"], ""), (result["changed"], ", beside another fault")):
        if found:
            first, stages = next(iter(found.items()))
            return (
                f"{first}: {stages[0][:80]}" + (f", and {len(found) - 1} more rows" if len(found) > 1 else "") + beside
            )
    return f"no row of {result['rows']} shows it"


def _count(fixes: Sequence[Fix]) -> int:
    """Print how many the suites see, by kind and trainer: known issues, and what was looked for beside them."""
    looked = {fix.number: _kept(fix) for fix in fixes}
    seen = {fix.number: bool(fix.entry.get("catalogue")) or _is_seen(looked[fix.number]) for fix in fixes}
    for field in ("kind", "trainer"):
        for value in dict.fromkeys(fix.entry[field] for fix in fixes):
            print(f"{value}: {share(seen[fix.number] for fix in fixes if fix.entry[field] == value)}")
    for fix in fixes:
        if not seen[fix.number]:
            how = "not looked for" if looked[fix.number] is None else "not seen"
            print(f"{how}: {fix} ({fix.entry['setting'][:80]})")
    known = sum(bool(fix.entry.get("catalogue")) for fix in fixes)
    print(f"seen: {share(seen.values())}; {known} of them are known issues of the catalogue")
    return 0


def _kept(fix: Fix) -> Mapping[str, Any] | None:
    path = _result_of(fix)
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _is_seen(result: Mapping[str, Any] | None) -> bool:
    return result is not None and bool(result["seen"] or result["changed"])


def _result_of(fix: Fix) -> Path:
    name = hashlib.sha256(f"{fix.entry['link']} {fix.entry['title']}".encode()).hexdigest()[:8]
    return RESULTS / f"{fix.entry['trainer']}-{fix.entry['after']}-{name}.json"


if __name__ == "__main__":
    sys.exit(main())
