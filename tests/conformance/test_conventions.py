"""What holds for a release."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from pytest_trlcompat.conformance import conventions, rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_a_release_has_the_first_entry_whose_range_holds() -> None:
    old, between, new = (conventions.of_release("grpo", version, "5.0.0") for version in ("0.15.2", "0.17.0", "1.16.0"))
    assert (old.absent["loss_type"], between.absent["loss_type"]) == ("grpo", "bnpo")
    assert (old.absent["steps_per_generation"], "steps_per_generation" in between.absent) == (1, False)
    assert "reward_std_over" not in new.absent
    assert [each.undecided.get("clip_extremes_of") for each in (between, new)] == ["micro_batches", None]


def test_what_transformers_logs_depends_on_its_release() -> None:
    found = [conventions.of_release("grpo", "1.0.0", version).undecided for version in ("4.50.3", "4.51.3")]
    assert [each.get("learning_rate_logged") for each in found] == ["next", None]


def test_ppo_has_conventions_of_its_own() -> None:
    found = conventions.of_release("ppo", "1.12.0", "5.0.0")
    assert (found.undecided["score_at"], found.undecided["whiten_correction"]) == ("after_last_token", 1)
    assert "no_reward" not in found.undecided
    assert found.absent == {}


def test_what_is_logged_of_tokens_depends_on_the_release_of_trl() -> None:
    found = {each: conventions.of_release("grpo", each, "4.50.0").undecided for each in ("0.15.2", "0.18.2", "1.9.0")}
    assert [each.get("kl_logged_over") for each in found.values()] == ["completions", None, None]
    assert [each["metrics_mean"] for each in found.values()] == ["micro_batches"] * 3
    assert [each.get("clip_extremes_of") for each in found.values()] == ["micro_batches", "micro_batches", None]
    assert [each.get("lone_reward_std_logged") for each in found.values()] == [None, None, False]
    assert [each.get("reference_scored_at") for each in found.values()] == [None, "step", None]


def test_no_entry_has_a_key_that_nobody_reads() -> None:
    files = [Path(conventions.__file__).with_name(each) / "conventions.toml" for each in rows.TRAINERS]
    raw = [tomllib.loads(each.read_text()) for each in files]
    assert {key for each in raw for key in each} == {"convention", "unrecorded"}
    for each in raw:
        for entry in each.get("unrecorded", ()):
            assert {*entry} <= {"quantities", "why", "unless", "trl", "transformers"}, entry
    entries = [entry for each in raw for entry in each["convention"]]
    assert {key for entry in entries for key in entry} <= {"field", "value", "absent", "trl", "transformers"}
    assert [each.name for each in fields(conventions.Conventions)] == ["undecided", "absent", "unrecorded"]


def test_what_a_release_does_not_show_is_stated_by_name_and_may_depend_on_a_field() -> None:
    found = conventions.of_release("dpo", "1.16.0", "5.23.0")
    always, plain = (found.unrecorded_with({"precompute_ref_log_probs": each}) for each in (True, False))
    assert {"logps[chosen]", "logps[rejected]"} <= {*always} < {*plain}
    assert "logps[reference_chosen]" in {*plain} - {*always}
    assert "computed before the training" in plain["logps[reference_chosen]"]
    before = conventions.of_release("dpo", "0.28.0", "4.57.0").unrecorded_with({})
    assert "logps[chosen]" not in before
    assert "logs[entropy]" in before
    assert "logs[entropy]" not in plain
