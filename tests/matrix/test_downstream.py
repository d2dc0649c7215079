"""Real projects beside this one: what is kept of each, and what is refused. What stands in for uv resolves nothing."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_trlcompat.matrix import downstream, locks
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.downstream import Downstream, build, lock_of, read_projects, renew, session
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import MatrixError, Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import read_matrix

CHECKOUT = Layout(Path(__file__).resolve().parents[2])
PROJECTS = read_projects(CHECKOUT.downstream / "projects.toml")
MATRIX = Matrix("3.11", {"torch": "2.13.0"}, ("torch", "trl"), ("pytest>=8", "cloudpickle"), ("torch",), 3)
MINE = Downstream("mine", ("mine==1.0", "torch==2.13.0"), datetime.date(2026, 6, 1), "mine", ("fire",), ("jieba",))


@pytest.mark.parametrize("project", PROJECTS.values(), ids=PROJECTS)
def test_every_project_has_tests_and_a_lock_of_what_it_asks_for(project: Downstream) -> None:
    assert list((CHECKOUT.downstream / project.tests).glob("test_*.py"))
    lock, added = lock_of(read_matrix(CHECKOUT.matrix), project, CHECKOUT)
    assert (lock.cell_id, lock.date) == (f"downstream-{project.name}", project.date)
    pinned = dict(line.split("==") for line in project.requirements if "==" in line)
    assert {name: lock.packages[name] for name in pinned} == pinned
    assert not set(added) & set(pinned)
    assert "pytest" in added
    assert not set(lock.packages) & set(project.left_out)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    (tmp_path / "downstream" / "locks").mkdir(parents=True)
    return Layout(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What uv is asked to resolve, and what it is told to leave out."""
    calls: list[tuple[str, str]] = []
    answers = iter(["mine==1.0\ntorch==2.13.0+cpu\n", "cloudpickle==3.1\nmine==1.0\npytest==9.0\ntorch==2.13.0\n"])

    def uv(arguments: Sequence[str], *, stdin: str, **_: bool) -> str:
        words = list(arguments)
        calls.append((stdin, Path(words[words.index("--override") + 1]).read_text()))
        assert "fire=9999-01-01T00:00:00Z" in words
        return next(answers)

    monkeypatch.setattr(locks, "uv_network_first", uv)
    return calls


def test_the_project_is_resolved_alone_and_its_versions_are_kept(layout: Layout, asked: list[tuple[str, str]]) -> None:
    renew(MATRIX, MINE, layout)
    assert [words.split("\n") for words, _ in asked] == [
        ["mine==1.0", "torch==2.13.0"],
        ["mine==1.0", "torch==2.13.0", "pytest>=8", "cloudpickle"],
    ]
    assert all("jieba; python_version < '0'\n" in left_out and "triton;" in left_out for _, left_out in asked)
    lock, added = lock_of(MATRIX, MINE, layout)
    assert lock.packages == {"cloudpickle": "3.1", "mine": "1.0", "pytest": "9.0", "torch": "2.13.0"}
    assert added == ["cloudpickle", "pytest"]


def test_what_a_cuda_build_brings_is_kept_where_the_project_needs_it(
    layout: Layout, asked: list[tuple[str, str]]
) -> None:
    renew(MATRIX, dataclasses.replace(MINE, needed=("triton",)), layout)
    assert not any("triton;" in left_out for _, left_out in asked)


def test_a_lock_of_other_requirements_is_refused(layout: Layout, asked: list[tuple[str, str]]) -> None:
    renew(MATRIX, MINE, layout)
    other = dataclasses.replace(MINE, requirements=("mine==2.0", "torch==2.13.0"))
    with pytest.raises(MatrixError, match=r"mine.txt was made from other requirements; renew it: .* --lock mine"):
        lock_of(MATRIX, other, layout)
    path = layout.downstream / "locks" / "mine.txt"
    path.write_text(path.read_text().replace("# added: ", "# "))
    with pytest.raises(MatrixError, match="does not say what was added; renew it"):
        lock_of(MATRIX, MINE, layout)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"mine": "1.1"}, r"^mine: mine 1.1 instead of 1.0$"),
        ({"mine": None, "torch": "2.14.0"}, r"^mine: mine is missing instead of 1.0, torch 2.14.0 instead of 2.13.0$"),
        ({"pytest": "9.1"}, None),
    ],
)
def test_a_version_that_is_not_the_projects_is_an_error(
    layout: Layout,
    asked: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, str | None],
    text: str | None,
) -> None:
    lock = renew(MATRIX, MINE, layout)
    real = {**lock.packages, **found, "pytest-trlcompat": "0.1.0"}
    monkeypatch.setattr(downstream, "ensure", lambda *_: Environment(layout.root))
    monkeypatch.setattr(downstream, "freeze", lambda _: {name: each for name, each in real.items() if each is not None})
    said: list[str] = []
    if text is not None:
        with pytest.raises(MatrixError, match=text):
            build(MATRIX, MINE, layout, said.append)
        return
    build(MATRIX, MINE, layout, said.append)
    assert said == ["mine: 2 packages, each as it is without this project, which added cloudpickle 3.1 pytest 9.1"]


def test_every_project_is_tested_also_after_one_that_fails(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    (layout.downstream / "projects.toml").write_text(
        "".join(
            f'[{name}]\nrequirements = []\ndate = 2026-06-01\ntests = "{name}"\npreload = ["a.b", "c"]\n'
            for name in "xyz"
        )
    )

    def built(matrix: Matrix, project: Downstream, *_: object) -> Environment:
        if project.name == "x":
            raise Untestable("no such release")
        return Environment(Path(project.name))

    monkeypatch.setattr(downstream, "build", built)
    ran: list[tuple[str, list[str]]] = []

    def run(environment: Environment, words: Sequence[str]) -> None:
        ran.append((str(environment.root), list(words)))
        if environment.root == Path("y"):
            raise MatrixError("python ended with exit status 1")

    with pytest.raises(MatrixError, match=r"^x: no such release; y: python ended with exit status 1$"):
        session(MATRIX, layout, ["--", "-k", "dpo"], print, run)
    preload = ["-o", "trlcompat_preload=a.b c"]
    command = ["python", "-m", "pytest", "-p", "trlcompat", *preload, "downstream/{}", "-k", "dpo"]
    assert ran == [(name, [word.format(name) for word in command]) for name in "yz"]
    with pytest.raises(MatrixError, match=r"^no project 'w'; there are: x, y, z$"):
        session(MATRIX, layout, ["z", "w"], print, run)


@pytest.mark.parametrize(
    ("text", "error"), [("[a", "Expected"), ("[a]\nnonsense = 1\n", "a: .*nonsense"), (None, "No such file")]
)
def test_a_damaged_list_of_projects(tmp_path: Path, text: str | None, error: str) -> None:
    path = tmp_path / "projects.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(MatrixError, match=error):
        read_projects(path)


def test_the_hosted_workflow_tests_every_project() -> None:
    workflow = (CHECKOUT.root / ".github" / "workflows" / "ci.yml").read_text()
    assert f"project: [{', '.join(PROJECTS)}]" in workflow
