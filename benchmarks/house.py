"""How large the house is: files and lines that git tracks, what of it is generated, and how the code reads.

    python benchmarks/house.py [REVISION ...]

Counts what is checked out as git tracks it, and beside it commits, ``94af339f`` say. Ends with 1 where a generated file
is tracked in what is checked out. Imports the standard library alone, and needs git.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GENERATED", "House", "generated_in", "main", "measure", "tracked"]

ROOT = Path(__file__).resolve().parents[1]
GENERATED = (
    *("docs/compatibility.md", "docs/cures.md", "docs/npu-branches.md", "docs/explore/*", "docs/issues/*"),
    *("docs/explanation/findings.md", "docs/reference/fields.md"),
    *("pytest_trlcompat/trainers/__init__.pyi", "pytest_trlcompat/trainers/known.json", "fixtures/upstream/*.md"),
    *("pytest_trlcompat/catalog/index.json", "pytest_trlcompat/catalog/measurements.json"),
)
"""What the build of the site or of the wheel makes."""
_NOTE = "<!-- Made by "
"""How a page says in its first lines that it is generated, also one that is not listed."""
PLACEHOLDERS = frozenset(("each", "found", "given", "kept", "made", "one", "own", "said", "wanted"))
"""Names that name nothing."""


@dataclass(frozen=True)
class House:
    """What was counted. Lines are those of text files.

    Attributes:
        generated: files that a build makes, and their lines.
        catalogue: lines of the known issues.
        placeholders: bindings (assignments and parameters) of a placeholder name in 1,000 lines of Python, of package
            and suites.
        comments: percentage of these lines that hold nothing but a comment.
    """

    files: int
    lines: int
    generated: int
    generated_lines: int
    catalogue: int
    package: int
    suites: int
    tests: int
    placeholders: float
    comments: float


def tracked(root: Path, revision: str = "") -> Iterator[tuple[str, bytes]]:
    """Paths and contents of the files that git tracks, in a commit or as they are checked out.

    Raises:
        subprocess.CalledProcessError: there is no such commit, or no clone.
    """
    if revision:
        listing = _git(root, "ls-tree", "-r", "-z", "--full-tree", revision).split(b"\0")
        entries = [line.partition(b"\t") for line in listing if line and line.split()[1] == b"blob"]
        contents = _blobs(root, [head.split()[2] for head, _, _ in entries])
        yield from zip((path.decode() for _, _, path in entries), contents, strict=True)
        return
    for name in filter(None, _git(root, "ls-files", "-z").decode().split("\0")):
        if (root / name).is_file():  # one that was removed, but not by git, counts no more
            yield name, (root / name).read_bytes()


def _blobs(root: Path, hashes: Sequence[bytes]) -> Iterator[bytes]:
    stream = io.BytesIO(_git(root, "cat-file", "--batch", given=b"\n".join(hashes) + b"\n"))
    for _ in hashes:
        size = int(stream.readline().split()[2])
        yield stream.read(size)
        stream.read(1)  # a line feed after each


def _git(root: Path, *arguments: str, given: bytes = b"") -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, input=given, capture_output=True, check=True).stdout


def generated_in(files: Mapping[str, bytes]) -> list[str]:
    """Those of the tracked files that a build makes."""
    return sorted(
        name
        for name, content in files.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in GENERATED)
        or (name.endswith(".md") and any(line.startswith(_NOTE.encode()) for line in content.splitlines()[:5]))
    )


def measure(files: Mapping[str, bytes]) -> House:
    """Count."""
    lines = {name: content.count(b"\n") for name, content in files.items() if b"\0" not in content}
    generated = generated_in(files)
    python = [content.decode() for name, content in files.items() if _is_code(name)]
    python_lines = max(sum(text.count("\n") for text in python), 1)
    return House(
        files=len(files),
        lines=sum(lines.values()),
        generated=len(generated),
        generated_lines=_total(lines, generated),
        catalogue=_total(
            lines, (name for name in lines if fnmatch.fnmatchcase(name, "pytest_trlcompat/catalog/*.toml"))
        ),
        package=_total(lines, _python_below(lines, "pytest_trlcompat")),
        suites=_total(lines, _python_below(lines, "suites")),
        tests=_total(lines, _python_below(lines, "tests")),
        placeholders=round(1000 * sum(map(_placeholders, python)) / python_lines, 1),
        comments=round(100 * sum(map(_comment_lines, python)) / python_lines, 2),
    )


def _is_code(name: str) -> bool:
    return name.endswith(".py") and name.startswith(("pytest_trlcompat/", "suites/"))


def _python_below(names: Iterable[str], folder: str) -> Iterator[str]:
    return (name for name in names if name.startswith(f"{folder}/") and name.endswith(".py"))


def _total(lines: Mapping[str, int], names: Iterable[str]) -> int:
    return sum(lines.get(name, 0) for name in names)


def _placeholders(text: str) -> int:
    return sum(
        (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PLACEHOLDERS)
        or (isinstance(node, ast.arg) and node.arg in PLACEHOLDERS)
        for node in ast.walk(ast.parse(text))
    )


def _comment_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens)


_LABELS = {
    "files": "tracked files",
    "lines": "tracked lines",
    "generated": "of them generated: files",
    "generated_lines": "of them generated: lines",
    "catalogue": "lines of the catalogue",
    "package": "lines of the package's Python",
    "suites": "lines of the suites' Python",
    "tests": "lines of the tests' Python",
    "placeholders": "placeholder names in 1,000 lines",
    "comments": "comment lines, %",
}


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print a table, and return 1 where what is checked out has a generated file that git tracks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", metavar="REVISION", help="commits to count as well")
    revisions = parser.parse_args(arguments).revisions
    try:
        houses = {revision: measure(dict(tracked(root, revision))) for revision in revisions}
        files = dict(tracked(root))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error).encode()
        print(f"house: git cannot say what it tracks: {reason.decode().strip()}", file=sys.stderr)
        return 2
    houses["checked out"] = measure(files)
    print(f"| {' | '.join(['', *houses])} |\n| --- |{' --: |' * len(houses)}")
    for field, label in _LABELS.items():
        print(f"| {' | '.join([label, *(f'{getattr(house, field):,}' for house in houses.values())])} |")
    generated = generated_in(files)
    if generated:
        print(f"\ntracked, and made by a build: {', '.join(generated[:5])}; git rm --cached them", file=sys.stderr)
    return 1 if generated else 0


if __name__ == "__main__":
    sys.exit(main())
