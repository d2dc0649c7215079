"""``trlcompat issue``: a page in the terminal and in the browser, the nearest ids, and known issues by words."""

from __future__ import annotations

import itertools
import random
import stat
import subprocess
import sys
import webbrowser
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pytest_trlcompat import cli
from pytest_trlcompat.catalog import evidence, known_issues, upstream_reports
from pytest_trlcompat.catalog.evidence import EvidenceError
from pytest_trlcompat.matrix.report.issue_command import NOT_FOUND, SHOWN, UNUSABLE, page_of
from pytest_trlcompat.matrix.report.issue_page import issue_page
from pytest_trlcompat.matrix.report.issue_search import find, nearest_ids
from pytest_trlcompat.matrix.report.published import report_of
from pytest_trlcompat.matrix.report.torch_comparison import compare

ISSUE = "grpo-logits-to-keep"
Ask = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs the command; gives its exit status, the lines that it printed, and its error."""

    def run(*arguments: str) -> tuple[int, list[str], str]:
        status = cli.main(["issue", *arguments])
        printed = capsys.readouterr()
        return status, printed.out.splitlines(), printed.err

    return run


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The addresses that a browser was asked for; temporary files lie in the test's folder."""
    addresses: list[str] = []

    def open_page(url: str) -> bool:
        addresses.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", open_page)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return addresses


def test_the_page_reads_as_text_without_markup(ask: Ask) -> None:
    status, lines, error = ask(ISSUE)
    assert (status, error) == (SHOWN, "")
    assert lines[:4] == [ISSUE, "=" * len(ISSUE), "", f"{known_issues.load()[ISSUE].title}."]
    assert "- Upstream: https://github.com/huggingface/trl/issues/2770" in lines
    assert "    nox -s cell -- trl=0.19.1 transformers=5.0.0 --issue grpo-logits-to-keep" in lines
    titles = [line for line, rule in itertools.pairwise(lines) if rule and set(rule) == {"-"}]
    assert titles[:5] == ["Who is affected", "How it shows", "What cures it", "What was measured", "Boundaries"]
    text = "\n".join(lines)
    for markup in ("**", "| ", "](", "&lt;", "<!--", "`"):
        assert markup not in text, markup
    assert max(map(len, lines)) <= 120


def test_the_page_is_that_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the verdicts of one issue the same follows as of all."""
    published = evidence.published()
    report = report_of(published)
    torch = compare(report.cells, report.columns)
    known = known_issues.load()
    chosen = [ISSUE, "grpo-needs-triton", *random.Random(7).sample(sorted(known), 10)]
    for name in chosen:
        assert page_of(known[name]) == list(issue_page(known[name], report, published, torch)), name


@pytest.mark.parametrize(
    ("misspelt", "near"),
    [
        ("grpo-logit-to-keep", "did you mean grpo-logits-to-keep"),
        ("GRPO_logits_to_keep", "did you mean grpo-logits-to-keep"),
        ("needs-triton", "did you mean sft-needs-triton or kto-needs-triton or dpo-needs-triton?"),
    ],
)
def test_a_misspelt_id_suggests_the_nearest(ask: Ask, misspelt: str, near: str) -> None:
    status, lines, error = ask(misspelt)
    assert (status, lines) == (NOT_FOUND, [])
    assert error.startswith(f"trlcompat issue: there is no known issue '{misspelt}'; {near}")
    assert error.endswith("trlcompat issue --search WORD ... finds by words\n")


def test_an_id_like_no_other_suggests_nothing(ask: Ask) -> None:
    assert ask("\x1b[31mxyzzy") == (
        NOT_FOUND,
        [],
        "trlcompat issue: there is no known issue '\\x1b[31mxyzzy'; trlcompat issue --search WORD ... finds by words\n",
    )
    assert nearest_ids("xyzzy", known_issues.load()) == []


def test_a_search_ranks_by_id_title_and_symptom(ask: Ask) -> None:
    status, lines, _ = ask("--search", "lora", "FSDP", "save")
    assert status == SHOWN
    assert lines[0].endswith(" known issues for 'lora FSDP save'; trlcompat issue ID prints the page of one")
    assert lines[1:3] == ["", "lora-fsdp-save: Adapters under FSDP1 are saved empty and not resumed"]
    assert all(match.issue.id != "conformance-grpo" for match in find("conformance", known_issues.load().values()))


def test_an_error_text_finds_its_issue_first(ask: Ask) -> None:
    text = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"
    status, lines, _ = ask("--search", text)
    assert status == SHOWN
    assert lines[0].startswith("1 known issue for 'RuntimeError: mat1")
    assert lines[2].startswith("lora-fsdp-bf16-generation: ")
    assert "(this is the text of its" in " ".join(lines)


def test_an_error_at_the_end_of_a_long_log_is_found() -> None:
    log = "".join(f'  File "trainer{number}.py", line {number}, in step{number}\n' for number in range(2_000))
    text = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"
    first, *_ = find(log + text, known_issues.load().values())
    assert (first.issue.id, first.is_error) == ("lora-fsdp-bf16-generation", True)


def test_the_number_of_an_upstream_thread_is_a_word() -> None:
    assert [match.issue.id for match in find("2770", known_issues.load().values())] == [ISSUE]


def test_a_long_list_says_how_many_are_left_out(ask: Ask) -> None:
    _, lines, _ = ask("--search", "grpo")
    ids = [line for line in lines[2:-1] if not line.startswith(" ")]
    assert len(ids) == 20
    total = int(lines[0].split()[0])
    assert lines[-1] == f"and {total - 20} more; another word would leave out some"


def test_words_that_no_issue_has_are_an_exit_status_of_1(ask: Ask) -> None:
    assert ask("--search", "xyzzy", "plugh") == (
        NOT_FOUND,
        [],
        "trlcompat issue: no known issue has the words 'xyzzy plugh' in its id, title, symptom or error text; "
        "try fewer words, or one that is particular to it\n",
    )


def test_a_report_to_paste_upstream_is_printed_as_it_is(ask: Ask) -> None:
    status, lines, error = ask("grpo-positions", "--report")
    assert (status, error) == (SHOWN, "")
    assert lines == upstream_reports.stored_report(known_issues.load()["grpo-positions"]).splitlines()
    assert {"```python", "$ python grpo-positions.py", "## Versions"} <= set(lines)


def test_an_issue_without_a_script_has_no_report(ask: Ask) -> None:
    status, lines, error = ask(ISSUE, "--report")
    assert (status, lines) == (NOT_FOUND, [])
    assert error.startswith(
        f"trlcompat issue: {ISSUE} has no script to paste upstream; those that have one: deepspeed-"
    )


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.targets += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.titles.append(data)


def test_the_page_in_the_browser_is_a_file_of_this_user_alone(ask: Ask, opened: list[str], tmp_path: Path) -> None:
    status, (path,), error = ask(ISSUE, "--html")
    assert (status, error) == (SHOWN, "")
    assert opened == [f"file://{path}"]
    assert Path(path).parent == tmp_path
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    page = Path(path).read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.titles[:3] == [ISSUE, "Who is affected", "How it shows"]
    assert set(tags.targets) == {"https://github.com/huggingface/trl/issues/2770"}
    assert "default-src 'none'" in page
    assert "transformers &gt;=4.49,&lt;4.52" in page


@pytest.mark.parametrize("failure", [False, webbrowser.Error("could not locate runnable browser")])
def test_without_a_browser_the_path_is_printed(
    ask: Ask, opened: list[str], failure: bool | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(url: str) -> bool:
        if isinstance(failure, Exception):
            raise failure
        return failure

    monkeypatch.setattr(webbrowser, "open", nothing)
    status, (path,), error = ask(ISSUE, "--html")
    assert status == SHOWN
    assert Path(path).is_file()
    expected = f"trlcompat issue: no browser could be started: {failure}\n" if failure else ""
    assert error == expected


def test_a_folder_that_cannot_be_written_is_one_clear_error(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    status, lines, error = ask(ISSUE, "--html")
    assert (status, lines) == (UNUSABLE, [])
    assert error.startswith("trlcompat issue: the page cannot be written: [Errno 2] No such file or directory")


def test_evidence_that_cannot_be_read_is_one_clear_error(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> evidence.Evidence:
        raise EvidenceError("evidence.json: not the evidence of a sweep")

    monkeypatch.setattr(evidence, "published", damaged)
    assert ask(ISSUE) == (UNUSABLE, [], "trlcompat issue: evidence.json: not the evidence of a sweep\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "name one known issue, or ask with --search WORD ..."),
        ([ISSUE, "--search", "lora"], "name one known issue, or ask with --search WORD ..."),
        (["--html", "--search", "lora"], "--html is about one known issue; --search lists several"),
        (["--report", "--search", "lora"], "--report is about one known issue; --search lists several"),
        ([ISSUE, "--report", "--html"], "--report is Markdown to paste; --html shows the page"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["issue", *arguments])
    assert ended.value.code == UNUSABLE
    assert f"trlcompat issue: error: {error}" in capsys.readouterr().err


def test_it_needs_neither_the_stack_nor_libraries_of_the_report() -> None:
    program = (
        "import sys; [sys.modules.__setitem__(name, None) for name in ('torch', 'trl', 'transformers', 'pytest', "
        "'rich', 'jinja2', 'markdown_it')]; from pytest_trlcompat import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    for arguments in ([ISSUE], ["--search", "lora"]):
        done = subprocess.run([sys.executable, "-c", program, "issue", *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
