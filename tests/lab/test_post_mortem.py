"""Module 13's program on the files that people have: torch's own dumps, NCCL's messages, records with gaps."""

from __future__ import annotations

import base64
import json
import pickle
import random
import re
import sys
import zlib
from types import SimpleNamespace

import hang_guard
import pytest
import torch.distributed as dist
from test_m13_post_mortem import CULPRITS, DUMPS, FAULTS, KINDS, VERSIONS

from brigade.course.cli.post_mortem import make_program
from brigade.ranks.errors import UserError
from m13_post_mortem import corpus, expected
from m13_post_mortem import scenario as scenarios
from solutions.m13_post_mortem import post_mortem, records, words

ACCUSING = {*words.VERBS} - {"dead", "untraced", "stuck", "unseen", "unexplained", "stale"}
REAL_KINDS = KINDS | {"blocked": "missing"}  # NCCL's launches return at once, so later calls prove that one was skipped
RECORDED = sorted(path.name for path in DUMPS.iterdir())
TIMEOUT = "2.11-nccl-timeout.torch"


def make_entry(number, op="nccl:all_reduce", **changes):
    """Return an entry of torch's recorder."""
    entry = {"record_id": number - 1, "process_group": ("0", "default_pg"), "collective_seq_id": number}
    entry |= {"p2p_seq_id": 0, "is_p2p": False, "profiling_name": op, "input_sizes": [[4]], "input_dtypes": ["Float"]}
    entry |= {"output_sizes": [[4]], "output_dtypes": ["Float"], "state": "completed", "retired": True}
    entry |= {"op_id": number, "pg_id": 0, "time_created_ns": number}
    return entry | {"frames": [{"name": "step", "filename": "/home/me/train.py", "line": 10 + number}]} | changes


def make_record(entries, groups=None, world_size=2, **changes):
    """Return a record of torch's recorder, as NCCL writes it."""
    groups = {"0": ("default_pg", [*range(world_size)])} | (groups or {})
    config = {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in groups.items()}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries} | changes


def load(tmp_path, record, name="nccl_trace_rank_0"):
    path = tmp_path / name
    path.write_bytes(pickle.dumps(record, 2))
    return records.load_trace(path)


def diagnose(tmp_path, *records):
    """Return the finding for torch's records of ranks 0, 1 and so on."""
    return post_mortem.diagnose([load(tmp_path, one, f"nccl_trace_rank_{rank}") for rank, one in enumerate(records)])


# ---- recorded dumps


def write_recorded(name, fault, form, folder):
    """Write the recorded dumps of a fault to a folder. Return whether there are any."""
    begin = f"{fault} {form} "
    chosen = [line.removeprefix(begin) for line in (DUMPS / name).read_text().splitlines() if line.startswith(begin)]
    for rank, line in enumerate(chosen):
        if line:  # else this rank wrote no file
            (folder / f"nccl_trace_rank_{rank}").write_bytes(zlib.decompress(base64.b64decode(line)))
    return bool(chosen)


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize("name", [name for name in RECORDED if name.endswith(".torch") and name != TIMEOUT])
def test_torch_s_own_dumps_give_the_same_findings(name, form, tmp_path, capsys):
    """What gloo and NCCL wrote for the faults of hang.py, in torch's own files."""
    for fault, culprits in CULPRITS.items():
        folder = tmp_path / fault
        folder.mkdir()
        assert write_recorded(name, fault, form, folder)
        status = post_mortem.main([str(folder)])
        printed = capsys.readouterr().out
        if fault == "circle" and "nccl" not in name:  # gloo's record does not name the members of its groups
            assert status == 2 and "use dump_trace" in printed
            continue
        finding = post_mortem.diagnose([records.load_trace(path) for path in records.list_files([folder])])
        if "nccl" in name and fault == "stuck":  # neither the real nor the simulated NCCL notices that roots differ
            assert finding.kind == "healthy" and status == 0
            continue
        if fault == "ended":  # torch does not know that a rank has ended
            assert (finding.kind, finding.ranks) == ("behind", [0])
            continue
        kinds = REAL_KINDS if name == "2.11-nccl.torch" else KINDS
        assert finding.kind == kinds.get(fault, fault) and "".join(map(str, finding.ranks)) == culprits
        assert status == (fault != "healthy")


@pytest.mark.parametrize("name", [name for name in RECORDED if name.endswith("-nccl.txt")])
def test_dumps_of_nccl_give_the_same_findings(name, tmp_path):
    """What dump_trace wrote on NCCL names the same ranks as on gloo."""
    jobs = {}
    for line in (DUMPS / name).read_text().splitlines():
        fault, text = line.split(" ", 1)
        path = tmp_path / f"{fault}_{len(jobs.setdefault(fault, []))}"
        path.write_text(text)
        jobs[fault].append(records.load_trace(path))
    findings = {fault: post_mortem.diagnose(traces) for fault, traces in jobs.items()}
    found = {fault: (one.kind, "".join(map(str, one.ranks))) for fault, one in findings.items() if fault != "stuck"}
    kinds = REAL_KINDS if name == "2.11-nccl.txt" else KINDS
    assert found == {fault: (kinds.get(fault, fault), CULPRITS[fault]) for fault in CULPRITS if fault != "stuck"}
    assert "group first" in findings["circle"].text and "group second" in findings["circle"].text
    assert findings["stuck"].kind == "healthy" and all(trace.has_ended for trace in jobs["stuck"])


def test_launches_that_return_at_once_hide_no_circle():
    """On the real GPU, unlike the simulated one, all ranks of "circle" have launched all calls: none is missing."""
    [*lines] = (line.split(" ", 1) for line in (DUMPS / "2.11-nccl.txt").read_text().splitlines())
    records = [json.loads(text) for fault, text in lines if fault == "circle"]
    last = [record["entries"][-1] for record in records]
    assert [(entry["collective_seq_id"], entry["state"]) for entry in last] == [(2, "scheduled")] * 3


@pytest.mark.parametrize(
    ("fault", "kind", "ranks", "words"),
    [
        ("missing", "missing", [1], ["call 32", "all_reduce [[200]]", "rank 1 waits"]),
        ("missing-lazy", "missing", [1], ["call 32", "all_reduce [[200]]"]),  # without device_id
        ("size", "different_size", [1], ["call 31", "all_reduce [[201]]"]),
        ("order", "different_op", [1], ["call 31", "broadcast [[50]]"]),  # two calls are swapped
        ("behind", "behind", [1], ["call 31", "all_reduce [[30]]"]),
        ("kernel", "stuck", [0, 1, 2], ["call 31", "all_reduce [[30]]"]),  # another kernel occupies a GPU
        ("ended", "dead", [1], []),
        # A recv without a send. NCCL's abort completes it, but the rank's last line still names it.
        ("p2p", "behind", [0], ["call 31", "rank_timeout.py:43", "rank 0: recv"]),
        ("coalesced", "different_op", [1], ["call 31", "allreduce_coalesced [[40], [41]]"]),
    ],
)
def test_what_torch_wrote_on_a_gpu_after_a_time_out(fault, kind, ranks, words, tmp_path, capsys):
    """Three ranks shared a real H200. Each fault follows 30 calls of all ranks."""
    assert write_recorded(TIMEOUT, fault, "pickle", tmp_path)
    assert post_mortem.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
    finding = post_mortem.diagnose([records.load_trace(path) for path in records.list_files([tmp_path])])
    assert (finding.kind, finding.ranks) == (kind, ranks)


def test_one_file_contains_the_program(tmp_path, capsys):
    """What `make post-mortem` writes needs only Python: neither torch nor another file of the course."""
    copy, folder = tmp_path / "copy.py", tmp_path / "dumps"
    copy.write_text(make_program())
    folder.mkdir()
    assert write_recorded("2.13-nccl.torch", "circle", "pickle", folder) and post_mortem.main([str(folder)]) == 1
    done = hang_guard.run([sys.executable, "-I", "-S", copy, folder], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, capsys.readouterr().out, "")
    with pytest.raises(UserError, match="brigade check 13"):
        make_program("lessons")


def test_every_version_is_recorded():
    assert {f"{version}.txt" for version in VERSIONS} < set(RECORDED)


# ---- entries


def test_a_call_of_torch_s_record(tmp_path):
    trace = load(
        tmp_path, make_record([make_entry(1), make_entry(2, "nccl2:broadcast", state="started", retired=False)])
    )
    first, second = trace.calls
    assert (first.op, first.sizes, first.dtype, first.line) == ("all_reduce", ((4,),), "Float", "train.py:11")
    assert (first.ranks, first.description, first.group) == ((0, 1), "default_pg", "0")
    assert first.is_complete and (second.op, second.is_complete) == ("broadcast", False)
    assert (trace.rank, trace.world_size, trace.num_lost, trace.job) == (0, 2, 0, "")


@pytest.mark.parametrize(
    ("state", "retired", "is_complete"),
    [
        ("completed", True, True),
        ("completed", False, True),
        ("scheduled", True, True),  # gloo
        ("scheduled", False, False),
        ("started", False, False),
        ("started", True, False),  # NCCL's watchdog retires a call that has timed out
    ],
)
def test_completion(state, retired, is_complete, tmp_path):
    entries = [make_entry(1, state=state, retired=retired)]
    traces = [load(tmp_path, make_record(entries, has_ended=has_ended)) for has_ended in (False, True)]
    assert [trace.calls[0].is_complete for trace in traces] == [is_complete, True]  # an ended rank waits in nothing


def test_messages_are_not_calls(tmp_path):
    """A batch of messages ends with an entry that has the number of the last collective, but is not part of it."""
    message = {"is_p2p": True, "p2p_seq_id": 1, "state": "scheduled", "retired": False}
    batch = [make_entry(1, f"nccl:{op}", **message) for op in ("send 0->1", "recv 0<-1")]
    end = make_entry(1, "nccl:coalesced", p2p_seq_id=1, input_sizes=[], input_dtypes=[], state="started", retired=False)
    trace = load(tmp_path, make_record([make_entry(1, "nccl:reduce"), *batch, end]))
    assert [(call.op, call.is_complete) for call in trace.calls] == [("reduce", True)]
    assert [(call.op, call.number, call.is_complete) for call in trace.messages] == [
        ("send", 1, False),
        ("recv", 1, False),
    ]
    assert words.find_last(trace).op == "recv"
    trace = load(tmp_path, make_record([make_entry(1), *batch, end | {"state": "completed"}, make_entry(2)]))
    assert [call.is_complete for call in trace.messages] == [True, True]
    assert words.find_last(trace).op == "all_reduce"
    assert words.find_last(load(tmp_path, make_record([]))) is None


def test_operations_that_are_launched_together_are_one_call(tmp_path):
    parts = [
        make_entry(2, state="scheduled", retired=False),
        make_entry(2, "nccl:broadcast", input_sizes=[[8]], input_dtypes=["Half"], state="scheduled", retired=False),
    ]
    end = make_entry(2, "nccl:coalesced", input_sizes=[], input_dtypes=[])
    record = make_record([make_entry(1), *parts, end, make_entry(3)])
    first, both, last = load(tmp_path, record).calls
    assert (both.op, both.sizes, both.dtype) == ("all_reduce,broadcast", ((4,), (8,)), "Float,Half")
    assert both.is_complete and (first.number, both.number, last.number) == (1, 2, 3)
    other = make_record([make_entry(1), parts[0], parts[1] | {"input_sizes": [[9]]}, end, make_entry(3)])
    finding = diagnose(tmp_path, record, other)
    assert (finding.kind, finding.ranks, finding.number) == ("different_size", [0, 1], 2)


def test_the_rest_of_an_overwritten_block_is_left_out(tmp_path):
    """A ring buffer may end inside of what was launched together. The rest would differ from the others' call."""
    parts = [make_entry(2, record_id=7), make_entry(2, "nccl:coalesced", record_id=8)]
    trace = load(tmp_path, make_record([*parts, make_entry(3, record_id=9)]))
    assert [call.number for call in trace.calls] == [3] and trace.num_lost == 7
    trace = load(tmp_path, make_record([*parts[1:], make_entry(3, record_id=9)]))
    assert [call.number for call in trace.calls] == [3]


def test_a_gap_is_not_a_missing_call(tmp_path):
    """gloo counts a monitored_barrier, but does not record it."""
    ranks = [make_record([make_entry(number) for number in numbers]) for numbers in ((1, 2, 5, 6), (1, 2, 3, 4, 5, 6))]
    assert [call.number for call in load(tmp_path, ranks[0]).calls] == [5, 6]
    assert diagnose(tmp_path, *ranks).kind == "healthy"


def test_numbers_that_start_above_one_are_lost(tmp_path):
    trace = load(tmp_path, make_record([make_entry(5, record_id=0), make_entry(6, record_id=1)]))  # after a reset
    assert trace.num_lost == 4
    trace = load(
        tmp_path,
        make_record([], pg_status={"0": {"last_enqueued_collective": 12}, "1": {"last_enqueued_collective": -1}}),
    )
    assert (trace.calls, trace.num_lost) == ((), 12)


def test_roots_have_other_tensors(tmp_path):
    """On gloo, only the root of a scatter has an input, and only the root of a gather has an output."""
    root = make_entry(1, "gloo:scatter", input_sizes=[[2, 2]])
    other = make_entry(1, "gloo:scatter", input_sizes=[], input_dtypes=[])
    assert diagnose(tmp_path, make_record([root]), make_record([other])).kind == "healthy"


def test_groups_with_one_name_are_kept_apart(tmp_path):
    """torch gives one name to all groups that one call splits off from a group."""
    records = [
        make_record([make_entry(1, process_group=("1", "rows"), input_sizes=[[size]])], {"1": ("rows", ranks)}, 4)
        for ranks, size in (([0, 1], 4), ([0, 1], 4), ([2, 3], 5), ([2, 3], 5))
    ]
    assert diagnose(tmp_path, *records).kind == "healthy"


def test_the_user_s_line_is_found_among_those_of_torch(tmp_path):
    frames = ["/usr/lib/python3.11/contextlib.py", "/x/torch/distributed/distributed_c10d.py", "<frozen runpy>"]
    frames = [*frames, "/venv/lib/python3.11/site-packages/trainer/loop.py", "/home/me/train.py", "/home/me/main.py"]
    frames = [{"name": "f", "filename": name, "line": line} for line, name in enumerate(frames)]
    [call] = load(tmp_path, make_record([make_entry(1, frames=frames)])).calls
    assert call.line == "train.py:4"
    [call] = load(tmp_path, make_record([make_entry(1, frames=frames[:2])])).calls
    assert call.line == "contextlib.py:0"
    [call] = load(tmp_path, make_record([make_entry(1, frames=[])])).calls
    assert call.line == ""


# ---- findings


def test_a_message_without_a_receiver_is_not_blamed_on_its_peer(tmp_path):
    waiting = {"state": "started", "retired": False}
    send = make_entry(1, "nccl:send 0->1", is_p2p=True, p2p_seq_id=1, **waiting)
    records = [make_record([make_entry(1), send], world_size=3)]
    records += [make_record([make_entry(1), make_entry(2, **waiting)], world_size=3)] * 2
    finding = diagnose(tmp_path, *records)
    assert (finding.kind, finding.ranks) == ("behind", [0]) and re.search(r"rank 0 .*send .*train\.py:11", finding.text)
    records[1:] = [make_record([make_entry(1)], world_size=3)] * 2  # nothing else is missing
    finding = diagnose(tmp_path, *records)
    assert (finding.kind, finding.ranks, finding.group) == ("stuck", [0], None) and "send" in finding.text


def test_a_rank_that_never_called_has_no_world_size(tmp_path):
    """NCCL registers a group with its first call. Such a dump belongs to the others all the same."""
    seen = make_record([make_entry(1, state="started", retired=False)], world_size=3)
    silent = make_record([], pg_config={})
    for rank, record in enumerate((seen, silent, seen)):
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(record, 2))
    finding = post_mortem.diagnose([records.load_trace(path) for path in records.list_files([tmp_path])])
    assert post_mortem.main([str(tmp_path)]) == 1 and finding.ranks == [1] and finding.text.startswith("Rank 1 ")


def test_unfinished_calls_whose_partners_are_overwritten_are_not_healthy(tmp_path):
    """Rank 1's buffer no longer has a call of group 1, in which rank 0 waits."""
    groups = {"1": ("rows", [0, 1])}
    waiting = make_entry(2, process_group=("1", "rows"), state="started", retired=False)
    first = make_record([make_entry(1), make_entry(1, process_group=("1", "rows")), waiting], groups)
    second = make_record([make_entry(1, record_id=2000)], groups)
    finding = diagnose(tmp_path, first, second)
    assert (finding.kind, finding.ranks, finding.group) == ("stuck", [0], None)


def diagnose_queues(tmp_path, *queues):
    """Return the finding for ranks that launched calls of groups 1 to 3, such as "12", and wait in all of them."""
    groups = {group: (f"mesh_{group}", [rank for rank, own in enumerate(queues) if group in own]) for group in "123"}
    records = []
    for own in queues:
        numbers = [own[: place + 1].count(group) for place, group in enumerate(own)]
        entries = [
            make_entry(number, process_group=(group, f"mesh_{group}"), state="scheduled", retired=False)
            for group, number in zip(own, numbers, strict=True)
        ]
        records.append(make_record([make_entry(1), *entries], groups, len(queues)))
    return diagnose(tmp_path, *records)


@pytest.mark.parametrize(
    ("queues", "kind", "ranks", "place"),
    [
        (("12", "12"), "stuck", [0, 1], ("1", 1)),
        (("21", "21"), "stuck", [0, 1], ("2", 1)),
        (("12", "21"), "circular", [0, 1], ("1", 1)),
        (("1212", "2112"), "circular", [0, 1], ("1", 1)),  # the last calls agree
        (("12", "23", "31"), "circular", [0, 1, 2], ("1", 1)),
        (("12", "23", "13"), "stuck", [0, 2], ("1", 1)),
        (("321", "32", "31"), "stuck", [0, 1, 2], ("3", 1)),
        (("22221", "2222", "1"), "stuck", [0, 1], ("2", 1)),
    ],
)
def test_calls_that_all_members_launched_wait_in_order(queues, kind, ranks, place, tmp_path):
    """A call waits for every unfinished call that one of its members launched before it."""
    finding = diagnose_queues(tmp_path, *queues)
    assert (finding.kind, finding.ranks, (finding.group.split(" ")[0], finding.number)) == (kind, ranks, place)


def make_jobs(change):
    """Yield (traces as dictionaries, the same as objects) of jobs with each fault, after a change of each trace."""
    rng = random.Random(3)
    for fault in FAULTS * 8:
        _, _, traces = fault(rng)
        traces = [change(rng, trace) for trace in traces]
        yield traces, make_traces(traces)


def make_traces(traces):
    """Return dictionaries as traces of the reference."""
    classes = {"Trace": records.Trace, "Call": records.Call}
    original, scenarios.student = scenarios.student, lambda package, name: classes[name]
    try:
        return scenarios.make_traces(json.loads(json.dumps(traces)))
    finally:
        scenarios.student = original


def test_a_rank_without_a_record_is_never_accused():
    """Whether it is the culprit or not: nobody knows what it did."""
    for traces, objects in make_jobs(
        lambda rng, t: t if rng.random() < 0.6 else t | {"calls": [], "messages": [], "num_lost": 9 * rng.randint(0, 1)}
    ):
        finding = post_mortem.diagnose(objects)
        silent = {trace["rank"] for trace in traces if not trace["calls"]}
        assert finding.kind not in ACCUSING or not silent & set(finding.ranks)
        assert finding.kind != "healthy" or not silent


def test_a_rank_is_never_accused_for_calls_that_its_record_has_lost():
    """The place of a finding has not been overwritten on any culprit."""
    for _, objects in make_jobs(lambda rng, trace: expected.lose_calls(trace, rng.randint(0, len(trace["calls"])))):
        finding = post_mortem.diagnose(objects)
        for trace in objects if finding.kind in ACCUSING else ():
            own = [call.number for call in trace.calls if call.group == finding.group]
            if trace.rank in finding.ranks and finding.kind != "circular":
                assert own and own[0] <= finding.number or trace.num_lost == 0


def test_healthy_means_that_everything_was_seen():
    """Every rank has recorded a call, and all calls are complete or all ranks have ended."""
    count = 0
    for _, objects in make_jobs(lambda rng, trace: expected.lose_calls(trace, rng.choice((0, 0, 3)))):
        if post_mortem.diagnose(objects).kind == "healthy":
            count += 1
            is_complete = all(call.is_complete for trace in objects for call in (*trace.calls, *trace.messages))
            assert is_complete or all(trace.has_ended for trace in objects)
            assert all(trace.calls or trace.messages for trace in objects)
    assert count


def test_random_faults():
    """A sample of the corpus: the rank that holds up the others is named or nobody is accused, and faults are seen."""
    for fault, guilty, kind, named in corpus.examine(post_mortem, 75, seed=1):
        assert kind in {"healthy", "running"} if not guilty else kind != "healthy", fault
        assert guilty <= named or kind in {"stuck", "untraced"}, fault
        assert not corpus.accuses_innocent_ranks(guilty, kind, named), fault
        assert fault not in ("root", "old file", "running") or kind in corpus.KINDS[fault]


def test_one_rank_of_64_stands_between_the_groups(tmp_path):
    """All ranks call a group of 8, another group of 8 and the world, and rank 1 calls the world first."""
    members = {f"tp{row}": [*range(8 * row, 8 * row + 8)] for row in range(8)}
    members |= {f"dp{column}": [*range(column, 64, 8)] for column in range(8)} | {"all": [*range(64)]}
    complete = {f"tp{row}" for row in range(1, 8)}
    records = []
    for rank in range(64):
        order = [f"tp{rank // 8}", f"dp{rank % 8}", "all"] if rank != 1 else ["all"]
        done = [name for name in order if name in complete]
        made = [*done, *[name for name in order if name not in complete][:1]]
        groups = {name: (name, ranks) for name, ranks in members.items() if rank in ranks}
        entries = [make_entry(1)]
        for name in made:
            waits = {} if name in complete else {"state": "scheduled", "retired": False}
            entries.append(make_entry(1, process_group=(name, name), **waits))
        records.append(make_record(entries, groups, 64))
    finding = diagnose(tmp_path, *records)
    assert (finding.kind, finding.ranks) == ("circular", [1])
    assert finding.text.startswith("Rank 1 alone ") and "skipped a call" in finding.text and "tp1" not in finding.text


def test_a_kernel_that_has_not_started(tmp_path):
    """With TORCH_NCCL_ENABLE_TIMING=1, NCCL's record says on which GPU a call has started."""
    records = [
        make_record([make_entry(1), make_entry(2, state=state, retired=False)], world_size=3)
        for state in ("started", "scheduled", "started")
    ]
    finding = diagnose(tmp_path, *records)
    assert (finding.kind, finding.ranks, finding.number) == ("not_started", [1], 2)


def test_a_rank_that_waits_elsewhere_is_not_behind(tmp_path):
    """Two ranks wait in a broadcast that all launched. Rank 1 believed that it is the root, and went on."""
    waits = {"state": "scheduled", "retired": False}
    stays = make_record([make_entry(1), make_entry(2, "gloo:broadcast", **waits)], world_size=3)
    leaves = make_record([make_entry(1), make_entry(2, "gloo:broadcast"), make_entry(3, **waits)], world_size=3)
    finding = diagnose(tmp_path, stays, leaves, stays)
    assert (finding.kind, finding.ranks, finding.number) == ("stuck", [0, 2], 2) and "the root" in finding.text


def test_absence_in_a_dump_is_no_guilt(tmp_path):
    """A rank that is absent may wait in a call that gloo does not record."""
    waits = make_entry(2, state="scheduled", retired=False)
    silent, waiting = (make_record(entries, world_size=3) for entries in ([make_entry(1)], [make_entry(1), waits]))
    finding = diagnose(tmp_path, silent, silent, waiting)
    first, advice = finding.text.splitlines()
    assert first.startswith("Ranks 0, 1 are not there yet") and advice.startswith("This alone is no mistake")


def load_dump(tmp_path, rank, times_s, time_s, **changes):
    """Return what dump_trace writes at a time, after calls at these times. Ranks 0 and 2 of three wait in the last."""
    entries = [make_entry(number, time_created_ns=int((1.8e9 + at) * 1e9)) for number, at in enumerate(times_s, 1)]
    entries[-1] |= {} if rank == 1 else {"state": "scheduled", "retired": False}
    record = {"rank": rank, "world_size": 3, "groups": {"0": [0, 1, 2]}, "entries": entries}
    record |= {"time_ns": int((1.8e9 + time_s) * 1e9)} | changes
    (tmp_path / f"dump_{rank}.json").write_text(json.dumps(record))
    return records.load_trace(tmp_path / f"dump_{rank}.json")


@pytest.mark.parametrize(
    ("waited_s", "apart_s", "kind", "ranks"),
    [(0.004, 0, "running", []), (30, 0, "behind", [1]), (30, 2000, "stale", [1])],
)
def test_times_of_dumps(waited_s, apart_s, kind, ranks, tmp_path):
    """Rank 1's dump lacks a call. It proves something only if the others had waited when it was written."""
    traces = [load_dump(tmp_path, rank, [0, apart_s], waited_s + apart_s) for rank in (0, 2)]
    finding = post_mortem.diagnose([*traces, load_dump(tmp_path, 1, [0], waited_s)])
    assert (finding.kind, finding.ranks) == (kind, ranks)
    assert "4 ms" in finding.text or kind != "running"


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_dump_of_an_earlier_run_convicts_nobody(has_ended, tmp_path):
    """Its rank made 2, 3 or 5 calls, and others wait in the third. A rank that ended in this run is the culprit."""
    traces = [load_dump(tmp_path, rank, [1, 2, 3], 60) for rank in (0, 2)]
    for num_calls in (2, 3, 5):
        old = load_dump(tmp_path, 1, [-500] * num_calls, -400, has_ended=has_ended)
        finding = post_mortem.diagnose([*traces, old])
        assert (finding.kind, finding.ranks) == ("stale", [1])
    late = make_entry(3, time_created_ns=1_800_000_050 * 10**9, state="scheduled", retired=False)
    traces = [load_dump(tmp_path, rank, [1], 60, num_lost=2, entries=[late]) for rank in (0, 2)]
    assert post_mortem.diagnose([*traces, load_dump(tmp_path, 1, [1, 2], 2.5, has_ended=True)]).kind == "ended"
    # Rank 1 came to call 3 after its dump: the others have completed it, and have launched a call of another group.
    pair = late | {"process_group": ("1", "pair"), "collective_seq_id": 1, "retired": True}
    own = {"entries": [make_entry(3), pair], "num_lost": 2, "groups": {"0": [0, 1, 2], "1": [0, 2]}}
    traces = [load_dump(tmp_path, rank, [1], 60, **own) for rank in (0, 2)]
    finding = post_mortem.diagnose([*traces, load_dump(tmp_path, 1, [1, 2], 9)])
    assert (finding.kind, finding.ranks) == ("stale", [1])


def test_a_folder_without_dumps_says_that_the_job_crashed(tmp_path, capsys):
    (tmp_path / "log_0.txt").write_text("terminate called after throwing an instance of 'gloo::EnforceNotMet'")
    assert post_mortem.main([str(tmp_path)]) == 2
    printed = capsys.readouterr().out
    assert "contains no dump" in printed and "crashed" in printed and "errors.md" in printed


# ---- files


NO_DUMPS = (
    b"",
    b'{"groups": {"0": [0',
    pickle.dumps(make_record([make_entry(1)]), 2)[:-9],
    b"\x89PNG\r\n",
    b"Traceback (most recent call last):",
    b'{"traceEvents": []}',
    b"[1, 2]",
    pickle.dumps(SimpleNamespace()),
    pickle.dumps(make_record([{"record_id": 0}]), 2),
    pickle.dumps(make_record([make_entry(1)], world_size=2_000_000), 2),
    json.dumps(make_record([], world_size=0)).encode().replace(b"[]", b"7", 1),
)


def test_each_kind_of_wrong_file_has_a_hint(tmp_path, capsys, snapshot):
    hints = []
    for place, data in enumerate(NO_DUMPS):
        path = tmp_path / f"dump_{place}.json"
        path.write_bytes(data)
        assert post_mortem.main([str(path)]) == 2
        hints.append(capsys.readouterr().out)
        assert hints[-1].startswith(str(path)) and hints[-1].count("\n") == 1
    # Python's own words depend on its version.
    snapshot("refusals.dumps", re.sub(r"\(TypeError.*\)", "(TypeError: ...)", "".join(hints)))


def test_a_pickle_is_not_executed(tmp_path):
    path = tmp_path / "trace_rank_0"
    path.write_bytes(b"\x80\x02cos\nsystem\nX\x0a\x00\x00\x00touch gotit\x85R.")
    with pytest.raises(ValueError, match=r"os\.system"):
        records.load_trace(path)


@pytest.mark.parametrize(("name", "rank"), [("nccl_trace_rank_3", 3), ("dump_1.json", 1), ("trace_2.f0", 2), ("x7", 7)])
def test_the_rank_comes_from_the_name(name, rank, tmp_path):
    assert load(tmp_path, make_record([make_entry(1)], world_size=8), name).rank == rank
    with pytest.raises(ValueError, match="nccl_trace_rank_3"):
        load(tmp_path, make_record([]), "trace")


def test_a_folder_may_contain_other_files(tmp_path, capsys):
    """Dumps are named by rank, and one of them begins like a dump. A log of a rank is none, even if it is empty."""
    for name in ("calls.png", "hang.py", "log", "log_0.txt", "epoch_7"):
        (tmp_path / name).write_text("no dump")
    (tmp_path / "log_1.txt").touch()
    (tmp_path / "folder_1").mkdir()
    assert post_mortem.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().out
    for rank in (10, 9, 2):
        (tmp_path / f"dump_{rank}.json").write_text("{")
    (tmp_path / "dump_9.json").write_text("")
    names = ["dump_2.json", "dump_9.json", "dump_10.json"]
    assert [path.name for path in records.list_files([tmp_path])] == names
    (tmp_path / "trace_rank_0").write_bytes(b"\x80")
    assert [path.name for path in records.list_files([tmp_path])] == ["trace_rank_0", *names]


@pytest.mark.parametrize("broken", [b"", b'{"rank": 1, "groups"'])
def test_an_empty_or_truncated_dump_is_reported_and_a_log_is_not(broken, tmp_path, capsys):
    for rank in range(2):
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(make_record([make_entry(1)]), 2))
        (tmp_path / f"log_{rank}.txt").write_bytes(b"" if rank else b"[rank0]: Watchdog caught")
    assert post_mortem.main([str(tmp_path)]) == 0
    capsys.readouterr()
    (tmp_path / "trace_1").write_bytes(broken)
    assert post_mortem.main([str(tmp_path)]) == 2
    printed = capsys.readouterr().out
    assert "trace_1" in printed and "log" not in printed


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "trace_0").write_bytes(pickle.dumps(make_record([make_entry(1)], world_size=1), 2))
    assert post_mortem.main([str(tmp_path)], html=str(tmp_path / "no" / "page.html")) == 2
    assert "page.html" in capsys.readouterr().out.splitlines()[-1]


def test_a_page_shows_text_and_no_markup_of_a_dump(tmp_path):
    entries = [make_entry(1, "nccl:<script>", frames=[{"name": "f", "filename": "<b>&.py", "line": 1}])]
    (tmp_path / "trace_0").write_bytes(pickle.dumps(make_record(entries, world_size=1), 2))
    post_mortem.main([str(tmp_path)], html=str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "&lt;script&gt;" in page and "<script" not in page and "<b>" not in page
    assert "src=" not in page and "href=" not in page  # self-contained


# ---- dump_trace


def test_dump_trace_merges_the_recorders(tmp_path, monkeypatch):
    """A group may have gloo and NCCL, which count their calls separately. The entries keep the order of their times."""
    world, pair = object(), object()
    backends = {world: "cpu:gloo,cuda:nccl", pair: "cuda:nccl"}
    state = SimpleNamespace(pg_names={world: "0", pair: "1"}, pg_backend_config=backends)
    monkeypatch.setattr(dist.distributed_c10d, "_world", state)
    monkeypatch.setattr(dist, "get_process_group_ranks", {world: [0, 1, 2], pair: [0, 2]}.get)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "seven")
    gloo = make_record([make_entry(1, "gloo:barrier", time_created_ns=2, record_id=5)])
    pair_call = make_entry(1, "nccl:broadcast", time_created_ns=3, process_group=("1", "rows"))
    nccl = make_record([make_entry(1, time_created_ns=1), pair_call])
    clock = iter(range(10**9, 10**10, 10**9))  # each question takes a second
    monkeypatch.setattr(records.time, "time_ns", clock.__next__)
    monkeypatch.setattr(records, "_read_recorders", lambda: iter([gloo, nccl] * (next(clock) == 2 * 10**9)))
    records.dump_trace(tmp_path / "dump", has_ended=True)
    trace = records.load_trace(tmp_path / "dump")
    assert [(call.op, call.number) for call in trace.calls] == [("all_reduce", 1), ("barrier", 1), ("broadcast", 1)]
    assert [call.ranks for call in trace.calls] == [(0, 1, 2), (0, 1, 2), (0, 2)]
    assert len({call.group for call in trace.calls}) == 3 and trace.calls[-1].description == "rows"
    assert (trace.rank, trace.world_size, trace.has_ended, trace.num_lost) == (2, 3, True, 5)
    assert "seven" in trace.job and trace.calls[0].line == "train.py:11"
    assert [call.time for call in trace.calls] == [1e-9, 2e-9, 3e-9] and trace.time == 1


def test_every_recorder_is_asked(monkeypatch):
    """torch 2.15 has an additional recorder for nccl2; torch without CUDA has none for NCCL."""
    asked = []

    def dump(*values, **options):
        asked.append(options)
        return pickle.dumps({"entries": [len(asked)]}, 2)

    c10d = pytest.importorskip("torch._C._distributed_c10d")
    monkeypatch.setattr(c10d, "_dump_fr_trace", dump)
    monkeypatch.setattr(c10d, "_dump_nccl_trace", dump, raising=False)
    assert len(list(records._read_recorders())) == 3 and asked == [{}, {}, {"backend": "nccl2"}]
    monkeypatch.delattr(c10d, "_dump_nccl_trace")
    monkeypatch.setattr(c10d, "_dump_fr_trace", lambda *values: dump())
    assert len(list(records._read_recorders())) == 1
