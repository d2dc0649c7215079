"""Git clones of a tiny package that builds without an index: a backend of its own writes the wheel."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import GitHistory

__all__ = ["make_clone"]

_PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""

_BACKEND = """\
import pathlib, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name, version, *requires = pathlib.Path("about.txt").read_text().splitlines()
    if version == "broken":
        raise SystemExit("this commit has no version")
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
    files = {
        f"{name}/__init__.py": pathlib.Path("code.py").read_text(),
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {each}\\n" for each in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: tests\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        f"{info}/RECORD": "",
    }
    wheel = f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel
"""


def make_clone(git: GitHistory, folder: Path, name: str, *versions: tuple[str, ...]) -> list[str]:
    """A clone with a commit for each version and what it requires, all of 2026-06-08; returns the commits."""
    folder.mkdir()
    git.run(folder, "init", "--quiet", "--initial-branch=main")
    stream = []
    for number, about in enumerate(versions):
        files = {
            "pyproject.toml": _PROJECT,
            "backend.py": _BACKEND,
            "about.txt": "\n".join([name, *about]) + "\n",
            "code.py": f"number = {number}\n",
        }
        message = f"change {number}"
        stream.append(f"commit refs/heads/main\ncommitter A <a@b.c> {_MORNING + number} +0000\n{_data(message)}")
        stream += [f"M 100644 inline {path}\n{_data(text)}" for path, text in files.items()]
    git.run(folder, "fast-import", "--quiet", stdin="".join(stream))
    git.run(folder, "checkout", "--quiet", "main")
    return git.run(folder, "log", "--reverse", "--format=%H").split()


_MORNING = 1780912800
"""2026-06-08, 10:00."""


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}\n"
