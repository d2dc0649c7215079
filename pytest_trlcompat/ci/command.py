"""``trlcompat init-ci``: its arguments, and the file that it writes."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_trlcompat._escaping import encodable, visible
from pytest_trlcompat.ci.errors import CiError
from pytest_trlcompat.ci.origin import checked, installed_from
from pytest_trlcompat.ci.project import read_project
from pytest_trlcompat.ci.render import KINDS, render

__all__ = ["main"]

_GITHUB = Path(".github", "workflows", "trlcompat.yml")
_GITLAB = Path(".gitlab-ci.yml")
_INCLUDED = Path(".gitlab", "trlcompat.gitlab-ci.yml")
"""For GitLab, where the project has a file of its own, which then includes this one."""

_EPILOG = """\
It reads uv.lock, pylock.toml, requirements files, pyproject.toml and .python-version; it runs nothing and asks nothing.
Two or more requirements files that pin packages of the stack (requirements/*.txt, locks/*.txt) become a job each.

exit status: 0 if the file was written, 2 if not
"""


def main(arguments: Sequence[str]) -> int:
    """Write the file, say what it does and what to do next; return the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        root = Path(parsed.project)
        project = read_project(root)
        text = render(parsed.kind, project, checked(parsed.origin) if parsed.origin else installed_from())
        if parsed.print:
            print(text, end="")
            return 0
        path = _path(parsed.kind, root)
        _write(root, path, text, force=parsed.force)
    except CiError as error:
        print(encodable(visible(f"trlcompat init-ci: {error}"), sys.stderr.encoding), file=sys.stderr)
        return 2
    for line in (f"wrote {path}", *(f"  {line}" for line in project.why), "next:", *_next(path)):
        print(encodable(visible(line), sys.stdout.encoding))
    return 0


def _path(kind: str, root: Path) -> Path:
    if kind == "github":
        return _GITHUB
    return _GITLAB if not os.path.lexists(root / _GITLAB) or _is_ours(root / _GITLAB) else _INCLUDED


def _is_ours(path: Path) -> bool:
    """Whether this program wrote it: another stays the project's own, even where this one may be written anew."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().startswith("# Written by `trlcompat init-ci")
    except OSError:  # a folder, say
        return False


def _write(root: Path, path: Path, text: str, *, force: bool) -> None:
    """Write a file of the project. No link below its folder is followed, since that may lead out of the project."""
    # O_EXCL and O_NOFOLLOW refuse at the moment of opening: what was looked at before could have been exchanged since.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if force else os.O_EXCL)
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for depth, name in enumerate(path.parts[:-1], start=1):
                folder = _enter(folder, name, root.joinpath(*path.parts[:depth]))
            with open(os.open(path.name, flags, 0o666, dir_fd=folder), "w", encoding="utf-8") as file:
                file.write(text)
        finally:
            os.close(folder)
    except FileExistsError as error:
        raise CiError(f"{root / path} exists: --force writes it anew, --print shows what would be written") from error
    except OSError as error:
        raise CiError(f"{root / path} cannot be written: {error.strerror}") from error


def _enter(parent: int, name: str, shown: Path) -> int:
    """Open a folder below another, made where there is none, and close the other.

    Raises:
        CiError: it is a link; ``parent`` stays open then, as with any other error.
    """
    # Folders are entered one by one by their descriptors, so that none can become a link in between.
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        raise CiError(f"{shown} is a link, and may lead out of the project: make it a folder, or use --print")
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    os.close(parent)
    return folder


def _next(path: Path) -> list[str]:
    first = f"  - read {path}, and commit it: git add {path}"
    if path == _INCLUDED:
        first = f"{first}\n  - add to {_GITLAB}:\n      include:\n        - local: {path}"
    return [
        *first.splitlines(),
        "  - a known issue that the doctor reports: `trlcompat cures` says what cures it",
        "  - tests with several ranks: write them with the plugin's fixtures, `pytest --fixtures -p trlcompat`",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trlcompat init-ci",
        description="Writes a file for continuous integration: the doctor on the project's versions, and its own tests "
        "with the plugin, on each of its Pythons and stacks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="WHAT",
        help="where CI installs pytest-trlcompat from: git+URL@COMMIT, or the URL or path of a wheel; without it, the "
        "repository that it was installed from here, at the same commit",
    )
    parser.add_argument("--project", default=".", metavar="FOLDER", help="the project; by default this folder")
    parser.add_argument("--print", action="store_true", help="print the file, write none")
    parser.add_argument("--force", action="store_true", help="write it also where there is one")
    return parser
