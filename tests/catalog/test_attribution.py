"""Which known issue stopped a suite: by what was seen of its failures, and only where the catalogue predicts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.attribution import Attribution, Failed, attribute, attributed, expecting, failures_in
from pytest_trlcompat.catalog.issue import FINDINGS, SUBJECTS, KnownIssue
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Record, Verdict

OLD = {
    "trl": "0.14.0",
    "transformers": "4.52.4",
    "accelerate": "1.7.0",
    "deepspeed": "0.16.9",
    "peft": "0.15.2",
    "torch": "2.13.0",
}
HOOKS = "AttributeError: 'DeepSpeedZeRoOffload' object has no attribute '_register_hooks_recursively'"
EVALUATION = "AttributeError: 'list' object has no attribute 'get'"
DEVICES = "RuntimeError: Expected all tensors to be on the same device, but got self is on cpu"
TRIED = "AttributeError: 'NoneType' object has no attribute 'apply'"


def stopped(issue: str, strategy: str, seen: object, versions: dict[str, str] | None = None) -> Attribution | None:
    catalog = known_issues.load()
    stack = OLD if versions is None else versions
    predicted = catalog[issue].predict("upstream", strategy, stack)
    return attribute(list(failures_in(seen)), catalog[issue], strategy, stack, catalog, predicted)


def test_a_failure_that_is_the_symptom_of_another_issue_is_attributed_to_it() -> None:
    found = stopped("strategy-equivalence", "zero3", {"failure": HOOKS, "gathering": None})
    assert found == Attribution("deepspeed-hook-registration", ("deepspeed-hook-registration",))


def test_of_several_the_predicted_one_is_named_and_all_are_kept() -> None:
    seen = {"failures": {"evaluate_before": EVALUATION, "train": HOOKS}}
    both = ("deepspeed-hook-registration", "grpo-evaluate")
    assert stopped("deepspeed-evaluate-before-train", "zero3", seen) == Attribution(both[0], both)
    other = replace(known_issues.load()["deepspeed-evaluate-before-train"], predictions=())
    first = attribute(list(failures_in(seen)), other, "zero3", OLD, known_issues.load())
    assert first == Attribution(both[0], both)
    # The catalogue's order decides nothing where a prediction names the later one.
    named = known_issues.load()["grpo-eval-metrics"].predict("upstream", "single", OLD)
    assert named is not None
    assert named.by == "grpo-evaluate"
    assert attribute(list(failures_in(seen)), other, "zero3", OLD, known_issues.load(), named) == Attribution(
        "grpo-evaluate", both
    )


def test_one_failure_that_nobody_explains_leaves_all_an_error() -> None:
    seen = {"failures": {"train": HOOKS, "evaluate_after": "IndexError: list index out of range"}}
    assert stopped("deepspeed-evaluate-before-train", "zero3", seen) is None


@pytest.mark.parametrize("seen", [{}, {"failure": None}, {"failures": {}}, {"hooks": [1, 2]}, []])
def test_without_a_failure_nothing_is_attributed(seen: object) -> None:
    assert stopped("strategy-equivalence", "zero3", seen) is None


def test_a_symptom_counts_only_where_the_catalogue_predicts_its_issue() -> None:
    """Tensors on two devices are ``grpo-fsdp-ref-model`` under FSDP of old releases, and a riddle elsewhere."""
    named = Attribution("grpo-fsdp-ref-model", ("grpo-fsdp-ref-model",))
    assert stopped("fsdp-sharded-save", "fsdp2", {"failure": DEVICES}) == named
    assert stopped("strategy-equivalence", "zero3", {"failure": DEVICES}) is None
    assert stopped("fsdp-sharded-save", "fsdp1-no_shard", {"failure": DEVICES}) == named
    assert stopped("fsdp-sharded-save", "fsdp1-no_shard", {"failure": DEVICES}, OLD | {"trl": "0.18.2"}) is None
    assert stopped("grpo-prompt-mask", "single", {"failure": TRIED}, OLD | {"trl": "1.14.0"}) is None
    assert stopped("grpo-prompt-mask", "single", {"failure": TRIED}, OLD | {"trl": "1.15.0"}) is not None


MODEL = "torch/nn/functional.py:embedding < transformers/models/qwen2/modeling_qwen2.py:forward"
FROM_MODEL = f"{MODEL} < trl/trainer/grpo_trainer.py:"
SAMPLING = f"{MODEL} < transformers/generation/utils.py:generate < trl/trainer/grpo_trainer.py:_prepare_inputs"
EVALUATING = "transformers/trainer.py:<genexpr> < transformers/trainer.py:prediction_step"


@pytest.mark.parametrize(
    ("issue", "strategy", "text", "by", "location", "elsewhere"),
    [
        (
            *("fsdp-sharded-save", "fsdp2", DEVICES, "grpo-fsdp-ref-model"),
            *(f"{FROM_MODEL}_get_per_token_logps", "torch/optim/adamw.py:_fused_adamw < torch/optim/adamw.py:step"),
        ),
        (
            *("fsdp-sharded-save", "fsdp1", "RuntimeError: 'weight' must be 2-D", "grpo-fsdp-generation"),
            *(SAMPLING, f"{FROM_MODEL}compute_loss"),
        ),
        (
            *("grpo-eval-metrics", "single", EVALUATION, "grpo-evaluate"),
            *(EVALUATING, "transformers/trainer.py:training_step < transformers/trainer.py:train"),
        ),
    ],
)
def test_words_that_other_failures_share_count_only_where_the_issue_raises_them(
    issue: str, strategy: str, text: str, by: str, location: str, elsewhere: str
) -> None:
    found = stopped(issue, strategy, {"failure": f"{text} (in {location})"})
    assert found is not None
    assert found.by == by
    assert stopped(issue, strategy, {"failure": f"{text} (in {elsewhere})"}) is None
    unlocated = stopped(issue, strategy, {"failure": text})
    assert unlocated is not None, "evidence of before locations were kept"


@pytest.mark.parametrize(
    ("issue", "strategy", "versions"),
    [
        ("grpo-temperature", "single", {"trl": "0.17.0", "transformers": "4.50.3"}),  # broken in a variant alone
        ("grpo-prompt-mask", "ddp", {"trl": "0.15.2", "transformers": "4.48.3"}),  # wasteful, which raises nothing
    ],
)
def test_another_variant_or_a_verdict_that_raises_nothing_explains_nothing(
    issue: str, strategy: str, versions: dict[str, str]
) -> None:
    seen = {"failure": "TypeError: forward() got an unexpected keyword argument 'logits_to_keep'"}
    assert stopped(issue, strategy, seen, OLD | versions) is None
    broken_there = stopped(issue, "single-neither", seen, OLD | versions)
    assert broken_there is not None
    assert broken_there.by == "grpo-logits-to-keep"


def test_a_plain_strategy_stops_its_variants_and_not_the_reverse() -> None:
    catalog = known_issues.load()
    blocking, other = catalog["grpo-fsdp-generation"], catalog["strategy-equivalence"]
    broken = replace(blocking.predictions[-1], verdict=Verdict.BROKEN, when={}, subject="upstream")
    plain = replace(blocking, strategies=(), predictions=(replace(broken, strategies=("fsdp1",)),))
    variant = replace(blocking, strategies=(), predictions=(replace(broken, strategies=("fsdp1-no_shard",)),))
    assert [plain.may_stop_under(other, each, OLD) for each in ("fsdp1", "fsdp1-no_shard", "fsdp2")] == [
        True,
        True,
        False,
    ]
    assert [variant.may_stop_under(other, each, OLD) for each in ("fsdp1", "fsdp1-no_shard")] == [False, True]


def test_what_a_suite_shows_without_a_trainer_stops_every_trainer() -> None:
    """Where GRPO is stopped before, DeepSpeed's hooks are shown by TRL's function alone, and stop PPO."""
    versions = OLD | {"trl": "0.15.2"}
    hooks = known_issues.load()["deepspeed-hook-registration"]
    assert hooks.without_trainer == ("zero3-direct",)
    predicted = hooks.predict("upstream", "zero3", versions)
    assert predicted is not None
    assert predicted.verdict is Verdict.BLOCKED
    found = stopped("ppo-stale-trace", "zero3", {"failure": HOOKS}, versions)
    assert found == Attribution(hooks.id, (hooks.id,))
    ppo = known_issues.load()["ppo-stale-trace"]
    assert not replace(hooks, without_trainer=()).may_stop_under(ppo, "zero3", versions)
    assert not hooks.may_stop_under(ppo, "zero2", versions)


def test_an_issue_of_another_trainer_stops_nothing() -> None:
    """``pop from an empty deque`` is the symptom of an issue of GRPO and of one of PPO."""
    seen = {"type": "IndexError", "text": "pop from an empty deque", "traceback": ""}
    versions = OLD | {"trl": "0.18.2", "transformers": "4.53.3"}
    assert stopped("lora-zero3-whole-modules", "zero3", seen, versions) == Attribution(
        "grpo-lora-stale-trace", ("grpo-lora-stale-trace",)
    )
    assert stopped("ppo-zero3-save", "zero3", seen, versions) == Attribution("ppo-stale-trace", ("ppo-stale-trace",))


def test_that_a_release_lacks_grpo_says_nothing_of_ppo() -> None:
    seen = {"type": "AttributeError", "text": HOOKS.partition(": ")[2]}
    without_grpo = OLD | {"trl": "0.13.0", "transformers": "4.50.3"}
    hooks = known_issues.load()["deepspeed-hook-registration"]
    prediction = hooks.predict("upstream", "zero3", without_grpo)
    assert prediction is not None
    assert prediction.verdict is Verdict.ABSENT
    found = stopped("ppo-stale-trace", "zero3", seen, without_grpo)
    assert found is not None
    assert found.by == hooks.id


def test_what_is_hidden_itself_explains_nothing() -> None:
    """Its own suite does not get as far as its symptom, so another one's failure is no sign of it."""
    catalog = known_issues.load()
    hidden = catalog["grpo-lora-checkpointing"]
    versions = OLD | {"trl": "0.15.2"}
    predicted = hidden.predict("upstream", "single", versions)
    assert predicted is not None
    assert predicted.by == "grpo-train-sampler"
    seen = {"failure": "RuntimeError: element 0 of tensors does not require grad"}
    assert not hidden.may_stop_under(catalog["strategy-equivalence"], "single", versions)
    assert stopped("strategy-equivalence", "single", seen, versions) is None
    assert hidden.may_stop_under(catalog["strategy-equivalence"], "single", versions | {"transformers": "4.51.3"})


def test_what_only_trls_own_trainer_hides_stops_the_corrected_one() -> None:
    """TRL's KTO ends at its sampler; cured of that, it ends where it evaluates data that it has not prepared."""
    catalog = known_issues.load()
    versions = OLD | {"trl": "0.14.0", "transformers": "4.52.4"}
    raw, trained = catalog["kto-evaluated-raw"], catalog["kto-precomputed-trained"]
    (label,) = trained.strategies
    predicted = [raw.predict(subject, raw.strategies[0], versions) for subject in ("upstream", "corrected")]
    assert [each and each.verdict for each in predicted] == [Verdict.BLOCKED, Verdict.BROKEN]
    assert raw.may_stop_under(trained, label, versions)


@pytest.mark.parametrize(
    ("seen", "classes", "message"),
    [
        ("ModuleNotFoundError: no x", ("ModuleNotFoundError", "ImportError", "Exception"), "no x"),
        ({"a": [{"failure": "CheckpointError: torch: y"}]}, ("CheckpointError",), "torch: y"),
        ({"exception": "KeyError", "message": "True", "traceback": "ValueError: x"}, ("KeyError",), "True"),
        ({"type": "ValueError", "text": "zip() argument 2", "traceback": "e: x"}, ("ValueError",), "zip() argument 2"),
        ({"exception": "X", "message": "m", "classes": ["X", "Exception"]}, ("X", "Exception"), "m"),
    ],
)
def test_failures_are_found_in_what_suites_keep(seen: object, classes: tuple[str, ...], message: str) -> None:
    (found,) = failures_in(seen)
    assert found.message == message
    assert found.classes[0] == classes[0]
    assert set(classes) <= set(found.classes)


def test_failures_have_their_locations_and_those_of_other_ranks() -> None:
    frame = '  File "/e/lib/python3.11/site-packages/trl/x.py", line 3, in f'
    traceback = f"Traceback (most recent call last):\n{frame}\nKeyError: True\n"
    others = {"1": {"exception": "ValueError", "message": "new"}}
    seen = {"exception": "KeyError", "message": "True", "traceback": traceback, "other_ranks": others}
    assert [(each.message, each.location) for each in failures_in(seen)] == [("True", "trl/x.py:f"), ("new", "")]
    (text,) = failures_in({"failure": "KeyError: True (in trl/x.py:f < torch/y.py:g)"})
    assert (text.message, text.frames) == ("True", ("trl/x.py:f", "torch/y.py:g"))


def test_numbers_and_names_are_no_failures() -> None:
    assert not list(failures_in({"ref_class": "FullyShardedDataParallel", "kl": [0.1], "off": None, "a": "b"}))


def test_a_record_is_held_against_the_issue_that_is_named() -> None:
    prediction = known_issues.load()["grpo-eval-metrics"].predict("upstream", "single", OLD)
    record = Record("grpo-eval-metrics", "upstream", "single", Verdict.BLOCKED, None, {"blocked_by": "grpo-evaluate"})
    right = expecting(record, prediction)
    assert (right.expected, right.as_predicted, right.blocked_by) == (Verdict.BLOCKED, True, "grpo-evaluate")
    wrong = expecting(replace(record, evidence={"blocked_by": "grpo-train-sampler"}), prediction)
    assert not wrong.as_predicted
    assert wrong.evidence["blocked_by_expected"] == "grpo-evaluate"
    assert expecting(wrong, None).evidence == {"blocked_by": "grpo-train-sampler"}
    assert expecting(wrong, None).as_predicted


def blocked_predictions() -> Catalog:
    found = known_issues.load()
    assert (
        sum(prediction.verdict is Verdict.BLOCKED for issue in found.values() for prediction in issue.predictions) > 90
    )
    return found


def test_whoever_is_said_to_stop_a_suite_is_a_problem_there_itself() -> None:
    """On every stack that was measured; what stops nothing cannot be why.

    In the same training of a conformance suite what is silent hides what follows, too.
    """
    catalog = blocked_predictions()
    wrong = []
    for cell in evidence.published().cells:
        for issue, subject, strategy in cell.verdicts:
            prediction = catalog[issue].predict(subject, strategy, cell.versions)
            if prediction is None or not prediction.by:
                continue
            by = catalog[prediction.by]
            hides = catalog[issue].suite == FINDINGS and is_problem(by, cell.versions)
            if not hides and not by.may_stop_under(catalog[issue], strategy, cell.versions):
                wrong.append((cell.id, issue, strategy, prediction.by))
    assert wrong == []


def is_problem(issue: KnownIssue, versions: Mapping[str, str]) -> bool:
    predicted = (issue.predict(subject, label, versions) for subject in SUBJECTS for label in issue.labels())
    return any(each is not None and each.verdict.is_own_problem for each in predicted)


def explained(issue: KnownIssue) -> list[str]:
    return [each.why for each in issue.predictions if each.verdict is Verdict.ERROR]


def test_an_error_is_predicted_only_where_no_known_issue_explains_it() -> None:
    """There is none: whoever predicts one must say here why nobody can explain it."""
    assert [why for issue in known_issues.load().values() for why in explained(issue)] == []


def test_a_record_is_attributed_again_by_another_catalogue() -> None:
    catalog = known_issues.load()
    issue = catalog["strategy-equivalence"]
    record = Record(issue.id, "upstream", "zero3", Verdict.ERROR, None, {"failure": HOOKS, "gathering": None})
    again = attributed(record, issue, OLD, catalog)
    assert (again.verdict, again.blocked_by) == (Verdict.BLOCKED, "deepspeed-hook-registration")
    without = Catalog({name: each for name, each in catalog.items() if name != "deepspeed-hook-registration"})
    assert attributed(again, issue, OLD, without) == record
    for unchanged in (
        replace(record, subject="corrected"),
        replace(record, verdict=Verdict.BROKEN),
        replace(record, evidence={}),
        replace(again, evidence={"blocked_by": "grpo-evaluate"}),
    ):
        assert attributed(unchanged, issue, OLD, catalog) == unchanged
    predicted = replace(issue.predictions[-1], subject="corrected", verdict=Verdict.BLOCKED, by=again.blocked_by)
    ours = attributed(replace(record, subject="corrected"), issue, OLD, catalog, predicted)
    assert ours.verdict is Verdict.BLOCKED


BLOCKED = """
schema = 1
[[issue]]
id = "first"
title = "t"
wrong = "s"
severity = "weights"
upstream = []
suite = "s"
cure = ""
[[issue.symptom]]
type = "RuntimeError"
text = "x"
[[issue.prediction]]
verdict = "broken"
subject = "upstream"
when = {}
why = "w"
[[issue]]
id = "second"
title = "t"
wrong = "s"
severity = "weights"
upstream = []
suite = "s"
cure = ""
[[issue.prediction]]
verdict = "blocked"
by = "first"
subject = "upstream"
when = {}
why = "w"
"""


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('by = "first"', 'by = "third"', "issue second: blocked by 'third', which is no other issue"),
        ('by = "first"', 'by = "second"', "issue second: blocked by 'second', which is no other issue"),
        (
            'by = "first"\n',
            "",
            "issue second: a blocked prediction must name the issue that stops the suite first, by =",
        ),
        ('"blocked"', '"ok"', "issue second: by = 'first' belongs to a blocked prediction, and this one is of ok"),
        ('id = "second"', 'id = "ppo-x"', "issue ppo-x: blocked by 'grpo-y', which is of another trainer"),
        ('[[issue.symptom]]\ntype = "RuntimeError"\ntext = "x"\n', "", "'first', which has no .*symptom"),
    ],
)
def test_mistakes_in_blocked_predictions_are_named(tmp_path: Path, old: str, new: str, text: str) -> None:
    path = tmp_path / "catalog.toml"
    path.write_text(BLOCKED)
    (prediction,) = known_issues.load(path)["second"].predictions[-1:]
    assert prediction.describe() == "blocked by first for upstream with every version (w)"
    assert old in BLOCKED
    changed = BLOCKED.replace(old, new, 1)
    if "ppo" in new:
        changed = changed.replace('"first"', '"grpo-y"')
    other = tmp_path / "other.toml"
    other.write_text(changed)
    with pytest.raises(known_issues.CatalogError, match=text):
        known_issues.load(other)


def test_an_exception_is_known_by_its_class_and_text() -> None:
    (failed,) = failures_in("KeyError: True")
    assert failed == Failed(failed.classes, "True")
    assert known_issues.load()["grpo-fsdp-ref-model"].shows(failed.classes, failed.message)


@pytest.mark.parametrize("subject", ["upstream", "corrected"])
def test_what_a_conformance_suite_has_explained_stays_explained(subject: str) -> None:
    catalog = known_issues.load()
    evidence = {
        "blocked_by": "grpo-nameless-reward",
        "symptoms_of": ["grpo-nameless-reward"],
        "failure": "AttributeError: 'functools.partial' object has no attribute '__name__'",
        "differing": ["training"],
    }
    record = Record("conformance-grpo", subject, "single-rewards_partial", Verdict.BLOCKED, Verdict.OK, evidence)
    versions = {"trl": "0.14.0", "transformers": "4.48.3"}
    assert attributed(record, catalog["conformance-grpo"], versions, catalog) == record
    assert record.as_predicted
    unexplained = replace(record, verdict=Verdict.ERROR, evidence={"failure": evidence["failure"]})
    assert not unexplained.as_predicted


def test_what_conformance_found_may_stop_a_row_that_is_none_of_its_own() -> None:
    catalog = known_issues.load()
    smoothing, chunked = catalog["sft-label-smoothing-accumulation"], catalog["sft-label-smoothing-chunked"]
    versions = {"trl": "1.7.1", "transformers": "5.23.0"}
    (label,) = smoothing.strategies
    assert chunked.may_stop_under(smoothing, label, versions)
    assert not chunked.may_stop_under(smoothing, label, {**versions, "trl": "1.6.0"})
    # Its prediction names no strategy, and so holds under each.
    assert chunked.may_stop_under(smoothing, label.replace("single", "ddp"), versions)
    head, newest = catalog["sft-saved-head"], {**versions, "trl": "1.16.0"}
    assert head.may_stop_under(smoothing, label.replace("single", "fsdp1"), newest)
    assert not head.may_stop_under(smoothing, label, newest)
