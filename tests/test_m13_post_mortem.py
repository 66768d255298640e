"""Graded checks of module 13: which rank broke a job that hangs."""

import html as markup
import json
import re
from functools import partial

import pytest

from brigade.course.table.modules import ROOT
from brigade.ranks.claims import At
from brigade.ranks.verdict import join_names
from m13_post_mortem import causes, scenario
from m13_post_mortem import expected as jobs

DUMPS = ROOT / "tests" / "m13_post_mortem" / "dumps"
VERSIONS = ("2.11", "2.13", "2.15")  # of torch, which recorded the dumps
CULPRITS = {"skip": "1", "blocked": "1", "size": "2", "circle": "12", "behind": "2", "ended": "0", "healthy": ""}
CULPRITS["stuck"] = "01"
KINDS = {"skip": "missing", "blocked": "different_op", "size": "different_size", "circle": "circular"}
REPETITIONS = 40  # of each kind of job
FAULTS = [jobs.stay_healthy, *(partial(jobs.skip_or_add, kind=kind) for kind in ("missing", "extra")), jobs.swap]
FAULTS += [partial(jobs.change, field=field) for field in jobs.CONTENTS]
FAULTS += [jobs.die, jobs.leave_early, *(partial(jobs.stop_early, kind=kind) for kind in ("ended", "behind"))]
FAULTS += [jobs.fall_behind, jobs.stop_inside, jobs.wait_in_a_circle, jobs.queue_in_a_circle, jobs.get_stuck]
FAULTS += [jobs.run_ahead, jobs.record_nothing, jobs.wait_elsewhere, jobs.stand_between, jobs.leave_a_stuck_call]
FAULTS += [jobs.wait_for_a_gpu, jobs.wait_in_a_message, jobs.keep_running, jobs.keep_an_old_dump]


@pytest.mark.parts("Part (a): calls side by side")
@pytest.mark.points(2)
def test_calls_are_aligned(submission):
    """align returns every call by group, number and rank. The order of the traces does not matter."""
    expect_alignment(submission, [jobs.shuffle_traces(submission.rng, job) for job in draw(submission, FAULTS)])


@pytest.mark.points(2)
def test_overwritten_calls(submission):
    """align leaves out numbers that a rank's full ring buffer has overwritten, and groups without other numbers."""
    rng = submission.rng
    expect_alignment(submission, [jobs.lose_anything(rng, job) for job in draw(submission, FAULTS)])


@pytest.mark.parts("Parts (b) to (d): where the calls diverge")
@pytest.mark.points(2)
def test_first_difference(submission):
    """find_divergence returns the first number at which calls of living members differ or one is missing."""
    kinds = [job for job in FAULTS if job not in (jobs.stop_inside, jobs.wait_in_a_circle)]
    expect_divergence(submission, [jobs.lose_some(submission.rng, job) for job in draw(submission, kinds)])


@pytest.mark.points(2)
def test_the_group_that_others_wait_for(submission):
    """If a group diverges because members wait in another group, find_divergence returns the place in the other one."""
    drawn = draw(submission, (jobs.stop_inside, jobs.wait_in_a_circle), 5 * REPETITIONS)
    expect_divergence(submission, [jobs.lose_some(submission.rng, job) for job in drawn])


@pytest.mark.parts("Parts (e) to (h): the culprit")
@pytest.mark.points(2)
def test_calls_that_differ(submission):
    """diagnose names the minority that launched another operation, size or dtype; without a majority, all of them."""
    kinds = [partial(jobs.change, field=field, has_majority=most) for field in jobs.CONTENTS for most in (True, False)]
    expect_finding(submission, [*kinds, jobs.change_twice])


@pytest.mark.points(2)
def test_missing_and_extra_calls(submission):
    """diagnose says that culprits skipped or added a call, and did not swap two, if their later calls prove it."""
    kinds = [partial(jobs.skip_or_add, kind=kind) for kind in ("missing", "extra")]
    expect_finding(submission, [*kinds, jobs.skip_then_differ, jobs.swap])


@pytest.mark.points(1)
@pytest.mark.needs("test_first_difference")
def test_ranks_that_stop(submission):
    """diagnose tells dead ranks, ranks that have ended, and ranks that are behind from those that wait for them."""
    ends = [partial(jobs.stop_early, kind=kind) for kind in ("ended", "behind")]
    expect_finding(
        submission,
        [jobs.stay_healthy, jobs.die, jobs.die_after_a_difference, *ends, jobs.fall_behind, jobs.stop_inside]
        + [jobs.wait_elsewhere, jobs.leave_early],
    )


@pytest.mark.points(1)
def test_circles(submission):
    """If groups wait for each other, diagnose names the few members who hold up the others, and the circle's places."""
    expect_finding(submission, [jobs.wait_in_a_circle, jobs.queue_in_a_circle, jobs.stand_between])


@pytest.mark.points(1)
def test_stuck(submission):
    """If all members have launched the call that ranks wait in, diagnose says so instead of "healthy" or "behind"."""
    expect_finding(
        submission,
        [jobs.get_stuck, jobs.run_ahead, jobs.leave_a_stuck_call, jobs.wait_for_a_gpu, jobs.wait_in_a_message]
        + [jobs.stay_healthy],
    )


@pytest.mark.points(1)
def test_unseen(submission):
    """A rank without a record, or with a dump of another time, is neither accused nor healthy. A job may be running."""
    expect_finding(
        submission,
        [jobs.record_nothing, jobs.stay_healthy, jobs.keep_running, jobs.keep_an_old_dump, jobs.keep_another_run]
        + [jobs.leave_a_stuck_call, jobs.fall_behind, jobs.wait_in_a_circle],
    )


@pytest.mark.parts("Part (i): the program")
@pytest.mark.points(1)
def test_program(submission):
    """main prints the finding of recorded dumps and a row per rank. It returns 0, 1, or 2 for an unreadable file."""
    [world] = submission.worlds(1)
    recorded = [(version, *job) for version in VERSIONS for job in read_dumps(version).items()]
    submission.rng.shuffle(recorded)
    recorded = [(version, name, *renumber_ranks(submission.rng, dumps)) for version, name, dumps in recorded]
    first, second, _ = read_dumps("2.13")["skip"]
    broken = {"truncated": first[:-1], "empty": "", "binary": "\x80\x02}q", "foreign": "[1, 2]", "missing": None}
    runs = [*(dumps for *_, dumps in recorded), *([second, first, text] for text in broken.values())]
    [answers] = submission.run(scenario.run_main, {"runs": runs}, world_size=world)
    for (version, name, ranks, dumps), answer in zip(recorded, answers[: len(recorded)], strict=True):
        culprits = sorted(ranks[int(rank)] for rank in CULPRITS[name])
        where = f"for the dumps of hang.py {name}, torch {version}, whose ranks 0, 1, 2 are now {join_names(ranks)}, "
        expect_report(answer, KINDS.get(name, name), culprits, where)
        for text in dumps:
            record = json.loads(text)
            last = record["entries"][-1]
            words = [str(record["rank"]), last["profiling_name"].removeprefix("gloo:"), last["line"]]
            is_right = any(all(contains(line, word) for word in words) for line in answer[1].splitlines())
            At().claim(f"{where}main prints a line with {join_names(words)}", is_right, f"it printed {answer[1]!r}")
    expect_refusals(broken, answers[len(recorded) :], causes.UNREADABLE)


@pytest.mark.points(1)
@pytest.mark.needs("test_program")
def test_jobs_folders_and_pages(submission):
    """main refuses dumps of two jobs, accepts a folder instead of files, and writes the page that html asks for."""
    [world] = submission.worlds(1)
    ranks, (first, second, third) = renumber_ranks(submission.rng, read_dumps("2.13")["skip"])
    culprits, record = [ranks[int(rank)] for rank in CULPRITS["skip"]], json.loads(third)
    foreign = {
        "of a rank that has one already": first,
        "of another world size": json.dumps(record | {"world_size": 4}),
        "of a job with another name": json.dumps(record | {"job": "another"}),
    }
    runs = [[second, first, text] for text in foreign.values()]
    [answers] = submission.run(scenario.run_main, {"runs": runs}, world_size=world)
    expect_refusals(foreign, answers, causes.OTHER_JOB)
    job = {"runs": [[first, second, third]], "as_folder": True, "with_page": True}
    [[answer]] = submission.run(scenario.run_main, job, world_size=world)
    expect_report(answer, "missing", culprits, "for a folder with three dumps, ")
    *_, page, finding = answer
    At().claim("main writes the page to the file that html names", page is not None, "there is no such file")
    lines = {entry["line"] for entry in record["entries"]}
    expect_words(markup.unescape(page), [*finding[2].splitlines(), *lines, "all_reduce"], "the page")


# ---- what the checks use


def renumber_ranks(rng, dumps):
    """Return which ranks 0, 1 and so on become, and their dumps with the new numbers, in another order."""
    ranks = rng.sample(range(len(dumps)), len(dumps))
    records = [json.loads(text) for text in dumps]
    for record in records:
        record["rank"] = ranks[record["rank"]]
        record["groups"] = {name: sorted(ranks[rank] for rank in group) for name, group in record["groups"].items()}
    return ranks, rng.sample([json.dumps(record) for record in records], len(records))


def expect_report(answer, kind, culprits, where):
    """Expect diagnose to find the fault in the files, and main to print the text of this finding."""
    result, printed, _, finding = answer
    got = f"it returned {result} and printed {printed!r}"
    At().claim(f"{where}main returns {int(kind != 'healthy')}", result == (kind != "healthy"), got)
    found, named, text = finding or (None, [], "")
    what = f"{where}diagnose finds {kind!r} and the culprits {culprits}"
    At().claim(what, (found, named) == (kind, culprits), f"it found {found!r} and the culprits {named}")
    expect_words(text, map(str, culprits), f"{where}the text of the finding")
    At().claim(f"{where}main prints the text of the finding, {text!r}", text in printed, f"it printed {printed!r}")


def expect_refusals(texts, answers, cause):
    """Expect main to return 2 for each of these jobs, and to name the third file."""
    for name, (result, printed, *_) in zip(texts, answers, strict=True):
        what = f"for a third dump that is {name}, main returns 2 and prints this file's name"
        got = f"it returned {result} and printed {printed!r}"
        At().claim(what, result == 2, got, cause)
        At().claim(what, "dump_2.json" in printed, got)


def draw(submission, kinds, repetitions=REPETITIONS):
    """Return jobs of these kinds, (fault, culprits, traces), in a random order, which does not tell the kinds."""
    drawn = [kind(submission.rng) for kind in kinds for _ in range(repetitions)]
    submission.rng.shuffle(drawn)
    return drawn


def ask(submission, function, drawn):
    """Yield the traces of each job, and what the submission's function returns for them."""
    [world] = submission.worlds(1)
    traces = [job[2] for job in drawn]
    job = {"function": function, "jobs": json.dumps(traces)}
    [answers] = submission.run(scenario.examine, job, world_size=world)
    return zip(traces, answers, strict=True)


def describe_row(row):
    """Return [rank, number and line of its call or None], as the scenario does."""
    return sorted([rank, call and [call["number"], call["line"]]] for rank, call in row.items())


def list_numbers(rows):
    """Return which numbers of which group an alignment contains, and how many ranks have a call there."""
    return ", ".join(f"{group}/{number}: {len(row)} calls" for group, number, row in rows) or "nothing"


def describe_place(place):
    """Return a divergence as text."""
    if not place:
        return "None"
    absent = [rank for rank, call in place[2] if call is None]
    return f"group {place[0]}, number {place[1]}" + (f", without a call of {absent}" if absent else "")


def expect_alignment(submission, drawn):
    """Expect align to return the calls that the definition asks for."""
    for traces, got in ask(submission, "align", drawn):
        expected = sorted([*key, describe_row(row)] for key, row in jobs.align(traces).items())
        wanted, returned = list_numbers(expected), list_numbers(got)
        found = f"it returned {returned}{' with other calls' * (returned == wanted)}"
        why = partial(causes.explain_alignment, traces, got, expected)
        At().claim(f"for {jobs.describe(traces)}, align returns {wanted}", got == expected, found, why)


def expect_divergence(submission, drawn):
    """Expect find_divergence to return the place that the definition asks for."""
    for traces, got in ask(submission, "find_divergence", drawn):
        place = jobs.choose_divergence(traces)
        expected = place and [*place[:2], describe_row(place[2])]
        what = f"for {jobs.describe(traces)}, find_divergence returns {describe_place(expected)}"
        At().claim(what, got == expected, describe_place(got), partial(causes.explain_place, traces, got, expected))


def expect_finding(submission, kinds):
    """Expect diagnose to find the fault that each job was made with."""
    drawn = [jobs.lose_some(submission.rng, job) for job in draw(submission, kinds)]
    for (kind, culprits, _), (traces, answer) in zip(drawn, ask(submission, "diagnose", drawn), strict=True):
        found, ranks, *place, text = answer
        what = f"for {jobs.describe(traces)}, diagnose finds {kind!r} and the culprits {culprits}"
        why = partial(causes.explain_finding, traces, kind, culprits, found, ranks)
        At().claim(what, (found, ranks) == (kind, culprits), f"it found {found!r} and the culprits {ranks}", why)
        has_place, words = kind not in ("dead", "untraced", "unseen", "healthy"), [str(rank) for rank in culprits]
        places = jobs.list_places(traces) if has_place else []
        circle = [] if jobs.list_free(places) else jobs.find_circle(places)
        group, number, row = circle[0] if circle else jobs.choose(places) or (None, None, {})
        if kind != "unseen":
            why = causes.FIRST_WAIT * (kind == "stuck")
            At().equal(f"group and number of the finding {kind!r} are {{}}", place, [group, number], why)
        calls = [call for call in row.values() if call]
        if kind == "circular":
            calls = [call for *_, row in circle for call in row.values() if call]
        if row:
            words += [str(number), *(word for call in calls for word in (call["op"], call["line"]))]
            words += [call["description"] or call["group"] for call in calls]
        if kind in ("behind", "missing"):
            expect_waits(text, [trace for trace in traces if trace["rank"] in culprits])
        if kind in ("ended", "behind"):
            lines = {t["calls"][-1]["line"] for t in traces if t["rank"] in culprits and t["calls"]}
            what = f"the text names the line of a culprit's last call, one of {sorted(lines)}"
            has_line = not lines or any(line in text for line in lines)
            At().claim(what, has_line, f"the text is {text!r}", causes.NO_LAST)
        expect_words(text, words, f"the text of the finding {kind!r}")


def expect_waits(text, traces):
    """Expect the text to say where each of these ranks waits, if it waits."""
    for trace in traces:
        unfinished = [call for call in (*trace["messages"], *trace["calls"]) if not call["is_complete"]]
        says_it = any(call["op"] in text and call["line"] in text for call in unfinished)
        places = " or ".join(f"{call['op']} at {call['line']}" for call in unfinished)
        what = f"the text says where rank {trace['rank']} itself waits: in {places}"
        At().claim(what, says_it or not unfinished, f"the text is {text!r}", causes.NO_WAIT)


def contains(text, word):
    """Return whether a text contains a word. A number is not part of a longer one."""
    return bool(re.search(rf"(?<!\d){re.escape(word)}(?!\d)", text)) if word.isdigit() else word in text


def expect_words(text, words, what):
    """Expect a text to contain all these words."""
    words = sorted(set(words))
    absent = [word for word in words if not contains(text, word)]
    what = f"{what} contains {', '.join(words)}"
    At().claim(what, not absent, f"{', '.join(absent)} is not in {text!r}")


def read_dumps(version):
    """Return the dumps that three ranks recorded with gloo and this torch version: {fault: texts}. Each has a line."""
    jobs = {}
    for line in (DUMPS / f"{version}.txt").read_text().splitlines():
        fault, text = line.split(" ", 1)
        jobs.setdefault(fault, []).append(text)
    return jobs
