"""How the outcomes of TRL's own tests are compared, and where these tests come from. Runs none of them."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from benchmarks.upstream_tests import sources
from benchmarks.upstream_tests.__main__ import cell_of
from benchmarks.upstream_tests.comparing import Comparison, Outcome, explanations, read_outcomes, table
from benchmarks.upstream_tests.models import VOCABULARIES
from benchmarks.upstream_tests.plugin import Outcomes, vocabulary_of
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.parsing import read_matrix

ROOT = Path(__file__).resolve().parents[2]


def comparison(explained: dict[str, str] | None = None, **outcomes: tuple[str, str]) -> Comparison:
    """A comparison of tests with these outcomes: as they are, and with the corrected trainers."""
    upstream, corrected = (
        {test: Outcome(pair[side], f"E   of {test}") for test, pair in outcomes.items() if pair[side]}
        for side in (0, 1)
    )
    return Comparison("0.15.2", "source distribution", upstream, corrected, explained or {})


GOOD = ("passed", "passed")


def test_equal_outcomes_are_no_problem_and_are_counted() -> None:
    found = comparison(a=GOOD, b=GOOD, c=("skipped", "skipped"), d=("xfailed", "xfailed"), e=("failed", "failed"))
    assert found.problems == []
    assert found.notes() == ["fails in both: e: of e", "skipped: 1 tests: E   of c"]
    assert table([found]).splitlines() == [
        "tests of                     tests  passed as is  passed with ours  skipped  xfailed  failed in both  differ",
        "0.15.2, source distribution  5      2             2                 1        1        1               0",
    ]


@pytest.mark.parametrize(
    "before, after",
    [("passed", "failed"), ("passed", "skipped"), ("passed", ""), ("skipped", "failed"), ("xfailed", "failed")],
)
def test_a_test_that_is_worse_with_the_corrected_trainers_is_a_problem(before: str, after: str) -> None:
    (problem,) = comparison(a=GOOD, b=(before, after)).problems
    told, *text = problem.splitlines()
    assert told == f"trl 0.15.2: b: {before} as it is, {after or 'missing'} with the corrected trainers"
    assert text == (["E   of b"] if after else [])


def test_a_test_that_passes_with_the_corrected_trainers_alone_is_listed() -> None:
    found = comparison(a=GOOD, b=("failed", "passed"))
    assert (found.problems, found.notes()) == ([], ["passes with the corrected trainers alone: b"])


def test_a_difference_with_a_reason_is_listed_and_is_no_problem() -> None:
    found = comparison({"b": "asserts the bug"}, a=GOOD, b=("passed", "failed"))
    assert found.problems == []
    assert found.notes() == ["fails with the corrected trainers alone: b: asserts the bug"]


def test_a_reason_for_a_difference_that_is_gone_is_a_problem() -> None:
    found = comparison({"a": "asserts the bug"}, a=GOOD)
    assert found.problems == ["trl 0.15.2: a: is listed as differing (asserts the bug), but does not"]


def test_runs_in_which_nothing_passes_are_a_problem() -> None:
    found = comparison(a=("failed", "failed"))
    assert found.problems == ["trl 0.15.2: no test passes as it is, so nothing is compared"]


def test_the_results_are_kept_for_programs() -> None:
    kept = json.loads(comparison(a=GOOD, b=("failed", "passed")).to_json())
    assert (kept["tests"], kept["passed as is"], kept["passed with ours"], kept["differ"]) == ("2", "1", "2", "1")
    assert kept["outcomes"]["b"] == {"upstream": "failed", "corrected": "passed", "text": "E   of b"}


def test_outcomes_are_read_from_all_files_of_a_run(tmp_path: Path) -> None:
    for name, outcome in (("small", "passed"), ("qwen", "failed")):
        line = json.dumps({"test": f"test_{name}", "outcome": outcome, "text": ""})
        (tmp_path / f"{name}.jsonl").write_text(f"{line}\n")
    files = [tmp_path / "small.jsonl", tmp_path / "qwen.jsonl", tmp_path / "none.jsonl"]
    assert read_outcomes(files) == {"test_small": Outcome("passed"), "test_qwen": Outcome("failed")}


def test_what_a_test_comes_to_is_written_when_it_ends(tmp_path: Path) -> None:
    tests = """
import pytest, unittest

@pytest.fixture
def broken_at_the_end():
    yield
    raise OSError("cannot be removed")

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_fails_at_the_end(broken_at_the_end): pass
@pytest.mark.skip(reason="needs a GPU")
def test_skips(): pass
@pytest.mark.xfail(reason="not yet")
def test_fails_as_expected(): assert 0
@pytest.mark.xfail(reason="not yet", strict=True)
def test_passes_against_expectation(): pass
class TestOld(unittest.TestCase):
    @unittest.skipIf(True, "needs vLLM")
    def test_skips(self): pass
"""
    # Its name stays among the modules of this process, where tests of pytester would meet it.
    (tmp_path / "test_what_tests_come_to.py").write_text(tests)
    file = tmp_path / "outcomes.jsonl"
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path)]
    pytest.main(arguments, plugins=[Outcomes(file)])
    found = {name.rpartition("::")[2]: one for name, one in read_outcomes([file]).items() if "TestOld" not in name}
    assert {name: one.outcome for name, one in found.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_fails_at_the_end": "failed",
        "test_skips": "skipped",
        "test_fails_as_expected": "xfailed",
        "test_passes_against_expectation": "failed",
    }
    assert "assert 1 == 2" in found["test_fails"].text
    assert "cannot be removed" in found["test_fails_at_the_end"].text
    assert (found["test_skips"].text, found["test_fails_as_expected"].text) == ("needs a GPU", "not yet")
    (old,) = [one for name, one in read_outcomes([file]).items() if "TestOld" in name]
    assert old == Outcome("skipped", "needs vLLM")


@pytest.mark.parametrize(
    "source, vocabulary",
    [
        ("ids = [9, 10, 151645]", "qwen"),
        ("assert parameters == 2428641", "qwen"),
        ("def test_train_with_mask_truncated_completions_all_masked(self): ...", "qwen"),
        ("lr = 0.1; max_completion_length = 128", "small"),
        ("reason = 'see transformers#45625 and github.com/huggingface/trl/issues/52220'", "small"),
    ],
)
def test_tests_that_need_qwens_vocabulary_get_it(source: str, vocabulary: str) -> None:
    assert vocabulary_of(source) == vocabulary


def test_a_difference_is_explained_for_its_release_alone_and_with_a_reason() -> None:
    entry = {"release": "0.15.2", "test": "a", "why": "asserts the bug"}
    assert explanations([entry], "0.15.2") == {"a": "asserts the bug"}
    assert explanations([entry], "0.18.2") == {}
    with pytest.raises(MatrixError, match="a: a test that may fail with the corrected trainers needs a reason: why"):
        explanations([{**entry, "why": ""}], "0.18.2")


@pytest.mark.parametrize(
    "release, cell",
    [("0.15.2", "trl0.15.2-tf4.48.3"), ("1.9.2", "trl1.9.2-tf5.23.0"), ("1.16.0", "trl1.16.0-tf5.23.0")],
)
def test_a_release_is_tested_in_its_default_cell_or_with_the_newest_transformers(release: str, cell: str) -> None:
    assert cell_of(read_matrix(ROOT / "fixtures" / "matrix.toml"), release) == cell


def test_a_release_without_a_cell_is_one_clear_message() -> None:
    with pytest.raises(MatrixError, match="the matrix has no cell with trl 9.9"):
        cell_of(read_matrix(ROOT / "fixtures" / "matrix.toml"), "9.9")


def test_no_number_in_a_vocabulary_has_two_meanings() -> None:
    for vocabulary in VOCABULARIES.values():
        numbers = [*range(256), *vocabulary.words, *vocabulary.tokens]
        assert len(numbers) == len(set(numbers))
        assert max(numbers) < vocabulary.size


def distribution(folder: Path, *names: str) -> Path:
    """A source distribution with these files, each of which contains its name."""
    for name in names:
        (folder / "trl-1" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "trl-1" / name).write_text(name)
    with tarfile.open(folder / "trl-1.tar.gz", "w:gz") as file:
        file.add(folder / "trl-1", "trl-1")
    return folder / "trl-1.tar.gz"


def test_tests_are_taken_from_the_source_distribution_without_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = distribution(tmp_path, "tests/test_grpo_trainer.py", "pyproject.toml", "trl/__init__.py", "setup.py")
    monkeypatch.setattr(sources, "_download", lambda release, scratch: archive)
    assert sources.fetch_tests("1", tmp_path / "new", git=None, ref=None) == "source distribution"
    found = {str(path.relative_to(tmp_path / "new")) for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert found == {"tests/__init__.py", "tests/test_grpo_trainer.py", "pyproject.toml"}


def test_tests_that_the_source_distribution_lacks_are_taken_from_the_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = distribution(tmp_path, "pyproject.toml")
    monkeypatch.setattr(sources, "_download", lambda release, scratch: archive)
    with pytest.raises(
        MatrixError, match="trl 1: its source distribution has no tests; name a repository of TRL: --git"
    ):
        sources.fetch_tests("1", tmp_path / "new", git=None, ref=None)

    repository = tmp_path / "trl-1"
    (repository / "tests").mkdir()
    (repository / "tests" / "test_grpo_trainer.py").write_text("of the tag")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"], ["tag", "v1"]):
        subprocess.run([*git, *command], cwd=repository, check=True)
    assert sources.fetch_tests("1", tmp_path / "new", git=str(repository), ref=None) == "git v1"
    assert (tmp_path / "new" / "tests" / "test_grpo_trainer.py").read_text() == "of the tag"
    with pytest.raises(MatrixError, match="git fetch .* ended with exit status"):
        sources.fetch_tests("1", tmp_path / "new", git=str(repository), ref="v2")
