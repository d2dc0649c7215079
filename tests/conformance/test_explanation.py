"""Which differences the catalogue explains."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.attribution import Failed
from suites.conformance import reduction
from suites.conformance.explanation import changes_what_follows, explained, failed_by

ENTRIES = """
schema = 1

[[issue]]
id = "grpo-kl-log"
title = "t"
wrong = "w"
severity = "weights"
upstream = []
suite = "conformance/test_findings.py"
cure = ""
strategies = ["single"]

[[issue.difference]]
quantity = 'logs\\[kl\\]'
setting = { beta = [0.1, 0.2] }

[[issue.prediction]]
verdict = "silent"
subject = "upstream"
when = { trl = "<1" }
why = "y"

[[issue]]
id = "grpo-gradients"
title = "t"
wrong = "w"
severity = "weights"
upstream = []
suite = "conformance/test_findings.py"
cure = ""
strategies = ["single", "ddp"]

[[issue.difference]]
quantity = 'gradients\\[.*\\]'

[[issue.difference]]
quantity = 'steps'
where = 'batch 1'

[[issue.prediction]]
verdict = "silent"
subject = "upstream"
when = { trl = "<1" }
strategies = ["single"]
why = "y"

[[issue]]
id = "grpo-name"
title = "t"
wrong = "w"
severity = "weights"
upstream = []
suite = "conformance/test_findings.py"
cure = ""
strategies = ["single-partial"]

[[issue.symptom]]
type = "AttributeError"
text = "has no attribute '__name__'"

[[issue.difference]]
quantity = 'prompts'

[[issue.prediction]]
verdict = "broken"
subject = "upstream"
when = { trl = "<1" }
why = "y"

[[issue]]
id = "ppo-name"
title = "t"
wrong = "w"
severity = "weights"
upstream = []
suite = "ppo/test_ppo_x.py"
cure = ""
strategies = ["single"]

[[issue.symptom]]
type = "AttributeError"
text = "has no attribute"

[[issue.prediction]]
verdict = "broken"
subject = "upstream"
when = { trl = "<1" }
why = "y"
"""
KL, GRADIENT, WEIGHT, LOSS = (
    {"stage": stage} for stage in ("logs[kl]", "gradients[lm_head.weight]", "weights[lm_head.weight]", "logs[loss]")
)


@pytest.fixture
def catalog(tmp_path: Any) -> known_issues.Catalog:
    path = tmp_path / "catalog.toml"
    path.write_text(ENTRIES)
    return known_issues.load(path)


def of(catalog: known_issues.Catalog, *differences: Any, **changed: Any) -> tuple[list[str], Any]:
    asked = {"setting": {"beta": 0.1}, "subject": "upstream", "label": "single-beta", "versions": {"trl": "0.20.0"}}
    return explained(differences, **{**asked, **changed}, catalog=catalog)


def test_a_difference_that_is_predicted_is_that_issues(catalog: known_issues.Catalog) -> None:
    assert of(catalog, KL) == (["grpo-kl-log"], None)


@pytest.mark.parametrize(
    "changed",
    [
        {"versions": {"trl": "1.0.0"}},  # a release of which it is not predicted
        {"subject": "corrected"},
        {"setting": {"beta": 0.3}},  # not with this setting
        {"setting": {}},
    ],
)
def test_a_difference_that_is_not_predicted_is_a_finding(changed: Any, catalog: known_issues.Catalog) -> None:
    assert of(catalog, KL, **changed) == ([], KL)


def test_what_is_measured_in_one_process_alone_explains_the_same_under_a_strategy(
    catalog: known_issues.Catalog,
) -> None:
    assert of(catalog, KL, label="ddp-beta") == (["grpo-kl-log"], None)


def test_an_issue_that_raises_explains_no_difference(catalog: known_issues.Catalog) -> None:
    prompts = {"stage": "prompts"}
    assert of(catalog, prompts) == ([], prompts)


def test_what_is_measured_with_ddp_explains_other_strategies_with_ranks_too(tmp_path: Any) -> None:
    path = tmp_path / "catalog.toml"
    path.write_text(
        ENTRIES.replace(
            'strategies = ["single"]\n\n[[issue.difference]]\nquantity = \'logs',
            'strategies = ["ddp"]\n\n[[issue.difference]]\nquantity = \'logs',
        )
    )
    catalog = known_issues.load(path)
    assert of(catalog, KL, label="zero2-x") == (["grpo-kl-log"], None)
    assert of(catalog, KL, label="ddp-x") == (["grpo-kl-log"], None)
    assert of(catalog, KL) == ([], KL)


def test_weights_show_wrong_gradients_where_a_strategy_shards_them(tmp_path: Any) -> None:
    path = tmp_path / "catalog.toml"
    path.write_text(ENTRIES.replace('strategies = ["single"]\nwhy', 'strategies = ["single", "zero2"]\nwhy'))
    path.write_text(path.read_text().replace('strategies = ["single", "ddp"]', 'strategies = ["single", "zero2"]'))
    catalog = known_issues.load(path)
    assert of(catalog, WEIGHT, label="zero2-x") == (["grpo-gradients"], None)
    assert of(catalog, WEIGHT) == ([], WEIGHT)


@pytest.mark.parametrize(
    "stage, changes",
    [("prompts", True), ("advantages", True), ("gradients[w]", True), ("weights[w]", True), ("refusal", True)]
    + [(each, False) for each in ("logs[kl]", "evaluation[eval_kl]", "evaluate()[eval_kl]", "generation[top_k]")]
    + [(each, False) for each in ("config[model_init_kwargs]", "table", "seed", "data[labels]", "best_model[w]")],
)
def test_a_number_that_is_only_shown_changes_nothing_after_it(stage: str, changes: bool) -> None:
    assert changes_what_follows(stage) is changes


def test_a_training_that_fails_shows_the_issues_whose_symptom_it_is(catalog: known_issues.Catalog) -> None:
    failure = Failed(("AttributeError", "Exception"), "'functools.partial' object has no attribute '__name__'")
    other = Failed(("TypeError", "Exception"), "has no attribute '__name__'")

    def ids(failure: Failed, version: str = "0.20.0", subject: str = "upstream", label: str = "single-x") -> list[str]:
        return failed_by(failure, subject, label, {"trl": version}, catalog)

    assert ids(failure) == ids(failure, label="ddp-x") == ["grpo-name"]  # not that of the other trainer
    assert ids(failure, version="1.0.0") == ids(failure, subject="corrected") == ids(other) == []


def test_a_wrong_log_explains_nothing_that_follows(catalog: known_issues.Catalog) -> None:
    assert of(catalog, KL, LOSS) == (["grpo-kl-log"], LOSS)


def test_wrong_gradients_explain_all_that_follows(catalog: known_issues.Catalog) -> None:
    assert of(catalog, KL, GRADIENT, WEIGHT, LOSS) == (["grpo-kl-log", "grpo-gradients"], None)


def test_what_comes_before_is_not_explained(catalog: known_issues.Catalog) -> None:
    assert of(catalog, WEIGHT, GRADIENT) == ([], WEIGHT)


@pytest.mark.parametrize("where, explains", [("batch 1", True), ("batch 1, step 0", True), ("batch 0", False)])
def test_a_difference_is_explained_in_the_place_that_the_entry_names(
    where: str, explains: bool, catalog: known_issues.Catalog
) -> None:
    steps = {"stage": "steps", "where": where}
    assert of(catalog, steps) == ((["grpo-gradients"], None) if explains else ([], steps))


def test_an_issue_of_another_strategy_explains_nothing(catalog: known_issues.Catalog) -> None:
    assert of(catalog, GRADIENT, label="ddp-x") == ([], GRADIENT)


def test_a_finding_is_reduced_to_the_settings_that_it_needs() -> None:
    tried = []

    def differs(part: Any) -> bool:
        tried.append(dict(part))
        return {"beta", "loss_type"} <= set(part)

    setting = {"beta": 0.1, "temperature": 0.7, "loss_type": "dapo", "delta": 1.5}
    assert reduction.smallest(setting, differs) == {"beta": 0.1, "loss_type": "dapo"}
    assert setting not in tried
    assert reduction.smallest(setting, lambda part: True) == {}
    assert reduction.smallest({}, differs) == {}
