"""The catalogue: its schema, and what it predicts for the combinations that were measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_trlcompat import _data
from pytest_trlcompat.catalog import known_issues, remedies
from pytest_trlcompat.catalog.issue import STRATEGIES, Prediction, measured_with
from pytest_trlcompat.catalog.regions import unreachable
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.conformance import rows

ENTRY = """
schema = 1
[[issue]]
id = "one"
title = "t"
wrong = "s"
severity = "weights"
upstream = ["https://example.org/1"]
suite = "test_one.py"
cure = "resuming"
workaround = "r"
[[issue.symptom]]
type = "RuntimeError"
text = "on the same device"
[[issue.prediction]]
verdict = "broken"
subject = "upstream"
when = { trl = "<1.0" }
strategies = ["fsdp1*"]
why = "w"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "catalog.toml"
    path.write_text(text)
    return path


def test_each_issue_has_a_suite_links_and_a_cure() -> None:
    issues = known_issues.load()
    assert set(issues) >= {"grpo-logits-to-keep", "grpo-fsdp-ref-model"}
    for issue in issues.values():
        assert (_data.suites() / issue.suite).is_file()
        named = f'known_issue("{issue.id}")' in (_data.suites() / issue.suite).read_text()
        shown = issue.strategies and (issue.differences or issue.symptoms)
        if issue.suite.startswith("vllm/"):  # a test there measures what issues of all trainers have in their ids
            kind = issue.id.partition("-vllm-")[2]
            named = re.search(rf'measurements\([^)]*"{kind}"', (_data.suites() / issue.suite).read_text()) is not None
        named = named or issue.suite == "conformance/test_conformance.py"
        assert named or (issue.suite == "conformance/test_findings.py" and shown)
        assert all(link.startswith("https://github.com/") for link in issue.upstream)
        assert issue.wrong
        assert remedies.remedy(issue)
        for module in filter(None, (issue.cure, *issue.cure_with)):
            assert (Path(known_issues.__file__).parents[2] / (module.replace(".", "/") + ".py")).is_file()


@pytest.mark.parametrize(
    ("trl", "transformers", "verdict"),
    [
        ("0.14.0", "4.48.3", Verdict.OK),
        ("0.14.0", "4.51.3", Verdict.OK),
        ("0.14.0", "4.52.4", Verdict.SILENT),
        ("0.15.2", "4.48.3", Verdict.WASTEFUL),
        ("0.15.2", "4.49.0", Verdict.OK),
        ("1.16.0", "5.23.0", Verdict.OK),
    ],
)
def test_predictions_for_logits_to_keep(trl: str, transformers: str, verdict: Verdict) -> None:
    issue = known_issues.load().get_issue("grpo-logits-to-keep")
    prediction = issue.predict("upstream", "single", {"trl": trl, "transformers": transformers})
    assert prediction is not None
    assert prediction.verdict is verdict


@pytest.mark.parametrize(
    ("trl", "transformers", "accelerate", "fsdp1", "fsdp2"),
    [
        ("0.15.2", "4.49.0", "1.4.0", Verdict.BROKEN, Verdict.ABSENT),
        ("0.17.0", "4.50.3", "1.6.0", Verdict.BROKEN, Verdict.ABSENT),
        ("0.14.0", "4.52.4", "1.7.0", Verdict.BROKEN, Verdict.BROKEN),
        ("0.18.2", "4.52.4", "1.7.0", Verdict.OK, Verdict.BROKEN),
        ("1.0.0", "4.57.6", "1.13.0", Verdict.OK, Verdict.OK),
    ],
)
def test_predictions_for_the_reference_model(
    trl: str, transformers: str, accelerate: str, fsdp1: Verdict, fsdp2: Verdict
) -> None:
    issue = known_issues.load().get_issue("grpo-fsdp-ref-model")
    versions = {"trl": trl, "transformers": transformers, "accelerate": accelerate}
    found = [issue.predict("upstream", strategy, versions) for strategy in ("fsdp1", "fsdp1-no_shard", "fsdp2")]
    assert [prediction and prediction.verdict for prediction in found] == [fsdp1, fsdp1, fsdp2]


def test_corrected_is_ok_unless_the_catalogue_says_otherwise(tmp_path: Path) -> None:
    issue = known_issues.load(write(tmp_path, ENTRY)).get_issue("one")
    prediction = issue.predict("corrected", "fsdp1", {"trl": "0.1"})
    assert prediction is not None
    assert prediction.verdict is Verdict.OK


def test_strategy_and_range_limit_a_prediction(tmp_path: Path) -> None:
    issue = known_issues.load(write(tmp_path, ENTRY)).get_issue("one")
    prediction = issue.predict("upstream", "fsdp1", {"trl": "0.18.2"})
    assert prediction is not None
    assert prediction.describe() == "broken for upstream under fsdp1* with trl <1.0 (w)"
    assert issue.predict("upstream", "fsdp1-no_shard", {"trl": "0.18.2"}) == prediction
    assert issue.predict("upstream", "fsdp2", {"trl": "0.18.2"}) is None
    assert issue.predict("upstream", "fsdp1", {"trl": "1.0"}) is None


def test_an_entry_names_its_cure_by_the_last_part_of_its_module(tmp_path: Path) -> None:
    issue = known_issues.load(write(tmp_path, ENTRY)).get_issue("one")
    assert issue.cure == "pytest_trlcompat.trainers.checkpoints.resuming"


def test_a_symptom_is_a_type_and_a_text(tmp_path: Path) -> None:
    issue = known_issues.load(write(tmp_path, ENTRY)).get_issue("one")
    assert issue.shows(("OutOfMemoryError", "RuntimeError", "Exception"), "all tensors to be on the same device")
    assert not issue.shows(("ValueError", "Exception"), "all tensors to be on the same device")
    assert not issue.shows(("RuntimeError",), "another text")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('subject = "upstream"', 'subject = "ours"', "issue one: unknown subject 'ours'"),
        ('verdict = "broken"', 'verdict = "bad"', "issue one: 'bad' is not a valid Verdict"),
        ('trl = "<1.0"', 'trl = "before 1.0"', "issue one: malformed version range 'before 1.0' for trl"),
        ('trl = "<1.0"', 'tlr = "<1.0"', "issue one: unknown package 'tlr'"),
        ('suite = "test_one.py"', "", "issue one: missing key 'suite'"),
        ('workaround = "r"', 'cured_in = "trl 1.0"', "issue one: unknown key cured_in"),
        ('title = "t"', 'titel = "t"', "issue one: unknown key titel"),
        (
            'cure = "resuming"',
            'cure = "resumings"',
            "no module of pytest_trlcompat.trainers is called resumings: give its name",
        ),
        (
            'cure = "resuming"',
            'cure = "pytest_trlcompat.trainers.checkpoints.resuming"',
            "no module of pytest_trlcompat.trainers is called pytest_trlcompat.trainers.checkpoints.resuming: give its",
        ),
        ('text = "on', 'text = "(on', "issue one: missing \\)"),
        ('trl = "<1.0"', 'trl = ">=1.0,<0.9"', "issue one: no version of trl lies in the range '>=1.0,<0.9'"),
        ('["fsdp1*"]', '["fsdp3*"]', "issue one: strategy pattern 'fsdp3\\*' matches none of single, ddp, "),
        ('["fsdp1*"]', '"fsdp1"', "issue one: strategies must be a list of texts, not 'fsdp1'"),
        ('["fsdp1*"]', '["fsdp1", "fsdp1"]', "issue one: strategies names something twice: fsdp1, fsdp1"),
        ('suite = "test_one.py"', 'suite = "s"\nstrategies = ["fsdp4"]', "issue one: unknown strategy 'fsdp4'"),
        ('suite = "test_one.py"', 'suite = "s"\nstrategies = ["fsdp*"]', "issue one: unknown strategy 'fsdp\\*'"),
        (
            'suite = "test_one.py"',
            'suite = "s"\nstrategies = ["zero3", "single"]',
            "issue one: strategy pattern 'fsdp1\\*' matches none of this issue's: zero3, single",
        ),
        ('suite = "test_one.py"', 'suite = "s"\nneeds = ["pfet"]', "issue one: unknown package 'pfet'"),
        (
            'suite = "test_one.py"',
            'suite = "s"\nstrategies = ["fsdp1"]\nwithout_trainer = ["fsdp1-direct"]',
            "issue one: without_trainer names fsdp1-direct, which strategies does not list",
        ),
        ('text = "on the same device"', 'text = "on"\nwhere = "(on"', "issue one: missing \\)"),
        ('wrong = "s"', 'wrong = "s\\nt"', "issue one: wrong must be one line of text, not 's\\\\nt'"),
        ('workaround = "r"', 'workaround = " "', "issue one: workaround must be one line of text, not ' '"),
        ('title = "t"', "title = 1", "issue one: title must be one line of text, not 1"),
        ('why = "w"', 'why = ""', "issue one: why must be one line of text, not ''"),
        ('severity = "weights"', "", "issue one: missing key 'severity'"),
        ('"weights"', '"bad"', "issue one: unknown severity 'bad'; known are weights, crash, numbers, cost, message"),
        ("schema = 1", "schema = 2", "schema 1 was expected, 2 was found"),
        ("schema = 1", "schema =", "Invalid value"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, text: str) -> None:
    assert old in ENTRY
    with pytest.raises(known_issues.CatalogError, match=text):
        known_issues.load(write(tmp_path, ENTRY.replace(old, new, 1)))


def test_every_prediction_can_be_reached() -> None:
    for issue in known_issues.load().values():
        assert [prediction.describe() for prediction in unreachable(issue)] == [], issue.id


def test_every_entry_bites_somewhere() -> None:
    for issue in known_issues.load().values():
        if issue.id.startswith("conformance-"):
            continue  # what it finds are other entries
        verdicts = [prediction.verdict for prediction in issue.predictions]
        assert any(verdict.is_problem for verdict in verdicts), issue.id


def test_severity_is_what_an_entry_says_else() -> None:
    """As far as that decides it: who writes that what is trained is right does not call it another model."""
    for issue in known_issues.load().values():
        own = (Verdict.SILENT, Verdict.BROKEN, Verdict.WASTEFUL)
        problems = {each.verdict for each in issue.predictions if each.verdict in own}
        if problems == {Verdict.BROKEN}:
            assert issue.severity == "crash", issue.id
        if problems == {Verdict.WASTEFUL}:
            assert issue.severity == "cost", issue.id
        if (
            problems
            and Verdict.BROKEN not in problems
            and re.search("(trained|training|weights) (is|are) right", issue.wrong)
        ):
            assert issue.severity in ("numbers", "cost", "message"), issue.id


def test_a_conformance_suite_measures_with_the_trainer_that_its_id_ends_with() -> None:
    known = known_issues.load()
    suites = [issue for issue in known.values() if issue.id.startswith("conformance-")]
    found = {issue.id: (issue.trainer, measured_with(issue.id)) for issue in suites}
    wanted = {f"conformance-{each.replace('_', '-')}": (each.removeprefix("first_"), each) for each in rows.TRAINERS}
    assert found == wanted
    old = known["conformance-ppo"].predict("upstream", "single-default", {"trl": "0.12.2"})
    assert old is not None
    assert old.verdict is Verdict.OK, "it is absent where there is no PPO, not where there is no GRPO"


def test_links_are_whole_and_named_once() -> None:
    for issue in known_issues.load().values():
        for link in issue.upstream:
            assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull|discussions|commit)/\w+", link), link


def test_where_an_issue_may_show_is_what_it_lists_or_what_its_predictions_name(tmp_path: Path) -> None:
    listed = ENTRY.replace('suite = "test_one.py"', 'suite = "test_one.py"\nstrategies = ["fsdp1", "fsdp1-no_shard"]')
    named = ENTRY.replace('["fsdp1*"]', '["fsdp1", "fsdp1-no_shard", "zero*"]')
    every = ENTRY.replace('strategies = ["fsdp1*"]', "")
    labels = []
    for number, text in enumerate((listed, ENTRY, named, every)):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        labels.append(known_issues.load(path)["one"].labels())
    assert labels == [
        ("fsdp1", "fsdp1-no_shard"),
        ("fsdp1",),
        ("zero1", "zero2", "zero3", "fsdp1", "fsdp1-no_shard"),
        STRATEGIES,
    ]


def test_a_catalogue_is_read_as_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "catalog.toml"
    path.write_bytes(ENTRY.replace('title = "t"', 'title = "Gedächtnis"').encode())
    assert known_issues.load(path)["one"].title == "Gedächtnis"


def test_an_issue_stands_there_once(tmp_path: Path) -> None:
    with pytest.raises(known_issues.CatalogError, match="issue one stands there twice"):
        known_issues.load(write(tmp_path, ENTRY + ENTRY.replace("schema = 1", "")))


def test_an_unknown_issue_is_refused_with_the_known_ones() -> None:
    with pytest.raises(known_issues.CatalogError, match="unknown issue 'grpo'; known are .*grpo-fsdp-ref-model, "):
        known_issues.load().get_issue("grpo")


def test_a_symptom_may_say_where_it_is_raised(tmp_path: Path) -> None:
    where = ENTRY.replace('text = "on the same device"\n', TEXT_AND_WHERE)
    assert where != ENTRY
    issue = known_issues.load(write(tmp_path, where)).get_issue("one")
    said = (("RuntimeError",), "all tensors to be on the same device")
    assert issue.shows(*said, "torch/nn/functional.py:embedding < trl/trainer/x.py:f")
    assert not issue.shows(*said, "torch/optim/adamw.py:step")
    assert issue.shows(*said), "it is not asked of a failure whose location was not kept"


TEXT_AND_WHERE = """text = "on the same device"
where = '^torch/nn/functional\\.py:embedding'
"""


FILE = """
title = "t"
wrong = "s"
severity = "weights"
upstream = []
suite = "test_one.py"
cure = ""
symptom = [
    { type = "RuntimeError", text = "x" },
]
prediction = [
    # Why this one stands first.
    { verdict = "broken", subject = "both", when = { trl = "<1.0" }, why = "w" },
    { verdict = "ok", subject = "upstream", when = { trl = ">=1.0" }, why = "mended" },
]
"""
BLOCKED = """
title = "t"
wrong = "s"
severity = "weights"
upstream = []
suite = "test_two.py"
cure = ""
prediction = [
    { verdict = "blocked", by = "grpo-one" },
    { verdict = "silent", subject = "upstream", when = {}, why = "w" },
]
"""


def write_files(folder: Path, **texts: str) -> Path:
    (folder / "grpo").mkdir()
    (folder / "absent.toml").write_text('schema = 1\n[absent.grpo]\nwhen = { trl = "<0.14" }\nwhy = "none yet"\n')
    for name, text in {"one": FILE, "two": BLOCKED, **texts}.items():
        (folder / "grpo" / f"grpo-{name}.toml").write_text(text)
    return folder


def test_a_folder_has_a_file_for_each_issue_and_a_prediction_may_be_of_both_subjects(tmp_path: Path) -> None:
    catalog = known_issues.load(write_files(tmp_path))
    assert list(catalog) == ["grpo-one", "grpo-two"]
    assert [each.describe() for each in catalog["grpo-one"].predictions] == [
        "absent for upstream with trl <0.14 (none yet)",
        "absent for corrected with trl <0.14 (none yet)",
        "broken for upstream with trl <1.0 (w)",
        "broken for corrected with trl <1.0 (w)",
        "ok for upstream with trl >=1.0 (mended)",
    ]


@pytest.mark.parametrize(
    ("written", "described"),
    [
        (
            '{ verdict = "blocked", by = "grpo-one" }',
            [
                "blocked by grpo-one for upstream under fsdp1* with trl <1.0 (w)",
                "blocked by grpo-one for corrected under fsdp1* with trl <1.0 (w)",
            ],
        ),
        (
            '{ verdict = "blocked", by = "grpo-one", subject = "corrected", strategies = ["fsdp1"], why = "mine" }',
            ["blocked by grpo-one for corrected under fsdp1 with trl <1.0 (mine)"],
        ),
        (
            '{ verdict = "blocked", by = "grpo-one", subject = "upstream", when = { trl = "<0.20" }, why = "mine" }',
            ["blocked by grpo-one for upstream with trl <0.20 (mine)"],
        ),
    ],
)
def test_what_a_blocked_prediction_without_ranges_leaves_out_is_as_its_blocker_has_it(
    tmp_path: Path, written: str, described: list[str]
) -> None:
    one = FILE.replace("""<1.0" }, why""", """<1.0" }, strategies = ["fsdp1*"], why""")
    two = BLOCKED.replace('{ verdict = "blocked", by = "grpo-one" }', written)
    catalog = known_issues.load(write_files(tmp_path, one=one, two=two))
    predictions = [each.describe() for each in catalog["grpo-two"].predictions[2:]]
    assert predictions == [*described, "silent for upstream with every version (w)"]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            '"both"',
            '"all"',
            "grpo-one.toml:13: issue grpo-one: unknown subject 'all'; known are upstream, corrected, both",
        ),
        ('trl = ">=1.0"', 'trl = ">1.0,<0.9"', "grpo-one.toml:14: issue grpo-one: no version of trl lies in the range"),
        ('why = "mended"', 'because = "x"', "grpo-one.toml:14: issue grpo-one: unknown key because"),
        (', why = "mended"', "", "grpo-one.toml:14: issue grpo-one: missing key 'why'"),
        (
            'trl = ">=1.0" }',
            'trl = ">=1.0" }, strategies = ["fsdp9"]',
            "grpo-one.toml:14: issue grpo-one: strategy pattern 'fsdp9' matches none",
        ),
        ('"broken"', '"silent"', "grpo-two.toml:9: issue grpo-two: blocked by 'grpo-one', which is nowhere broken"),
        ('suite = "test_one.py"', "", "grpo-one.toml: issue grpo-one: missing key 'suite'"),
        ('suite = "test_one.py"', 'id = "grpo-one"', "grpo-one.toml: issue grpo-one: unknown key id: the file's name"),
        ('suite = "test_one.py"', "suite =", r"grpo-one.toml: Invalid value \(at line 6, column 8\)"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_line(tmp_path: Path, old: str, new: str, text: str) -> None:
    assert old in FILE
    with pytest.raises(known_issues.CatalogError, match=text):
        known_issues.load(write_files(tmp_path, one=FILE.replace(old, new, 1)))


def test_a_blocked_prediction_names_an_issue_that_is_there(tmp_path: Path) -> None:
    two = BLOCKED.replace('by = "grpo-one"', 'by = "grpo-three"')
    with pytest.raises(known_issues.CatalogError, match=r"grpo-two\.toml:9: .* blocked by 'grpo-three', which is no"):
        known_issues.load(write_files(tmp_path, two=two))


def test_a_file_lies_where_its_name_says(tmp_path: Path) -> None:
    folder = write_files(tmp_path)
    (folder / "grpo" / "ppo-three.toml").write_text(FILE)
    with pytest.raises(known_issues.CatalogError, match=r"the file of an issue with this id is .*/ppo/ppo-three\.toml"):
        known_issues.load(folder)


def test_a_folder_without_an_issue_is_no_catalogue(tmp_path: Path) -> None:
    (tmp_path / "absent.toml").write_text("schema = 1\n")
    with pytest.raises(known_issues.CatalogError, match="there is no file of an issue in its folders"):
        known_issues.load(tmp_path)


@pytest.mark.parametrize("pattern", ["fsdp*", "fsdp?", "fsdp[12]"])
def test_every_pattern_of_strategies_that_is_read_matches(pattern: str) -> None:
    prediction = Prediction(Verdict.OK, "upstream", {}, (pattern,), "")
    assert prediction.concerns("upstream", "fsdp1")
    assert not prediction.concerns("upstream", "zero1")
