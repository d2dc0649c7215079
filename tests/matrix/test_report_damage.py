"""One bad line or cell costs no report: it is named, the rest is shown, and the exit status says so."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_trlcompat.catalog.verdict import RecordError, read_records
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report.command import main
from pytest_trlcompat.matrix.report.model import gather
from pytest_trlcompat.matrix.results import TESTED, Sidecar
from pytest_trlcompat.matrix.sweep import Sweep
from tests.hostile import EVIL

from .made_up_report import CRASH, FINE, NEW, OLD, PREDICTED, UNBUILT

OTHER = dataclasses.replace(NEW, id="trl0.15.2-tf4.48.3")
ISSUE = "grpo-logits-to-keep"


def line(**changes: object) -> bytes:
    """A line like that of a verdict, but for some fields."""
    return json.dumps({**json.loads(PREDICTED.to_json()), **changes}).encode() + b"\n"


LINES = [
    ("no verdict", b"not a verdict\n", "it is not JSON: Expecting value"),
    ("not UTF-8", b"\xff\xfe\n", "it is not UTF-8: byte 0xff at 0"),
    ("no object", b"[1]\n", "it is no object"),
    ("an empty object", b"{}\n", "it has no field issue, subject, strategy"),
    ("no such verdict", line(verdict="good"), "its verdict is none of ok, broken"),
    ("a list for a verdict", line(verdict=[]), "its verdict is none of ok, broken"),
    ("a number for a name", line(issue=3), "its issue is no name"),
    ("markup for a name", line(strategy="<b>"), "its strategy is no name"),
    ("a surrogate in a name", line(issue="a\ud800"), "its issue is no name"),
    ("nobody's trainer", line(subject="mine"), "its subject is none of upstream, corrected"),
    ("text for the seconds", line(seconds="1"), "its seconds are no number of seconds"),
    ("seconds of no float", line(seconds=10**400), f"the number 1{19 * '0'}... is too large"),
    ("NaN", line(seconds=float("nan")), "JSON has no NaN"),
    ("infinity", line().replace(b"1.0", b"1e999"), "the number 1e999 is too large"),
    ("a list for the evidence", line(evidence=[["a", 1]]), "its evidence is no object"),
    ("a name twice", line().replace(b'"seconds"', b'"issue": "b", "seconds"'), "the name 'issue' stands twice"),
    ("nested", line(evidence={"a": "x"}).replace(b'"x"', b"[" * 60 + b"]" * 60), "it is nested more than 50 deep"),
    ("nested very deep", b"[" * 100_000 + b"\n", "it is not JSON that can be read: maximum recursion depth"),
    ("17 MiB", b" " * (17 * 2**20) + b"\n", "it has more than 16 MiB"),
    ("half a line", line()[:40] + b"\n", "it is not JSON: "),
]


@pytest.mark.parametrize(("content", "message"), [pytest.param(*each, id=name) for name, *each in LINES])
@pytest.mark.fault(
    "A line of a cell's verdicts is none: not UTF-8, no JSON, half a line, a field of another type, NaN, a name twice, "
    "17 MiB, nested 100,000 deep.",
    "The report names file, line and what is wrong, shows every other verdict, and exits with 1.",
)
def test_a_line_that_is_no_verdict_is_named_and_the_others_are_shown(
    results: Callable[..., Path], capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    folder = results((OLD, (FINE,)), (OTHER, (FINE, PREDICTED)))
    path = folder / f"{OLD.id}.jsonl"
    path.write_bytes(content + path.read_bytes())
    assert main([str(folder)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"{path}, line 1: not a verdict line ({message}")
    assert len(said.err) < 1000
    assert "2 cells, 3 verdicts: all as predicted, 1 cell not finished" in said.out
    assert f"  not finished  {OLD.id}: damaged, " in said.out
    cells = {cell["id"]: cell for cell in json.loads((folder / "compat.json").read_text())["cells"]}
    assert (cells[OLD.id]["state"], len(cells[OLD.id]["verdicts"])) == ("damaged", 1)
    assert f"{path}, line 1: not a verdict line" in cells[OLD.id]["reason"]
    assert len(cells[OTHER.id]["verdicts"]) == 2
    (error,) = ElementTree.parse(folder / "compat.xml").iter("error")
    assert (error.get("type"), f"{path}, line 1" in (error.get("message") or "")) == ("damaged", True)
    for name in ("compat.md", "compat.html"):
        assert "line 1: not a verdict line" in (folder / name).read_text(encoding="utf-8")
    with pytest.raises(RecordError, match=f"^{re.escape(str(path))}, line 1: not a verdict line"):
        read_records(path)


def sidecar(**changes: object) -> bytes:
    return json.dumps({**json.loads(OLD.to_json()), **changes}).encode()


SIDECARS = [
    ("empty", b"", "it is not JSON: Expecting value"),
    ("no field", b"{}", "there is no field 'id'"),
    ("no object", b"[]", "it is no object"),
    ("not UTF-8", b"\xff", "it is not UTF-8: byte 0xff at 0"),
    ("another cell's", sidecar(id="../../x"), "'id' is no name: '../../x'"),
    ("of another name", sidecar(id=NEW.id), f"it is of the cell {NEW.id}"),
    ("a version", sidecar(pins={"trl": "\x1b[2J"}), "'pins' has an invalid version of trl: '\\x1b[2J'"),
    ("no version", sidecar(pins={"trl": None}), "'pins' has an invalid version of trl: 'None'"),
    ("a state", sidecar(state={}), "'state' is no state: '{}'"),
    ("no pins", sidecar(pins=[1]), "'pins' is no object"),
]


@pytest.mark.parametrize(("content", "message"), [pytest.param(*each, id=name) for name, *each in SIDECARS])
@pytest.mark.fault(
    "The file with the state of a cell is empty, no JSON, of another cell, or has versions that are none.",
    "The report names the file and what is wrong, shows every other cell, and exits with 1.",
)
def test_a_sidecar_that_says_nothing_of_its_cell_is_named(
    results: Callable[..., Path], capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    folder = results((OLD, (FINE,)), (OTHER, (FINE, PREDICTED)))
    path = folder / f"{OLD.id}.cell.json"
    path.write_bytes(content)
    assert main([str(folder)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"{path.name} cannot be read: {path}: damaged ({message}")
    assert "2 cells, 2 verdicts: all as predicted, 1 cell not finished" in said.out
    cells = {cell["id"]: cell for cell in json.loads((folder / "compat.json").read_text())["cells"]}
    assert (cells[OLD.id]["state"], cells[OLD.id]["verdicts"]) == ("damaged", [])
    assert len(cells[OTHER.id]["verdicts"]) == 2


FIELDS = [
    (
        "lock",
        {"peft": "\x1b[2J", "trl": "0.9.6"},
        "'lock' has an invalid version of peft: '\\x1b[2J'",
        {"trl": "0.9.6"},
    ),
    ("lock", {"<b>": "1", "trl": "0.9.6"}, "'lock' names a package '<b>'", {"trl": "0.9.6"}),
    ("lock", 3, "'lock' is no object", {}),
    ("seconds", -1, "'seconds' is no number of seconds: '-1'", 0.0),
    ("seconds", True, "'seconds' is no number of seconds: 'True'", 0.0),
    ("date", "<b>", "'date' is no day: '<b>'", None),
    ("reason", [1], "'reason' is no text: '[1]'", None),
]


@pytest.mark.parametrize(("name", "value", "message", "kept"), FIELDS)
@pytest.mark.fault(
    "A control character stands in the version of a cell's lock, or another field is of the wrong type.",
    "The report names file and field, shows the cell's verdicts without it, and exits with 1.",
)
def test_a_field_that_cannot_be_read_is_left_out_and_named(
    results: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: object,
    message: str,
    kept: object,
) -> None:
    folder = results((OLD, (FINE,)), (OTHER, (FINE, PREDICTED)))
    path = folder / f"{OLD.id}.cell.json"
    path.write_bytes(sidecar(**{name: value}))
    assert main([str(folder)]) == 1
    said = capsys.readouterr()
    assert said.err == f"{path}: {message}; remove the file and run the cell again\n"
    assert "2 cells, 3 verdicts: all as predicted, 1 cell not finished" in said.out
    cells = {cell["id"]: cell for cell in json.loads((folder / "compat.json").read_text())["cells"]}
    assert (cells[OLD.id]["state"], len(cells[OLD.id]["verdicts"])) == ("damaged", 1)
    if name != "reason":
        assert cells[OLD.id][name] == kept


def test_verdicts_of_unknown_versions_are_held_against_no_catalogue(results: Callable[..., Path]) -> None:
    """Their versions decide what is predicted, so they stay as the run in the cell judged them."""
    pins = {"trl": "0.15.2", "transformers": "4.48.3"}
    cell = Sidecar("trl0.15.2-tf4.48.3", pins, TESTED, "s", {**pins, "accelerate": "\x00"}, "2025-02-28")
    record = dataclasses.replace(FINE, issue=ISSUE, subject="upstream", strategy="single")
    for lock, expected in ((cell.lock, "ok"), (pins, "wasteful")):
        folder = results((dataclasses.replace(cell, lock=lock), (record,)))
        main([str(folder)])
        (written,) = json.loads((folder / "compat.json").read_text())["cells"]
        assert written["verdicts"][0]["expected"] == expected


def link_to(path: Path) -> None:
    path.rename(path.with_suffix(".kept"))
    path.symlink_to(path.with_suffix(".kept"))


def special(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


@pytest.mark.parametrize("ending", [".jsonl", ".cell.json"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(special(Path.mkdir), "it is a folder", id="folder"),
        pytest.param(special(os.mkfifo), "it is a pipe", id="pipe"),
        pytest.param(link_to, "it is a symbolic link, which is not followed", id="link"),
        pytest.param(
            special(lambda path: path.symlink_to("/dev/zero")), "it is a symbolic link", id="link to a device"
        ),
        pytest.param(special(lambda path: path.symlink_to(path)), "it is a symbolic link", id="link to itself"),
    ],
)
@pytest.mark.fault(
    "In place of a cell's file there is a folder, a pipe, or a symbolic link, to a device or to nothing.",
    "The report names what it is, waits for nothing and follows nothing, shows every other cell, and exits with 1.",
)
def test_what_is_no_file_is_named(
    results: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    message: str,
    ending: str,
) -> None:
    folder = results((OLD, (FINE,)), (OTHER, (FINE, PREDICTED)))
    path = folder / f"{OLD.id}{ending}"
    change(path)
    assert main([str(folder)]) == 1
    said = capsys.readouterr()
    assert message in said.err
    assert str(path) in said.err
    assert "2 cells, 2 verdicts: all as predicted, 1 cell not finished" in said.out


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (".jsonl", "{path}: there is no such file, but the cell is tested; remove the file and run the cell again\n"),
        (".cell.json", "{name} cannot be read: {path}: damaged (No such file or directory); remove it and run"),
    ],
)
@pytest.mark.fault(
    "One of a cell's two files is missing.", "The report names it, shows every other cell, and exits with 1."
)
def test_a_cell_without_one_of_its_files_is_named(
    results: Callable[..., Path], capsys: pytest.CaptureFixture[str], ending: str, message: str
) -> None:
    folder = results((OLD, (FINE,)), (OTHER, (FINE, PREDICTED)))
    path = folder / f"{OLD.id}{ending}"
    path.unlink()
    assert main([str(folder)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(message.format(path=path, name=path.name))
    assert "2 cells, 2 verdicts: all as predicted, 1 cell not finished" in said.out


@pytest.mark.fault(
    "The last line of a cell's verdicts is cut off.",
    "Of an interrupted cell the line is passed over; of one that had ended the report names it, and exits with 1.",
)
def test_a_torn_last_line_is_named_only_where_nothing_explains_it(
    results: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for state, message in (("interrupted", ""), ("tested", ", line 2: not a verdict line (it is not JSON")):
        folder = results((dataclasses.replace(OLD, state=state, reason="it was stopped"), ()))
        path = folder / f"{OLD.id}.jsonl"
        path.write_bytes(f"{FINE.to_json()}\n".encode() + line()[:50])
        assert main([str(folder)]) == (1 if message else 0)
        assert message in capsys.readouterr().err
        (cell,) = gather(folder).cells
        assert (len(cell.verdicts), cell.sidecar.reason == "it was stopped") == (1, not message)


@pytest.mark.fault(
    "The name of a cell's file holds escape sequences, markup, a line break, and what is not UTF-8.",
    "The report shows it as text in every form, and exits with 1.",
)
def test_the_name_of_a_file_is_text_too(results: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = results((OLD, (FINE,)))
    (folder / os.fsdecode(b"\xff\x1b[2J<img src=x>\n| [b](c).cell.json")).write_bytes(b"x")
    assert main([str(folder)]) == 1
    assert main([str(folder), "--tables"]) == 1
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "\ufffd\ufffd[2J<img src=x> | [b](c)" in said.out
    assert "<img" not in (folder / "compat.md").read_text() + (folder / "compat.html").read_text()
    (error,) = ElementTree.parse(folder / "compat.xml").iter("error")
    assert (error.get("message") or "").startswith("\ufffd\ufffd[2J<img src=x>")


def test_of_many_bad_lines_the_first_are_named(
    results: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = results((OLD, ()))
    path = folder / f"{OLD.id}.jsonl"
    path.write_bytes(b"x\n" * 1000 + f"{FINE.to_json()}\n".encode())
    assert main([str(folder)]) == 1
    said = capsys.readouterr().err
    assert [f"line {number}:" in said for number in (1, 5, 6)] == [True, True, False]
    assert said.endswith("; and 995 more; remove the file and run the cell again\n")


def test_what_is_damaged_is_not_published(results: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = results((OLD, (FINE,)))
    (folder / f"{OLD.id}.jsonl").write_bytes(b"x\n" + f"{FINE.to_json()}\n".encode())
    assert main([str(folder), "--publish", str(folder)]) == 1
    assert capsys.readouterr().err == f"not published: {OLD.id} was not finished; run it again first\n"
    assert not (folder / "fixtures").exists()


def test_evidence_and_locks_that_no_file_can_hold_cost_no_report_and_break_out_of_none(
    results: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    record = dataclasses.replace(PREDICTED, evidence={"text": EVIL, "more": "`````"})
    hostile = dataclasses.replace(NEW, lock={"torch": "2.13.0"}, reason=EVIL, state="interrupted")
    folder = results((hostile, (record,)), (OLD, (FINE,)))
    assert main([str(folder)]) == 0
    assert main([str(folder), "--tables"]) == 0
    assert not re.search("[\x00-\x08\x1b]", capsys.readouterr().out)
    for name in ("compat.md", "compat.html", "compat.xml", "compat.json"):
        text = (folder / name).read_text(encoding="utf-8")
        assert not re.search("[\x00-\x08\x1b\ud800-\udfff]", text), name
    ElementTree.parse(folder / "compat.xml")
    markdown = (folder / "compat.md").read_text(encoding="utf-8")
    (fenced,) = re.findall(r"^``````text\n.*?^``````$", markdown, re.DOTALL | re.MULTILINE)
    assert "<img" in fenced
    assert "<img" not in markdown.replace(fenced, "")
    assert "\\[x\\](javascript" in markdown
    assert "[x](" not in markdown.replace(fenced, "")
    (written,) = (c for c in json.loads((folder / "compat.json").read_text())["cells"] if c["id"] == NEW.id)
    assert written["verdicts"][0]["evidence"]["text"] == EVIL


@pytest.mark.fault(
    "A resolver's reason, or evidence of another machine, holds a URL with a password.",
    "The sidecar and the report have `[redacted]` in its place.",
)
def test_no_form_of_the_report_has_a_secret(
    results: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_INDEX_X_PASSWORD", "q7Zp-11kd")
    said = "401 for https://user:pass9word@host/simple, not q7Zp-11kd"
    record = dataclasses.replace(CRASH, evidence={"failure": said})
    unbuilt = dataclasses.replace(UNBUILT, reason=said)
    folder = results((OLD, (record,)), (unbuilt, ()))
    assert "pass9word" not in (folder / f"{UNBUILT.id}.cell.json").read_text()
    assert main([str(folder)]) == 0
    assert main([str(folder), "--tables"]) == 0
    shown = [*(path.read_text(encoding="utf-8") for path in folder.glob("compat.*")), "".join(capsys.readouterr())]
    (kept,) = gather(folder).cells[0].verdicts
    assert kept.evidence == {"failure": "401 for https://[redacted]@host/simple, not [redacted]"}
    assert [text for text in shown if "pass9word" in text or "q7Zp" in text] == []
    assert sum("https://[redacted]@host" in text for text in shown) == 5


def test_a_damaged_cell_costs_no_summary_at_the_end_of_a_sweep(results: Callable[..., Path]) -> None:
    """The folder of a sweep is removed at its end, unless some cell's sidecar names it."""
    layout = Layout(results())
    layout.results.mkdir(parents=True)
    (layout.results / "broken.cell.json").write_bytes(b"\xff")
    sweep = Sweep(layout, {})
    sweep.begin_cell(OLD.id)
    sweep.end_cell(OLD.id)
    sweep.close()
    assert not sweep.has_begun


def test_a_report_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="no cell has left results there"):
        gather(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(MatrixError, match="no cell has left results there"):
        gather(tmp_path / "file")


def test_evidence_with_failures_of_any_shape_is_judged(results: Callable[..., Path]) -> None:
    pins = {"trl": "0.15.2", "transformers": "4.48.3"}
    odd = {
        "exception": [],
        "message": {},
        "classes": 3,
        "location": 4,
        "traceback": None,
        "other_ranks": {"a": {"classes": 1}},
    }
    folder = results((Sidecar("trl0.15.2-tf4.48.3", pins, TESTED, "s", pins), ()))
    (folder / "trl0.15.2-tf4.48.3.jsonl").write_bytes(line(issue=ISSUE, verdict="error", evidence=odd))
    assert main([str(folder)]) == 0
