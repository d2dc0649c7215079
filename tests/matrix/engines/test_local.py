"""Cells side by side on this machine: real processes of a fake pytest, what they leave, and what a person sees."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_trlcompat.catalog.verdict import Record, Verdict, read_records
from pytest_trlcompat.matrix.engines.local import known_seconds, measured_costs
from pytest_trlcompat.matrix.engines.places import Places
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.results import read_sidecar
from tests.launch.processes import wait_until_gone

from .beside import NEW, OLD, OLDEST, PROJECT, Checkout, machine

SERIOUS = "grpo-bf16-logprobs"
"""A known issue of the severity ``weights``."""


def records(name: str, *, issue: str = "issue-a", verdict: Verdict = Verdict.OK) -> list[Record]:
    return [Record(issue, "upstream", f"single-{name}", verdict, verdict)]


GROUPS = {name: records(name) for name in ("a", "b", "c", "d")}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    checkout = Checkout(tmp_path)
    checkout.replace_environments(monkeypatch.setattr)
    return checkout


def test_cells_run_side_by_side_and_what_they_print_is_shown_in_the_order_of_their_sessions(checkout: Checkout) -> None:
    checkout.play(OLD, {"a": records("a")}, seconds=3.0, meet=2)
    checkout.play(OLDEST, {"b": records("b")}, meet=2)
    engine = checkout.engine(OLD, OLDEST)
    assert engine.wait(OLD.id).problem is None
    assert checkout.most_at_a_time() == 2
    # The other has ended meanwhile, and shows nothing of its own before its session asks.
    assert [line.splitlines()[0] for line in checkout.said] == [
        *(line for line in checkout.said if line.startswith("[1/2]")),
        *(line for line in checkout.said if line.startswith("[2/2]")),
        f"{OLD.id}: what pytest printed",
    ]
    assert f"; {OLDEST.id}: 1 verdict in" in checkout.said[0]
    assert engine.wait(OLDEST.id).problem is None
    assert checkout.said[-1] == f"{OLDEST.id}: what pytest printed\n{OLDEST.id} b"
    assert list((checkout.layout.results / ".running").iterdir()) == []


def test_two_processes_of_one_cell_share_its_groups(checkout: Checkout) -> None:
    many = {f"{number:02}": records(str(number)) for number in range(40)}
    checkout.play(NEW, many, seconds=0.05, meet=2)
    outcome = checkout.engine(NEW, newest=NEW.id).wait(NEW.id)
    assert (outcome.problem, outcome.sidecar.state) == (None, "tested")
    assert checkout.most_at_a_time() == 2
    assert sorted(checkout.groups_of(NEW)) == sorted(many)
    assert sorted(record.strategy for record in outcome.records) == sorted(f"single-{number}" for number in range(40))
    assert [line for line in checkout.said if "(process 2 of 2)" in line]
    assert set(known_seconds(checkout.layout, NEW.id)) == set(many)


@pytest.mark.fault(
    "There is memory for one process and not for two, or others keep all cores busy.",
    "One process measures, then the next; each verdict is there once.",
)
@pytest.mark.parametrize("busy", [machine(memory=2**30), machine(others=1.9), machine(cores=1.0), machine(others=1.0)])
def test_a_machine_without_room_for_two_runs_one_at_a_time(checkout: Checkout, busy: object) -> None:
    for cell in (NEW, OLD):
        checkout.play(cell, GROUPS, seconds=0.1)
    places = Places(checkout.layout.results / ".places", machine=busy)  # type: ignore[arg-type]
    engine = checkout.engine(NEW, OLD, places=places, newest=NEW.id)
    for cell in (NEW, OLD):
        assert engine.wait(cell.id).problem is None
        assert sorted(checkout.groups_of(cell)) == sorted(GROUPS)
    assert checkout.most_at_a_time() == 1


def test_parallel_is_the_most_that_run_at_a_time(checkout: Checkout) -> None:
    for cell in (NEW, OLD, OLDEST):
        checkout.play(cell, GROUPS, seconds=0.2, meet=2)
    places = Places(checkout.layout.results / ".places", 2, machine=machine(cores=16.0))
    engine = checkout.engine(NEW, OLD, OLDEST, places=places)
    assert [engine.wait(cell.id).problem for cell in (NEW, OLD, OLDEST)] == [None] * 3
    assert checkout.most_at_a_time() == 2


def test_the_newest_is_first_then_those_that_take_longest(checkout: Checkout) -> None:
    for cell in (NEW, OLD, OLDEST):
        checkout.play(cell, {"a": records("a")})
    places = Places(checkout.layout.results / ".places", 1, machine=machine())
    engine = checkout.engine(OLD, OLDEST, NEW, places=places, newest=NEW.id, costs={OLD.id: 1, OLDEST.id: 5, NEW.id: 2})
    for cell in (OLD, OLDEST, NEW):
        engine.wait(cell.id)
    assert [cell for _, _, cell, what in sorted(checkout.log()) if what == "began"] == [NEW.id, OLDEST.id, OLD.id]


def test_the_verdicts_that_matter_most_come_first_and_are_shown_as_they_come(checkout: Checkout) -> None:
    serious = {name: records(name, issue=SERIOUS, verdict=Verdict.SILENT) for name in ("y", "z")}
    checkout.play(NEW, {**GROUPS, **serious}, answers=["y", "z"], seconds=0.1)
    places = Places(checkout.layout.results / ".places", 1, machine=machine())
    assert checkout.engine(NEW, places=places, newest=NEW.id).wait(NEW.id).problem is None
    assert checkout.groups_of(NEW) == ["y", "z", "a", "b", "c", "d"]
    assert checkout.said[:3] == [
        *(f"{NEW.id}: {SERIOUS}, upstream, single-{name}: silent, as predicted" for name in ("y", "z")),
        f"{NEW.id}: 2 verdicts of issues by which another model is trained or saved, all as predicted. TRL's own "
        "trainers have 1 of them; the corrected ones have none of them. The others follow",
    ]


def test_the_groups_that_took_longest_are_first(checkout: Checkout) -> None:
    checkout.play(OLD, GROUPS)
    places = Places(checkout.layout.results / ".places", 1, machine=machine())
    (checkout.layout.results / ".seconds").mkdir(parents=True)
    (checkout.layout.results / ".seconds" / f"{OLD.id}.json").write_text('{"c": 9.0, "a": 1.0, "b": 4.0, "d": 2.0}')
    assert measured_costs(checkout.layout, {OLD.id: 8.0, NEW.id: 4.0}) == {OLD.id: 16.0, NEW.id: 8.0}
    checkout.engine(OLD, places=places).wait(OLD.id)
    assert checkout.groups_of(OLD) == ["c", "b", "d", "a"]


@pytest.mark.fault(
    "A process that measures a cell is killed, for want of memory, say.",
    "What it had begun is measured by the cell's other process, or by a new one; each verdict is there once.",
)
@pytest.mark.parametrize("number", [1, 2], ids=["alone", "beside another"])
def test_what_a_killed_process_had_begun_is_measured_by_another(checkout: Checkout, number: int) -> None:
    checkout.play(NEW, GROUPS, seconds=0.5, killed="b", meet=number)
    places = Places(checkout.layout.results / ".places", number, machine=machine())
    outcome = checkout.engine(NEW, places=places, newest=NEW.id).wait(NEW.id)
    assert outcome.problem is None
    assert sorted(checkout.groups_of(NEW)) == ["a", "b", "b", "c", "d"]
    assert sorted(record.strategy for record in outcome.records) == [f"single-{name}" for name in "abcd"]
    goes_on = f"{NEW.id}: pytest was killed by signal 9; goes on with what it has not measured"
    assert (goes_on in checkout.said) == (number == 1)


def test_a_process_that_is_killed_again_and_again_leaves_its_cell_unfinished_with_the_reason(
    checkout: Checkout,
) -> None:
    checkout.play(NEW, GROUPS, killed="b", deaths=9)
    places = Places(checkout.layout.results / ".places", 1, machine=machine())
    outcome = checkout.engine(NEW, places=places, newest=NEW.id).wait(NEW.id)
    assert outcome.problem == f"{NEW.id} was not finished: pytest was killed by signal 9"
    assert sorted(checkout.groups_of(NEW)).count("b") == 2
    assert len(list(checkout.root.glob("death-*"))) == 2


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (2, "pytest ended with exit status 2; see its output"),
        (5, "pytest collected no suite; is the name of the issue correct?"),
    ],
)
def test_a_cell_is_finished_only_if_all_its_processes_have_ended_well(
    checkout: Checkout, status: int, reason: str
) -> None:
    checkout.play(NEW, GROUPS, status=status)
    assert checkout.engine(NEW).wait(NEW.id).problem == f"{NEW.id} was not finished: {reason}"


def test_groups_that_nobody_ran_are_missing(checkout: Checkout) -> None:
    checkout.play(NEW, GROUPS)
    python = checkout.root / "env" / "bin" / "python"
    python.write_text(python.read_text().replace("    claim.done()\n", "    claim.done() if name != 'c' else None\n"))
    problem = checkout.engine(NEW).wait(NEW.id).problem
    assert problem == f"{NEW.id} was not finished: 1 of 4 groups of launches were not run: c"


def test_a_cell_that_cannot_be_prepared_is_its_own_sessions_error(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.play(OLD, GROUPS)
    (checkout.layout.results).mkdir(parents=True)
    (checkout.layout.results / f"{NEW.id}.cell.json").write_text("{")
    engine = checkout.engine(NEW, OLD, newest=NEW.id)
    with pytest.raises(MatrixError, match=r"cell\.json: damaged"):
        engine.wait(NEW.id)
    assert engine.wait(OLD.id).problem is None


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {project!r})
from tests.matrix.engines.beside import NEW, OLD, Checkout
checkout = Checkout(Path({folder!r}), say=lambda text: print(text, flush=True))
checkout.replace_environments(setattr)
engine = checkout.engine(NEW, OLD, newest=NEW.id)
try:
    engine.wait(NEW.id)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.fault(
    "Ctrl-C while several cells run side by side.",
    "All their processes end, finished verdicts are kept, and the same command continues after them.",
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_verdicts_and_no_process(checkout: Checkout, number: signal.Signals) -> None:
    checkout.play(NEW, {"a": records("a")})
    checkout.engine(NEW).wait(NEW.id)  # to be run anew: it was finished by a command that ended
    checkout.play(NEW, GROUPS, seconds=300)
    checkout.play(OLD, GROUPS, seconds=300)
    (checkout.root / "log.jsonl").unlink()
    script = SCRIPT.format(project=str(PROJECT), folder=str(checkout.root))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        deadline = time.monotonic() + 120
        while sum(what in GROUPS for *_, what in checkout.log()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        running.send_signal(number)
        printed = running.stdout.read()
        assert running.wait(60) == 130
    for _, pid, _, _ in checkout.log():
        wait_until_gone(pid)
    stopped = f"{NEW.id}: stopped; 0 finished verdicts are kept, the same command continues after them"
    assert stopped in printed.splitlines()
    sidecar = read_sidecar(checkout.layout.results / f"{NEW.id}.cell.json")
    assert (sidecar.state, sidecar.reason) == ("interrupted", "it was stopped")
    assert list((checkout.layout.results / ".running").iterdir()) == []
    # The next command goes on.
    checkout.play(NEW, GROUPS)
    assert checkout.engine(NEW).wait(NEW.id).problem is None
    assert len(read_records(checkout.layout.results / f"{NEW.id}.jsonl")) == 4
