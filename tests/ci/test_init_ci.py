"""``trlcompat init-ci``: what it reads of a project, what it writes, and what it refuses."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_trlcompat import cli
from pytest_trlcompat.ci.command import main
from pytest_trlcompat.ci.errors import CiError
from pytest_trlcompat.ci.origin import checked, installed_from
from pytest_trlcompat.ci.project import read_project
from pytest_trlcompat.ci.render import KINDS, render

from .sample import texts
from .steps import read

ORIGIN = "git+https://example.org/pytest-trlcompat@0123abc"
GITHUB = Path(".github", "workflows", "trlcompat.yml")


def files(root: Path, **contents: str) -> Path:
    """Names with two underscores for a dot, three for a slash."""
    for name, text in contents.items():
        path = root / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def metadata_of(**fields: object) -> str:
    lines = [f"{name.replace('_', '-')} = {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(["[project]", 'name = "mine"', *lines, ""])


def install(root: Path, kind: str = "github") -> str:
    text = render(kind, read_project(root), ORIGIN)
    found = read(text)
    if kind == "gitlab":
        return str(found["trlcompat"]["script"][0])
    return str(next(step for step in found["jobs"]["training"]["steps"] if step.get("name") == "Install")["run"])


@pytest.mark.parametrize(
    ("contents", "stacks", "more"),
    [
        ({"requirements__txt": "trl==1.0.0"}, ("requirements.txt",), ()),
        ({"requirements__txt": "numpy"}, ("requirements.txt",), ()),
        ({"uv__lock": "", "requirements__txt": "trl==1.0.0"}, ("uv.lock",), ()),
        ({"pylock__toml": ""}, ("pylock.toml",), ()),
        (
            {"requirements__txt": "trl==1.0.0", "requirements-dev__txt": "trl==1.0.0", "requirements___test__txt": "x"},
            ("requirements.txt",),
            ("requirements-dev.txt", "requirements/test.txt"),
        ),
        (
            {
                "uv__lock": "",
                "locks___new__txt": "# all\n  TRL == 1.0.0",
                "locks___old__txt": "torch[x]===2.4",
                "locks___x__txt": "a",
            },
            ("locks/new.txt", "locks/old.txt"),
            (),
        ),
        ({"requirements__txt": "trl>=1", "requirements-pinned__txt": "peft==0.14.0"}, ("requirements-pinned.txt",), ()),
        ({"pyproject__toml": metadata_of()}, (), ()),
        ({"setup__py": ""}, (), ()),
        ({"pyproject__toml": metadata_of(), "requirements-test__txt": "x"}, (), ("requirements-test.txt",)),
    ],
)
def test_which_files_say_what_is_installed(
    tmp_path: Path, contents: dict[str, str], stacks: tuple[str, ...], more: tuple[str, ...]
) -> None:
    project = read_project(files(tmp_path, **contents))
    assert (project.stacks, project.more) == (stacks, more)


@pytest.mark.parametrize(
    ("contents", "pythons", "why"),
    [
        ({}, ["3.11"], "nothing says which"),
        ({"__python-version": "3.12.4\n"}, ["3.12"], ".python-version"),
        ({"__python-version": "# for tests\ncpython-3.11.9-linux-x86_64-gnu\n3.12\n"}, ["3.11"], ".python-version"),
        ({"__python-version": "cpython@3.10"}, ["3.10"], ".python-version"),
        ({"__python-version": "pypy@3.10"}, None, "names pypy@3.10"),
        ({"__python-version": ""}, None, "names nothing; pytest-trlcompat runs on 3.10 to 3.13"),
        ({"__python-version": "3.9"}, None, "names 3.9"),
        ({"pyproject__toml": metadata_of(requires_python=">=3.9")}, ["3.10", "3.13"], "the oldest and the newest"),
        ({"pyproject__toml": metadata_of(requires_python=">=3.12.2,<3.13")}, ["3.12"], "requires-python"),
        ({"pyproject__toml": metadata_of(requires_python=">=3.14")}, None, "asks for Python >=3.14"),
        ({"pyproject__toml": metadata_of(requires_python="new")}, None, "is no range of versions: 'new'"),
        (
            {
                "pyproject__toml": metadata_of(
                    requires_python=">=3.11",
                    classifiers=[f"Programming Language :: Python :: {each}" for each in ("3", "3.10", "3.11", "3.12")],
                )
            },
            ["3.11", "3.12"],
            "the classifiers",
        ),
    ],
)
def test_which_pythons(tmp_path: Path, contents: dict[str, str], pythons: list[str] | None, why: str) -> None:
    files(tmp_path, requirements__txt="trl==1.0.0", **contents)
    if pythons is None:
        with pytest.raises(CiError, match=why.replace("+", ".")):
            read_project(tmp_path)
        return
    project = read_project(tmp_path)
    assert list(project.pythons) == pythons
    assert why in project.why[-2]


@pytest.mark.parametrize(
    ("contents", "command"),
    [
        ({"requirements__txt": "trl==1.0.0"}, "uv pip install -r requirements.txt pytest"),
        (
            {"requirements__txt": "trl==1.0.0", "requirements-test__txt": "x", "pyproject__toml": metadata_of()},
            "uv pip install -r requirements.txt -r requirements-test.txt -e . pytest",
        ),
        (
            {"pyproject__toml": metadata_of() + "[project.optional-dependencies]\ntest = []\ndev = []\n"},
            'uv pip install -e ".[test]" pytest',
        ),
        (
            {"pyproject__toml": metadata_of() + "[dependency-groups]\ndev = []\n"},
            "uv pip install -e . --group dev pytest",
        ),
        ({"pyproject__toml": "[tool.ruff]\n", "requirements__txt": "x"}, "uv pip install -r requirements.txt pytest"),
        ({"uv__lock": ""}, 'uv sync --frozen --python "$PYTHON"\nuv pip install pytest'),
        (
            {"uv__lock": "", "pyproject__toml": metadata_of() + "[project.optional-dependencies]\ntests = []\n"},
            'uv sync --frozen --python "$PYTHON" --extra tests\nuv pip install pytest',
        ),
        (
            {"pylock__toml": "", "pyproject__toml": metadata_of()},
            "uv pip sync pylock.toml\nuv pip install --no-deps -e .\nuv pip install pytest",
        ),
        ({"locks___a__txt": "trl==1", "locks___b__txt": "trl==2"}, 'uv pip install -r "$STACK" pytest'),
    ],
)
def test_how_it_is_installed(tmp_path: Path, contents: dict[str, str], command: str) -> None:
    files(tmp_path, **contents)
    for kind in KINDS:
        assert f'\n{command} "$PYTEST_TRLCOMPAT"\n' in install(tmp_path, kind)


def test_tests_are_where_the_project_has_them(tmp_path: Path) -> None:
    files(tmp_path, requirements__txt="trl==1")
    assert read_project(tmp_path).tests == ()
    (tmp_path / "test").mkdir()
    assert read_project(tmp_path).tests == ("test",)
    files(tmp_path, pyproject__toml='[tool.pytest.ini_options]\ntestpaths = ["checks"]\n')
    assert read_project(tmp_path).tests == ()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({}, "does not say what is to be installed: there is no uv.lock, .* `pip freeze > requirements.txt`"),
        ({"poetry__lock": ""}, "poetry.lock is the lock of another installer: .* `poetry export -o requirements.txt`"),
        ({"Pipfile__lock": ""}, "Pipfile.lock is the lock of another installer"),
        ({"pyproject__toml": "[project"}, "pyproject.toml is not TOML: "),
        ({"requirements__txt": "x" * 2**21}, "requirements.txt has more than 1 MiB"),
        ({"requirements___a b__txt": "trl==1"}, "'requirements/a b.txt' has characters that a shell"),
        ({"requirements___a$(x)__txt": "trl==1"}, "give the file another name"),
    ],
)
def test_what_it_cannot_use_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], contents: dict[str, str], message: str
) -> None:
    files(tmp_path, **contents)
    assert main(["github", "--from", ORIGIN, "--project", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    with pytest.raises(CiError, match=message):
        read_project(tmp_path)
    assert not (tmp_path / ".github").exists()


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CiError, match=r"requirements.txt cannot be read: "):
        read_project(tmp_path)


def test_more_jobs_than_the_services_allow(tmp_path: Path) -> None:
    files(tmp_path, **{f"locks___{number}__txt": "trl==1" for number in range(201)})
    with pytest.raises(CiError, match="201 requirements files on 1 Pythons are more than the 200 jobs"):
        read_project(tmp_path)


# Where this package comes from


@pytest.mark.parametrize(
    "text",
    [
        "git+https://example.org/a/b.git@main",
        "vendor/x-1.0-py3-none-any.whl",
        "/somewhere/x.whl",
        "https://example.org/x.whl",
    ],
)
def test_origins(text: str) -> None:
    assert checked(text) == text


@pytest.mark.parametrize("text", ["", "a b", 'a"b', "$(x)", "${{ secrets.X }}", "a\nb", "a;b", "`x`", "é"])
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(CiError, match=r"is no URL, path or requirement: say where CI gets pytest-trlcompat from"):
        checked(text)


def test_a_secret_is_not_written_into_a_repository() -> None:
    with pytest.raises(CiError, match=r"^--from holds a secret, which would stand in the repository") as raised:
        checked("git+https://me:hunter2hunter2@example.org/a/b")
    assert "hunter2" not in str(raised.value)


class Installed:
    def __init__(self, text: str | None) -> None:
        self.text = text

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"  # PEP 610
        return self.text


@pytest.mark.parametrize(
    ("found", "origin"),
    [
        (
            {"url": "https://example.org/a", "vcs_info": {"vcs": "git", "commit_id": "0123"}},
            "git+https://example.org/a@0123",
        ),
        ({"url": "file:///home/a", "dir_info": {"editable": True}}, None),
        ({"url": "https://example.org/a.whl", "archive_info": {}}, None),
        ([], None),
        (None, None),
    ],
)
def test_without_from_it_is_the_repository_that_it_was_installed_from(
    monkeypatch: pytest.MonkeyPatch, found: Any, origin: str | None
) -> None:
    text = None if found is None else json.dumps(found)
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(text))
    if origin is None:
        with pytest.raises(
            CiError, match=r"was not installed from a repository: say where .* --from git\+https://HOST/"
        ):
            installed_from()
    else:
        assert installed_from() == origin


# What it writes


def test_it_says_what_it_wrote_and_what_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files(tmp_path, requirements__txt="trl==1.0.0", tests___test_a__py="")
    assert cli.main(["init-ci", "github", "--from", ORIGIN, "--project", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[:6] == [
        f"wrote {GITHUB}",
        "  versions: requirements.txt",
        "  Python: 3.11 (nothing says which)",
        "  tests: tests (a folder of that name)",
        "next:",
        f"  - read {GITHUB}, and commit it: git add {GITHUB}",
    ]
    text = (tmp_path / GITHUB).read_text()
    assert f'PYTEST_TRLCOMPAT: "{ORIGIN}"' in text
    assert "<<" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_it_never_overwrites_unless_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    path = tmp_path / (GITHUB if kind == "github" else Path(".gitlab", "trlcompat.gitlab-ci.yml"))
    (tmp_path / "requirements.txt").write_text("trl==1.0.0")
    (tmp_path / ".gitlab-ci.yml").write_text("mine: {}\n")
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    arguments = [kind, "--from", ORIGIN, "--project", str(tmp_path)]
    assert main(arguments) == 2
    assert path.read_text() == "precious"
    assert f"{path} exists: --force writes it anew, --print shows what would be written" in capsys.readouterr().err
    assert main([*arguments, "--print"]) == 0
    assert path.read_text() == "precious"
    printed = capsys.readouterr().out
    assert main([*arguments, "--force"]) == 0
    assert path.read_text() == printed
    assert (tmp_path / ".gitlab-ci.yml").read_text() == "mine: {}\n"


def test_a_pipeline_that_is_there_includes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files(tmp_path, requirements__txt="trl==1.0.0")
    arguments = ["gitlab", "--from", ORIGIN, "--project", str(tmp_path)]
    assert main(arguments) == 0
    assert (tmp_path / ".gitlab-ci.yml").is_file()
    assert main(arguments) == 2
    assert ".gitlab-ci.yml exists: --force writes it anew" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    assert not (tmp_path / ".gitlab").exists(), "what this program wrote is written anew"
    (tmp_path / ".gitlab-ci.yml").write_text("mine: {}\n")
    capsys.readouterr()
    assert main(arguments) == 0
    assert "      include:\n        - local: .gitlab/trlcompat.gitlab-ci.yml\n" in capsys.readouterr().out


def test_a_link_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files(tmp_path, requirements__txt="trl==1.0.0", precious="mine")
    (tmp_path / GITHUB).parent.mkdir(parents=True)
    (tmp_path / GITHUB).symlink_to(tmp_path / "precious")
    assert main(["github", "--from", ORIGIN, "--project", str(tmp_path), "--force"]) == 2
    assert (tmp_path / "precious").read_text() == "mine"
    assert "cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize("linked", [".github", ".github/workflows"])
def test_a_linked_folder_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str], linked: str) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    files(project, requirements__txt="trl==1.0.0")
    (project / linked).parent.mkdir(parents=True, exist_ok=True)
    (project / linked).symlink_to(elsewhere)
    assert main(["github", "--from", ORIGIN, "--project", str(project)]) == 2
    assert list(elsewhere.iterdir()) == []
    assert f"{project / linked} is a link, and may lead out of the project" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_yaml_with_a_job_for_each_stack_and_python(tmp_path: Path, kind: str) -> None:
    files(
        tmp_path,
        locks___a__txt="trl==1",
        locks___b__txt="trl==2",
        pyproject__toml=metadata_of(requires_python=">=3.10"),
    )
    found = yaml.safe_load(render(kind, read_project(tmp_path), ORIGIN))
    stacks, pythons = ["locks/a.txt", "locks/b.txt"], ["3.10", "3.13"]
    if kind == "github":
        assert found["jobs"]["training"]["strategy"]["matrix"] == {"python": pythons, "stack": stacks}
        assert found["jobs"]["training"]["env"]["STACK"] == "${{ matrix.stack }}"
    else:
        assert found["trlcompat"]["parallel"]["matrix"] == [{"PYTHON": pythons, "STACK": stacks}]


def test_the_how_to_shows_what_it_writes_now() -> None:
    drifted = [str(path) for path, text in texts().items() if not path.is_file() or path.read_text() != text]
    assert not drifted, "write them anew with: python -m tests.ci.sample"
