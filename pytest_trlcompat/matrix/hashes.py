"""The SHA-256 hashes of the files that environments are installed from; uv refuses a file that has another one.

A hash belongs to a release and not to a lock, so those of all locks stand in one file for each Python, sorted, in the
format of pip's requirements: a hash that changes is a changed line there, once. Only the files that the environments
can use are kept: wheels for that Python on Linux, and the source distribution of what has no wheel.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from pytest_trlcompat.matrix.errors import MatrixError, Untestable
from pytest_trlcompat.matrix.files import locked, write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.uv import BUILT_FROM_SOURCE, WHEELS_ONLY, uv_cached_first, uv_network_first

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["RELEASE", "ask", "of_pytorch_index", "read", "renew", "text_of", "with_hashes"]

RELEASE = re.compile(
    r"[a-z0-9]+(?:-[a-z0-9]+)*==(?:[0-9]+!)?[0-9]+(?:\.[0-9]+)*(?:(?:a|b|rc)[0-9]+)?(?:\.post[0-9]+)?(?:\.dev[0-9]+)?"
)
"""How locks and files of hashes write a release: a canonical name and a normalised version without a local part.
It is handed to uv, so it is no option, no address and no marker."""

_LINE = re.compile(rf"({RELEASE.pattern}(?:\+[a-z0-9.]+)?)((?: --hash=sha256:[0-9a-f]{{64}})+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_LINUX = re.compile(r"any|(manylinux\w*|linux)_(x86_64|aarch64)")
_ASK = ("pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", "--no-deps", *WHEELS_ONLY)
_HEADER = """\
# The SHA-256 hashes of the files that environments with Python {python} are installed from: wheels for Linux (x86_64
# and aarch64), and the source distribution of {source}. `nox -s lock` adds those of new releases.
"""


def with_hashes(requirements: Sequence[str], python: str, layout: Layout) -> list[str]:
    """``name==version`` lines with the hashes of their files: from the repository, else asked before, else asked now.

    Raises:
        Untestable: when a release has no usable file, or no hash of it is known; the text is the reason.
        MatrixError: when a file of hashes is damaged.
    """
    # The repository's come last and win: those that were asked on this machine may be of a user's wheel folder.
    known = {**read(_path(layout.resolved_hashes, python)), **read(_path(layout.hashes, python))}
    missing = [requirement for requirement in requirements if requirement not in known]
    if missing:
        answered = ask(missing, python)
        _remember(_path(layout.resolved_hashes, python), python, answered)
        known.update(answered)
    return [_line(requirement, known[requirement]) for requirement in requirements]


def of_pytorch_index(requirement: str, python: str, backend: str, options: Sequence[str], layout: Layout) -> str | None:
    """The line of a torch with the hashes that PyTorch's own index states; ``None`` if it states none.

    The repository has those of the package index alone. These are remembered from the first time on.

    Args:
        backend: names the builds: ``cpu``, ``cu128``.
        options: of uv, which select that index.

    Raises:
        Untestable: when that index does not have this torch.
    """
    path = _path(layout.resolved_hashes, python, f"-torch-{backend}")
    for release, digests in read(path).items():
        if release.partition("+")[0] == requirement:
            return _line(release, digests)
    answer = uv_cached_first([*_ASK, "--generate-hashes", "--python", python, *options], stdin=requirement)
    digests = tuple(sorted(set(_HASH.findall(answer))))
    if not digests:
        return None
    # With the local part of its version: torch==2.13.0+cpu.
    release = answer.split()[0]
    _remember(path, python, {release: digests})
    return _line(release, digests)


def ask(requirements: Iterable[str], python: str, *, index_alone: bool = False) -> dict[str, tuple[str, ...]]:
    """The hashes of releases, as the package index and the user's wheel folders state them.

    Args:
        requirements: ``name==version``.
        index_alone: ask no wheel folder.

    Raises:
        Untestable: when one of them has no usable file, or no hash of it is stated.
    """
    hashes: dict[str, tuple[str, ...]] = {}
    rest = list(dict.fromkeys(requirements))
    while rest:
        batch = {requirement.partition("==")[0]: requirement for requirement in rest}  # one release of each package
        rest = [requirement for requirement in rest if requirement not in batch.values()]
        command = [*_ASK, "--universal", "--format", "pylock.toml", "--python", python]
        answer = uv_network_first(command, stdin="\n".join(batch.values()), index_alone=index_alone)
        hashes.update(_of_pylock(answer, list(batch.values()), python))
    return hashes


def renew(releases: Mapping[str, Collection[str]], layout: Layout) -> dict[str, list[str]]:
    """Write the files of the repository: the hashes that they have, those of new releases, and no other release's.

    Args:
        releases: Python to the releases of all locks for it.

    Returns:
        Python to the releases whose hashes are new.
    """
    added = {}
    for python, requirements in releases.items():
        path = _path(layout.hashes, python)
        known = read(path)
        # A hash that is there stays as it is: the files of a release do not change.
        added[python] = sorted(set(requirements) - set(known))
        # A hash from a wheel folder would be that of this machine's own build.
        known |= ask(added[python], python, index_alone=True)
        _write(path, python, {requirement: known[requirement] for requirement in requirements})
    names = {_path(layout.hashes, python) for python in releases}
    for path in layout.hashes.glob("*.txt"):
        if path not in names:
            path.unlink()
    return added


def read(path: Path) -> dict[str, tuple[str, ...]]:
    """A file of hashes: ``name==version`` to hexadecimal digests; empty if there is no such file.

    Raises:
        MatrixError: for any line that is not one release with its hashes.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise MatrixError(f"{path}: not UTF-8 ({error}); remove it, and run the same command again") from error
    hashes: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or match[1] in hashes:
            wrong = "is not NAME==VERSION --hash=sha256:DIGEST ..." if match is None else "is there already"
            raise MatrixError(f"{path}, line {number}: {line!r} {wrong}; remove the line, and run: nox -s lock")
        hashes[match[1]] = tuple(_HASH.findall(line))
    return hashes


def _of_pylock(answer: str, requirements: Sequence[str], python: str) -> dict[str, tuple[str, ...]]:
    digests: dict[str, set[str]] = {}
    for package in tomllib.loads(answer).get("packages", []):
        # Builds of one release, such as those of torch in a wheel folder, differ in the local part of their version.
        release = f"{canonicalize_name(package['name'])}=={package['version'].split('+')[0]}"
        digests.setdefault(release, set()).update(_digests(package, python))
    for requirement in requirements:
        if not digests.get(requirement):
            raise Untestable(
                f"{requirement}: the package index states no SHA-256 hash of a wheel of it for Python {python} on "
                "Linux. Nothing is installed without one, and nothing but "
                f"{', '.join(BUILT_FROM_SOURCE)} is built from source"
            )
    return {requirement: tuple(sorted(digests[requirement])) for requirement in requirements}


def _digests(package: Mapping[str, Any], python: str) -> set[str]:
    """Of the wheels that fit; of the source distribution where there is none, and it may be built."""
    fitting = _interpreters(python)
    files = [wheel for wheel in package.get("wheels", []) if _fits(_name(wheel), fitting)]
    if not files and canonicalize_name(package["name"]) in BUILT_FROM_SOURCE and "sdist" in package:
        files = [package["sdist"]]
    return {file["hashes"]["sha256"] for file in files if "sha256" in file.get("hashes", {})}


def _name(file: Mapping[str, Any]) -> str:
    place = file.get("name") or file.get("path") or urlsplit(file["url"]).path
    # In a URL the plus sign before a local part is %2B.
    return unquote(str(place)).rpartition("/")[2]


def _interpreters(python: str) -> set[tuple[str, str]]:
    major, minor = map(int, _minor(python).split("."))
    # One platform stands for all: interpreter and ABI are taken from these tags, _LINUX judges the platform.
    tags = (
        *cpython_tags((major, minor), platforms=["linux"]),
        *compatible_tags((major, minor), f"cp{major}{minor}", ["linux"]),
    )
    return {(tag.interpreter, tag.abi) for tag in tags}


def _fits(name: str, interpreters: Collection[tuple[str, str]]) -> bool:
    tags = parse_wheel_filename(name)[3]
    return any((tag.interpreter, tag.abi) in interpreters and _LINUX.fullmatch(tag.platform) for tag in tags)


def _remember(path: Path, python: str, hashes: Mapping[str, tuple[str, ...]]) -> None:
    with locked(path.with_name(f".{path.name}.lock")):
        # Read again under the lock, since another process may have added some. What is there wins: files do not change.
        _write(path, python, {**hashes, **read(path)})


def _write(path: Path, python: str, hashes: Mapping[str, Iterable[str]]) -> None:
    write_whole(path, text_of(hashes, python))


def text_of(hashes: Mapping[str, Iterable[str]], python: str) -> str:
    """What a file of hashes holds.

    Args:
        hashes: ``name==version`` to hexadecimal digests.
    """
    header = _HEADER.format(python=_minor(python), source=", ".join(BUILT_FROM_SOURCE))
    return header + "".join(f"{_line(*entry)}\n" for entry in sorted(hashes.items()))


def _line(requirement: str, digests: Iterable[str]) -> str:
    return " ".join([requirement, *(f"--hash=sha256:{digest}" for digest in digests)])


def _path(folder: Path, python: str, suffix: str = "") -> Path:
    return folder / f"{_minor(python)}{suffix}.txt"


def _minor(python: str) -> str:
    """``3.11`` of ``3.11.4``."""
    return ".".join(python.split(".")[:2])
