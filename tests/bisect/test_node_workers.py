"""Candidates on nodes: what a node observes, and what happens when it is lost or cannot run one.

A node's environments are made up, see :mod:`tests.matrix.engines.made_up_node`; in the tests of the workers the cluster
is as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from pytest_trlcompat.bisect import cli
from pytest_trlcompat.bisect.candidates import PreparedCandidate
from pytest_trlcompat.bisect.candidates.releases import Releases
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.journal import Journal
from pytest_trlcompat.bisect.node_program import MODULE, NodeTest
from pytest_trlcompat.bisect.node_workers import NodeWorkers
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.bisect.predicate import IssuePredicate
from pytest_trlcompat.bisect.session import CandidateTest, Evaluation
from pytest_trlcompat.matrix.engines.messages import Cancelled, Failed, Lost, NodeReport, NodeTask, ProgramEnd
from pytest_trlcompat.matrix.engines.nodes import Nodes
from pytest_trlcompat.matrix.engines.options import of_words
from pytest_trlcompat.matrix.engines.task import run_program
from pytest_trlcompat.matrix.environments import name_of
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import known
from pytest_trlcompat.matrix.parsing import read_matrix
from tests.matrix.engines.made_up_node import CELLS, ROOT, Node, cell
from tests.matrix.made_up import BROKEN, OK

ISSUE = "grpo-train-sampler"
End = ProgramEnd | Lost | Failed | Cancelled
SEEN = Observation(passed={"single": "ok"})
OBSERVED = ProgramEnd(0, "", json.dumps({"observation": SEEN.to_json()}))


def candidate_test(tmp_path: Path, version: str = "4.48.3") -> CandidateTest:
    layout = Layout(ROOT)
    source = Releases(read_matrix(layout.matrix), layout, "transformers", [version], {"trl": "0.15.2"}, tmp_path)
    return CandidateTest(source, source.candidates[0], IssuePredicate(layout, ISSUE), Journal(tmp_path / "journal"))


def lock_of(test: CandidateTest) -> str:
    prepared = test.prepare()
    assert isinstance(prepared, PreparedCandidate)
    assert prepared.lock is not None
    return prepared.lock.to_text()


def program(node: Node, test: NodeTest) -> ProgramEnd:
    return run_program(NodeTask(cache=str(node.cache), own_caches=False), MODULE, test.to_json())


def test_a_node_observes_a_candidate_by_its_lock_alone(tmp_path: Path) -> None:
    node = Node(tmp_path / "cache", CELLS[:1])
    node.play(BROKEN, OK)
    end = program(node, NodeTest(lock_of(candidate_test(tmp_path)), ISSUE))
    assert end.status == 0, end.output
    assert end.result is not None
    seen = Observation.from_json(json.loads(end.result)["observation"])
    assert {name: failure.kind for name, failure in seen.failed.items()} == {"single": "broken"}
    assert not seen.passed  # of the corrected trainer
    assert seen.reused  # the environment was there
    (call,) = node.calls
    arguments = call["arguments"]
    assert isinstance(arguments, list)
    assert arguments[-4:] == [ISSUE, str(ROOT / "suites"), "--trlcompat-subject", "upstream"]
    assert [path.name for path in (node.cache / "locks").iterdir()]  # so that its environment can be removed some day
    assert not list((node.cache / "runs").iterdir())


def test_a_node_that_cannot_read_what_it_is_told_says_so(tmp_path: Path) -> None:
    node = Node(tmp_path / "cache", CELLS[:1])
    end = program(node, NodeTest("trl", ISSUE))
    assert end.status == 0, end.output
    assert end.result is not None
    assert "is not NAME==VERSION" in json.loads(end.result)["error"]


class MadeUpCluster:
    """Stands for :class:`RayPrograms`: each start has the next of these ends, on the node that goes with it."""

    def __init__(self, *ends: tuple[str, End]) -> None:
        self.ends = list(ends)
        self.started: list[tuple[int, list[str], list[str]]] = []
        self.stopped: list[int] = []

    def start(
        self, key: int, module: str, text: str, preferred: Collection[str] = (), avoided: Collection[str] = ()
    ) -> None:
        assert (module, NodeTest.from_json(text).issue) == (MODULE, ISSUE)
        self.started.append((key, list(preferred), list(avoided)))

    def next(self) -> tuple[int, str, End]:
        node, end = self.ends.pop(0)
        return self.started[-1][0], node, end

    def stop(self, keys: Iterable[int]) -> None:
        self.stopped += keys


def nodes() -> list[NodeReport]:
    """The second has the environment."""
    layout = Layout(ROOT)
    lock = known(read_matrix(layout.matrix), cell(CELLS[0]), layout)
    assert lock is not None
    return [NodeReport("1", "one", "/c"), NodeReport("2", "two", "/c", (name_of(lock, layout),))]


def workers_of(cluster: MadeUpCluster, said: list[str]) -> NodeWorkers:
    return NodeWorkers(cluster, Layout(ROOT), Nodes(nodes(), "candidates"), said.append)


def test_a_candidate_goes_where_its_environment_is(tmp_path: Path) -> None:
    cluster = MadeUpCluster(("2", OBSERVED))
    workers = workers_of(cluster, [])
    test = candidate_test(tmp_path)
    workers.start(3, test)
    assert workers.running() == {3}
    key, done = workers.next()
    prepared = test.prepare()
    assert isinstance(prepared, PreparedCandidate)
    assert (key, done) == (3, Evaluation(prepared.identity, SEEN))
    assert cluster.started == [(3, ["2"], [])]
    assert workers.running() == set()


def test_what_was_observed_before_is_not_sent(tmp_path: Path) -> None:
    cluster = MadeUpCluster()
    workers = workers_of(cluster, [])
    test = candidate_test(tmp_path)
    prepared = test.prepare()
    assert isinstance(prepared, PreparedCandidate)
    test.journal.add("another", "another day", prepared.identity, SEEN)
    workers.start(1, test)
    assert workers.next() == (1, Evaluation(prepared.identity, SEEN, "another day"))
    assert cluster.started == []


@pytest.mark.parametrize("lost", [Lost("NodeDiedError: gone"), ProgramEnd(-9, "", None)])
def test_a_candidate_that_is_lost_twice_is_untestable(tmp_path: Path, lost: End) -> None:
    said: list[str] = []
    workers = workers_of(MadeUpCluster(("", lost), ("", lost)), said)
    workers.start(0, candidate_test(tmp_path))
    _, done = workers.next()
    assert not done.observation.conclusive
    assert done.observation.reason.startswith("untestable: what tested it was lost each time: a node: ")
    assert [line.partition(": lost")[0] for line in said] == ["transformers 4.48.3"]


@pytest.mark.parametrize(
    "failed, why",
    [
        (Failed("there is no C++ compiler"), "there is no C++ compiler"),
        (ProgramEnd(1, "one\nImportError: no x\n", None), "its process ended with exit status 1: ImportError: no x"),
        (ProgramEnd(0, "", json.dumps({"error": "the disk is full"})), "the disk is full"),
    ],
)
def test_a_node_that_cannot_run_a_candidate_gets_no_more(tmp_path: Path, failed: End, why: str) -> None:
    said: list[str] = []
    cluster = MadeUpCluster(("2", failed), ("1", OBSERVED))
    workers = workers_of(cluster, said)
    workers.start(0, candidate_test(tmp_path))
    assert workers.next()[1].observation == SEEN
    assert cluster.started == [(0, ["2"], []), (0, [], ["2"])]
    assert said == [f"transformers 4.48.3: not run (two: {why}); tried elsewhere"]


def test_a_candidate_that_no_node_can_run_is_one_error(tmp_path: Path) -> None:
    workers = workers_of(MadeUpCluster(("2", Failed("no compiler")), ("1", Failed("no index"))), [])
    workers.start(0, candidate_test(tmp_path))
    with pytest.raises(BisectError) as found:
        workers.next()
    assert "transformers 4.48.3 could be tested on no node. Every finished step is kept" in str(found.value)
    assert str(found.value).endswith("two: no compiler; one: no index")


def test_a_candidate_that_is_not_needed_any_more_is_stopped(tmp_path: Path) -> None:
    cluster = MadeUpCluster()
    workers = workers_of(cluster, [])
    workers.start(0, candidate_test(tmp_path))
    workers.start(1, candidate_test(tmp_path, "4.49.0"))
    workers.stop([1, 7])
    assert (cluster.stopped, workers.running()) == ([1], {0})


ENDS = ("releases", "--package", "transformers", "--good", "4.48.3", "--bad", "4.49.0")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--command", "true", "--engine", "ray"], "--engine ray tests known issues alone"),
        (["--issue", ISSUE, "--engine", "ray", "--clone", "trl=."], "--clone is for this machine alone"),
        (["--issue", ISSUE, "--address", "auto"], "are for --engine ray; add that, or leave them out"),
        (["--issue", ISSUE, "--engine", "ray", "--address", "nowhere"], "--address 'nowhere' is none of"),
    ],
)
def test_what_cannot_be_done_on_nodes_is_one_error_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.main([*ENDS, *words, "--state", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_the_session_sees_from_the_command_line_whether_ray_is_needed() -> None:
    found = of_words([*ENDS, "--issue", ISSUE, "--engine", "ray", "--ray-version", "2.60.0", "--ray-python", "3.12"])
    assert found is not None
    assert (found.version, found.python) == ("2.60.0", "3.12")
    assert of_words([*ENDS, "--issue", ISSUE]) is None
    assert of_words([*ENDS, "--engine", "slurm"]) is None  # the command itself says what is wrong
