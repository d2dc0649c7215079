"""Hashes: of every release in the locks, from the index's answer, remembered, and what uv does with a wrong one."""

from __future__ import annotations

import hashlib
import re
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_trlcompat.matrix import hashes
from pytest_trlcompat.matrix.environments import install_hashed
from pytest_trlcompat.matrix.errors import MatrixError, Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import read_lock
from pytest_trlcompat.matrix.uv import WHEELS_ONLY, uv

CHECKOUT = Layout(Path(__file__).resolve().parents[2])
A, B, C, D = ("0123456789abcdef" * 4, "1" * 64, "2" * 64, "3" * 64)
PYLOCK = f"""
lock-version = "1.0"
[[packages]]
name = "numpy"
version = "2.2.3"
sdist = {{ url = "https://a.b/numpy-2.2.3.tar.gz", hashes = {{ sha256 = "{"f" * 64}" }} }}
wheels = [
    {{ url = "https://a.b/numpy-2.2.3-cp311-cp311-manylinux_2_17_x86_64.whl", hashes = {{ sha256 = "{A}" }} }},
    {{ url = "https://a.b/numpy-2.2.3-cp311-cp311-manylinux_2_17_aarch64.whl", hashes = {{ sha256 = "{B}" }} }},
    {{ url = "https://a.b/numpy-2.2.3-cp311-cp311-macosx_14_0_arm64.whl", hashes = {{ sha256 = "{"e" * 64}" }} }},
    {{ url = "https://a.b/numpy-2.2.3-cp311-cp311-musllinux_1_2_x86_64.whl", hashes = {{ sha256 = "{"d" * 64}" }} }},
    {{ url = "https://a.b/numpy-2.2.3-cp312-cp312-manylinux_2_17_x86_64.whl", hashes = {{ sha256 = "{C}" }} }},
]
[[packages]]
name = "deepspeed"
version = "0.16.4"
sdist = {{ url = "https://a.b/deepspeed-0.16.4.tar.gz", hashes = {{ sha256 = "{D}" }} }}
wheels = [{{ url = "https://a.b/deepspeed-0.16.4-cp311-cp311-win_amd64.whl", hashes = {{ sha256 = "{"c" * 64}" }} }}]
"""


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the index is asked for."""
    asked: list[str] = []

    def uv(arguments: Sequence[str], *, stdin: str, index_alone: bool = False) -> str:
        assert tuple(arguments)[7 : 7 + len(WHEELS_ONLY)] == WHEELS_ONLY
        asked.append(stdin)
        return PYLOCK

    monkeypatch.setattr(hashes, "uv_network_first", uv)
    return asked


@pytest.mark.parametrize("python", sorted(path.stem for path in CHECKOUT.hashes.glob("*.txt")))
def test_every_release_of_the_locks_has_its_hashes_and_no_other_has(python: str) -> None:
    known = hashes.read(CHECKOUT.hashes / f"{python}.txt")
    paths = [*CHECKOUT.locks.glob("*.txt"), *CHECKOUT.tool_locks.glob("*.txt")]
    locks = [lock for path in paths if (lock := read_lock(path)).python == python]
    named = {release for lock in locks for release in lock.releases}
    libraries = {
        line.split()[0]
        for path in (CHECKOUT.locks / "cuda").glob("*.txt")
        for line in path.read_text().splitlines()
        if not line.startswith("#")
    }
    assert named <= set(known)
    assert set(known) <= named | libraries
    if python == "3.11":
        assert libraries <= set(known)
    for digests in known.values():
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)


def test_every_lock_has_a_file_of_hashes_for_its_python() -> None:
    pythons = {read_lock(path).python for path in CHECKOUT.locks.glob("*.txt")}
    assert pythons == {path.stem for path in CHECKOUT.hashes.glob("*.txt")}


@pytest.mark.parametrize("python, numpy", [("3.11", (A, B)), ("3.12", (C,))])
def test_only_files_for_this_python_on_linux_count_and_deepspeeds_source(
    answers: list[str], python: str, numpy: tuple[str, ...]
) -> None:
    assert hashes.ask(["numpy==2.2.3", "deepspeed==0.16.4"], python) == {
        "numpy==2.2.3": numpy,
        "deepspeed==0.16.4": (D,),
    }
    assert answers == ["numpy==2.2.3\ndeepspeed==0.16.4"]


def test_a_release_without_a_wheel_is_refused(answers: list[str]) -> None:
    wanted = r"^numpy==2\.2\.3: the package index states no SHA-256 hash of a wheel of it for Python 3\.13 on Linux\. "
    with pytest.raises(
        Untestable, match=wanted + r"Nothing is installed without one, and nothing but .*deepspeed.* is built"
    ):
        hashes.ask(["numpy==2.2.3"], "3.13")


def test_two_releases_of_a_package_are_asked_for_one_after_the_other(
    answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "_of_pylock", lambda answer, lines, python: dict.fromkeys(lines, (A,)))
    assert hashes.ask(["a==1", "b==1", "a==2"], "3.11") == {"a==1": (A,), "b==1": (A,), "a==2": (A,)}
    assert answers == ["a==2\nb==1", "a==1"]


def test_the_repositorys_hashes_win_over_what_was_seen_first_and_that_over_the_index(
    tmp_path: Path, answers: list[str]
) -> None:
    layout = Layout(tmp_path)
    numpy, trl = "numpy==2.2.3", "trl==1.0.0"
    assert hashes.with_hashes([numpy], "3.11.4", layout) == [f"{numpy} --hash=sha256:{A} --hash=sha256:{B}"]
    kept = layout.resolved_hashes / "3.11.txt"
    assert kept.read_text().splitlines()[-1] == f"{numpy} --hash=sha256:{A} --hash=sha256:{B}"
    kept.write_text(f"{numpy} --hash=sha256:{C}\n")
    assert hashes.with_hashes([numpy], "3.11", layout) == [f"{numpy} --hash=sha256:{C}"]
    layout.hashes.mkdir(parents=True)
    (layout.hashes / "3.11.txt").write_text(f"{numpy} --hash=sha256:{D}\n{trl} --hash=sha256:{A}\n")
    assert hashes.with_hashes([numpy, trl], "3.11", layout)[0] == f"{numpy} --hash=sha256:{D}"
    assert answers == [numpy]


def test_a_hash_in_the_repository_does_not_change_and_what_no_lock_names_goes(
    tmp_path: Path, answers: list[str]
) -> None:
    layout = Layout(tmp_path)
    layout.hashes.mkdir(parents=True)
    (layout.hashes / "3.11.txt").write_text(f"numpy==2.2.3 --hash=sha256:{C}\nold==1 --hash=sha256:{A}\n")
    (layout.hashes / "3.9.txt").touch()
    assert hashes.renew({"3.11": ["numpy==2.2.3", "deepspeed==0.16.4"]}, layout) == {"3.11": ["deepspeed==0.16.4"]}
    assert (layout.hashes / "3.11.txt").read_text().splitlines()[2:] == [
        f"deepspeed==0.16.4 --hash=sha256:{D}",
        f"numpy==2.2.3 --hash=sha256:{C}",
    ]
    assert answers == ["deepspeed==0.16.4"]
    assert [path.name for path in layout.hashes.iterdir()] == ["3.11.txt"]


def test_the_hashes_of_pytorchs_own_builds_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, calls = Layout(tmp_path), []

    def uv(arguments: Sequence[str], *, stdin: str) -> str:
        calls.append([*arguments][-2:])
        return f"torch==2.6.0+cpu \\\n    --hash=sha256:{B} \\\n    --hash=sha256:{A}\n"

    monkeypatch.setattr(hashes, "uv_cached_first", uv)
    for _ in range(2):
        line = hashes.of_pytorch_index("torch==2.6.0", "3.11", "cpu", ["--torch-backend", "cpu"], layout)
        assert line == f"torch==2.6.0+cpu --hash=sha256:{A} --hash=sha256:{B}"
    assert calls == [["--torch-backend", "cpu"]]
    monkeypatch.setattr(hashes, "uv_cached_first", lambda arguments, *, stdin: "torch==2.5.1+cpu\n")
    assert hashes.of_pytorch_index("torch==2.5.1", "3.11", "cpu", [], layout) is None


@pytest.mark.parametrize(
    "line",
    [
        "trl==1",
        f"--find-links=x==1 --hash=sha256:{A}",
        f"trl @ https://a.b/c --hash=sha256:{A}",
        f"trl==1 --hash=md5:{A}",
        f"trl==1 --hash=sha256:{A[1:]}",
        f"trl==1 --hash=sha256:{A} --no-require-hashes",
        f"trl>=1 --hash=sha256:{A}",
    ],
)
def test_a_line_that_is_not_a_release_with_hashes_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "3.11.txt").write_text(f"# x\n{line}\n")
    with pytest.raises(MatrixError) as raised:
        hashes.read(tmp_path / "3.11.txt")
    assert str(raised.value) == (
        f"{tmp_path}/3.11.txt, line 2: {line!r} is not NAME==VERSION --hash=sha256:DIGEST ...; remove the line, and "
        "run: nox -s lock"
    )


def make_wheel(folder: Path, content: str) -> str:
    """A wheel of the made-up package ``thing`` 1.0; returns its hash."""
    path, info = folder / "thing-1.0-py3-none-any.whl", "thing-1.0.dist-info"
    record = f"thing.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing.py", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", record)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_uv_refuses_a_file_that_was_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, wheels = Layout(tmp_path), tmp_path / "wheels"
    wheels.mkdir()
    for name, value in {"FIND_LINKS": str(wheels), "NO_INDEX": "1", "CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(f"UV_{name}", value)
    digest = make_wheel(wheels, "x = 1\n")
    layout.hashes.mkdir(parents=True)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    (layout.hashes / f"{python}.txt").write_text(f"thing==1.0 --hash=sha256:{digest}\n")
    uv(["venv", "--quiet", "--python", sys.executable, str(tmp_path / "one")])
    interpreter = str(tmp_path / "one" / "bin" / "python")
    install_hashed(["thing==1.0"], python, interpreter, layout)
    (module,) = tmp_path.glob("one/lib/python*/site-packages/thing.py")
    assert module.read_text() == "x = 1\n"

    other = make_wheel(wheels, "import os; os.system('touch pwned')\n")
    with pytest.raises(Untestable) as raised:
        install_hashed(["thing==1.0"], python, interpreter, layout, "--reinstall")
    assert "Hash mismatch for `thing==1.0`" in str(raised.value)
    assert f"sha256:{digest}" in str(raised.value)
    assert f"sha256:{other}" in str(raised.value)
    assert module.read_text() == "x = 1\n"


def test_nothing_but_deepspeed_is_built_not_even_to_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source distribution whose build leaves a file: with the options of the matrix it is not built."""
    source, links = tmp_path / "thing-1.0", tmp_path / "links"
    source.mkdir()
    links.mkdir()
    (source / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: thing\nVersion: 1.0\n")
    (source / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    )
    (source / "backend.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with tarfile.open(links / "thing-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "thing-1.0")
    for name, value in {"FIND_LINKS": str(links), "NO_INDEX": "1", "CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(f"UV_{name}", value)
    resolve = ["pip", "compile", "-", "--quiet", "--python", sys.executable]
    with pytest.raises(Untestable, match="thing"):
        uv(resolve, stdin="thing==1.0")
    assert (tmp_path / "ran").exists()  # so that the file shows what it is meant to show
    (tmp_path / "ran").unlink()
    with pytest.raises(Untestable, match="thing==1.0 has no usable wheels"):
        uv([*resolve, *WHEELS_ONLY], stdin="thing==1.0")
    assert not (tmp_path / "ran").exists()
