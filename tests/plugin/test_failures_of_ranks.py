"""What suites keep of the failures of a launch's ranks: every rank's, since another issue must explain each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.attribution import failures_in
from pytest_trlcompat.catalog.verdict import Verdict

HOOKS = "AttributeError: 'DeepSpeedZeRoOffload' object has no attribute '_register_hooks_recursively'"
NEW = "ValueError: BRAND NEW unexplained"
GONE = "RuntimeError: Connection closed by peer [127.0.0.1]:29500"


def test_a_training_keeps_what_every_rank_failed_with() -> None:
    from suites.sharding.trainings import Training

    def failing(*texts: str | None) -> Training:
        return Training([{"failure": text} for text in texts], {}, Path())

    assert failing(None, None).failure is None
    assert failing(None, HOOKS).failure == HOOKS
    assert failing(HOOKS, HOOKS).failures_of_other_ranks == {}
    both = failing(HOOKS, NEW)
    assert (both.failure, both.failures_of_other_ranks) == (
        HOOKS,
        {"failures_of_other_ranks": [NEW]},
    )
    waiting = failing(GONE, HOOKS)
    assert (waiting.failure, waiting.failures_of_other_ranks) == (HOOKS, {})
    assert failing(GONE, None).failure == GONE


def test_stages_keep_what_every_rank_failed_with() -> None:
    from suites.launches import Failures

    found = Failures.of([{"train": HOOKS, "after": GONE}, {"train": NEW, "before": None, "after": NEW}, {"train": NEW}])
    assert found.first == {"train": HOOKS, "after": NEW}
    assert found.of_other_ranks == {"failures_of_other_ranks": {"train": [NEW]}}
    assert Failures.of([{"train": None}, {}]) == Failures({}, {})
    assert Failures.of([{"train": GONE}, {"train": HOOKS}]).of_other_ranks == {}


def test_an_adapters_training_keeps_what_every_rank_failed_with() -> None:
    from suites.adapters.trainings import AdapterTraining

    def failing(*ranks: dict[str, Any]) -> AdapterTraining:
        return AdapterTraining(ranks, {}, Path())

    training = failing({"failure": None, "saving": HOOKS}, {"failure": None, "saving": NEW, "resuming": NEW})
    assert training.first == {"failure": None, "saving": HOOKS}
    assert training.failures().first == {"saving": HOOKS, "resuming": NEW}
    assert training.failures().others == {"saving": [NEW]}
    assert training.failures("training", "resuming").first == {"resuming": NEW}
    assert failing({"failure": None}, {"failure": NEW}).failures("training").first == {"training": NEW}


def test_a_variant_of_an_adapter_has_failed_where_any_rank_has() -> None:
    from suites.adapters.trainings import as_in_one_process, failures_in, with_every_failure

    right = {"failure": None, "losses": [1.0]}
    assert with_every_failure([right, right]) == right
    second = with_every_failure([right, {"failure": NEW}])
    assert second == {"failure": NEW, "losses": [1.0]}
    both = with_every_failure([{"failure": HOOKS}, {"failure": NEW}])
    assert both == {"failure": HOOKS, "failures_of_other_ranks": [NEW]}
    group = failures_in({"config": both, "model": second, "plain": right})
    assert (group.first, group.others) == ({"config": HOOKS, "model": NEW}, {"config": [NEW]})
    finding = as_in_one_process("lora-zero3-biases", both, right, 1)
    assert (finding.verdict, finding.evidence["failures_of_other_ranks"]) == (Verdict.ERROR, [NEW])


def test_a_stage_of_ppo_keeps_what_every_rank_raised() -> None:
    from suites.ppo.runs import PPORun, _of_all_ranks

    def raised(text: str, where: str = "trl/a.py:b") -> dict[str, str]:
        kind, _, message = text.partition(": ")
        return {"type": kind, "text": message, "traceback": "", "location": where}

    hooks, new, gone = raised(HOOKS), raised(NEW), raised(GONE)
    assert _of_all_ranks([None, hooks]) == hooks
    assert _of_all_ranks([hooks, hooks]) == hooks
    assert _of_all_ranks([gone, hooks]) == hooks
    assert _of_all_ranks([gone, None]) == gone
    both = _of_all_ranks([hooks, new])
    assert both == {**hooks, "other_ranks": {"1": new}}
    run = PPORun({"train": both}, [], 0, 0, {}, {})
    finding = run.failed(["train"], known_issues.load()["ppo-stale-trace"])
    assert finding is not None
    assert finding.verdict is Verdict.ERROR
    assert [(each.message, each.location) for each in failures_in(finding.evidence)] == [
        (HOOKS.partition(": ")[2], "trl/a.py:b"),
        (NEW.partition(": ")[2], "trl/a.py:b"),
    ]
    shown = run.evidence(["train"])
    assert shown["train"] == f"{HOOKS} (in trl/a.py:b)"
    assert shown["failures_of_other_ranks"] == {"train": [f"{NEW} (in trl/a.py:b)"]}
