"""The branches for NPUs alone, or for CUDA GPUs alone, about which ``npu_branches.toml`` says nothing.

The software accelerator bears the name of an NPU. So a release with a branch that nobody has decided about may show
failures that no user of a GPU meets, or hide failures that one does meet. As a program this lists such branches, of the
environment that runs it or of others, and exits with 1 if there are any::

    python -m pytest_trlcompat.accelerator.decisions [--unused] [--page FILE] [SITE_PACKAGES ...]

The libraries' sources are read (:mod:`pytest_trlcompat.accelerator.branches`), and none of them is imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_trlcompat.accelerator.branches import npu_branches
from pytest_trlcompat.accelerator.decision_table import PACKAGES, LocatedBranch, decide, load
from pytest_trlcompat.accelerator.decisions_page import page

__all__ = ["installed", "main", "scan"]


def installed(site_packages: Sequence[str] | None = None) -> Iterator[tuple[str, str, Path]]:
    """Name, version and folder of each of :data:`PACKAGES` that is there, in this environment or in those folders."""
    paths = [None] if site_packages is None else [[path] for path in site_packages]
    for path in paths:
        options: dict[str, Any] = {} if path is None else {"path": path}
        distributions = {item.metadata["Name"]: item for item in importlib.metadata.distributions(**options)}
        for name in PACKAGES:
            if name in distributions:
                yield name, distributions[name].version, Path(str(distributions[name].locate_file(name)))


def scan(package: str, version: str, folder: Path) -> Iterator[LocatedBranch]:
    """Every branch of a release whose files are in ``folder``; files that are not Python are passed over."""
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder).as_posix()
        try:
            branches = npu_branches(path.read_text(encoding="utf-8", errors="replace"), str(path))
        except (SyntaxError, ValueError):  # templates, and files for other releases of Python
            continue
        for branch in branches:
            yield LocatedBranch(package, version, file, branch)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_trlcompat.accelerator.decisions",
        description="List the branches for NPUs or CUDA GPUs alone about which npu_branches.toml says nothing.",
    )
    parser.add_argument("site_packages", nargs="*", help="folders to look in instead of this environment")
    parser.add_argument("--unused", action="store_true", help="list the entries that decide nothing there, too")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table as a page instead, in Markdown")
    options = parser.parse_args(arguments)
    entries = load()
    if options.page is not None:
        options.page.write_text(page(entries), encoding="utf-8")
        return 0
    undecided, used, count = 0, set(), 0
    for package, version, folder in installed(options.site_packages or None):
        for located in scan(package, version, folder):
            count += 1
            entry = decide(located, entries)
            used.add(entry)
            if entry is None:
                undecided += 1
                print(f"undecided: {located.describe()}")
    unused = [entry for entry in entries if entry not in used] if options.unused else []
    for entry in unused:
        print(f"decides nothing: {entry.package} {entry.versions} {', '.join(entry.at)}: {', '.join(entry.condition)}")
    print(f"{count} branches, {undecided} of them undecided")
    return 1 if undecided or unused or not count else 0


if __name__ == "__main__":
    sys.exit(main())
