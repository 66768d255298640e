"""The claims in the readings: each has an experiment and a rule that can fail, and the page is up to date."""

import re
import sys
from dataclasses import replace

import pytest

from brigade.course.modules import MODULES
from brigade.lab import claimed, claims
from brigade.lab.claim_registry import CITED, VERDICTS, CannotMeasure, Claim, Finding
from brigade.lab.claimed import CLAIMS
from brigade.lab.claims import CheckedClaim, check_claim, make_page

BY_NAME = {claim.name: claim for claim in CLAIMS}
CHEAP = [
    "xl-size", "xl-all-reduce-time", "one-flat-tensor", "early-layers", "hook-argument", "xl-buckets", "xl-tensors",
    "alignment", "bucket-size", "padding-overhead", "published-layout", "manager-mixtures", "benchmark-loop",
    "40k-slices", "equal-shares", "xl-headline", "xl-inverse", "layer-parameters", "published-reversed",
    "coalesce-175b", "epoch-saving", "published-param-sync", "cached-overlap", "bucket-view", "reduce-scatter-bytes",
]  # fmt: skip


def make_claim(verdict="wrong", found="wrong"):
    """Return a claim whose experiment gives the verdict `found`, and whose reading gives `verdict`."""
    return Claim("example", 1, "Water is dry", "a pump", "right if dry", verdict, lambda: Finding("4 drops", found))


@pytest.mark.all_modules
def test_claims_are_well_formed():
    assert len(BY_NAME) == len(CLAIMS)
    assert [one.module for one in CLAIMS] == sorted(one.module for one in CLAIMS)
    for one in CLAIMS:
        assert one.verdict in (VERDICTS if one.experiment else [CITED]), one.name
        assert one.claim and one.source and one.rule and "|" not in one.claim + one.source + one.rule


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_the_box_of_a_reading_names_its_claims(entry):
    box = (entry.lesson / "README.md").read_text().partition("## Claims, checked\n")[2].partition("\n## ")[0]
    rows = [line for line in box.splitlines() if line.startswith("|")][2:]
    names = [re.search(r"\| `([\w-]+)` \|$", row) for row in rows]
    assert all(names), "the last column is the claim's name"
    all_names = [one.name for one in CLAIMS if one.module == entry.number]
    assert [name[1] for name in names] == [one for one in all_names if one in {name[1] for name in names}]
    assert not names or "python -m brigade.lab.claims NAME" in box


@pytest.mark.all_modules
def test_the_page_is_up_to_date():
    """All columns except the measurements are compared: names, claims, sources, rules, verdicts, and cited claims."""

    def fixed(text):
        cells = [line.split(" | ") for line in text.splitlines()]
        return [row[:3] + row[4:] if len(row) == 6 and "cited" not in row[5] else row for row in cells]

    new = make_page(
        check_claim(one) if one.verdict == CITED else CheckedClaim(one, Finding("", one.verdict)) for one in CLAIMS
    )
    assert fixed(claims.PAGE.read_text()) == fixed(new), "python -m brigade.lab.claims --write"


@pytest.mark.parametrize("name", CHEAP)
def test_a_cheap_claim_is_what_the_reading_says(name):
    checked = check_claim(BY_NAME[name])
    assert checked.finding and checked.finding.verdict in VERDICTS
    assert checked.holds, f"{checked.measured}: {checked.verdict}"


def test_a_measurement_that_contradicts_the_reading_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(claimed, "CLAIMS", [make_claim("wrong", "right")])
    assert claims.run_claims([], write=tmp_path / "claims.md") == 1
    assert "right, but the reading says: wrong" in capsys.readouterr().out.replace("\n", " ")
    assert not list(tmp_path.iterdir()), "such a page is not written"


def test_good_claims_are_printed_and_written(monkeypatch, tmp_path, capsys):
    cited = replace(make_claim(CITED), name="other", module=2, experiment=None, rule="it takes a lake")
    monkeypatch.setattr(claimed, "CLAIMS", [make_claim(), cited])
    assert claims.run_claims([], write=tmp_path / "claims.md") == 0
    printed = capsys.readouterr().out
    assert "Water is dry" in printed and "4 drops" in printed and "(other)" in printed
    written = (tmp_path / "claims.md").read_text()
    assert "| `example` | Water is dry | a pump | 4 drops | right if dry | wrong |" in written
    assert "| `other` | Water is dry | a pump | not measured: it takes a lake |  | cited |" in written
    assert "## Module 2: [One flat all-reduce](../lessons/m02_flat_ddp/README.md)" in written


def test_what_this_machine_cannot_measure_is_said():
    def impossible():
        raise CannotMeasure("only ships can")

    checked = check_claim(replace(make_claim(), experiment=impossible))
    assert checked.measured == "not measured: only ships can" and checked.holds and checked.verdict == "wrong"


def test_an_unknown_name_gets_a_sentence(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["claims", "no-such-claim"])
    assert claims.main() == 2
    assert capsys.readouterr().err == "claims: there is no claim 'no-such-claim'; --list shows them all\n"


def test_the_list_names_them_all(capsys):
    assert claims.run_claims([], show_only=True) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == list(BY_NAME)


def test_verdicts_of_shares():
    assert [claimed.judge_cases(cases) for cases in ([True, True], [True, False], [False])] == [
        "right",
        "depends",
        "wrong",
    ]
