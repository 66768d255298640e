"""Submissions that hang, die or disagree end within the deadline, and the message names the rank and the collective."""

import re
import time

import psutil
from mutants import run_on_text

from brigade.checks.collect import collect
from brigade.checks.run import Conditions
from brigade.course.modules import ROOT, get_module
from brigade.runner import ranks

MODULE_3 = get_module(3)
CHECKS = {check.name: check for check in collect([MODULE_3])}
LAUNCH = "handle = dist.all_reduce(parameter.grad, group=self.process_group, async_op=True)"
DEADLINE_S = 5.0  # a deadlock is told long before it
LOOP_S = 3.0


def check_replacement(old, new, deadline_s=DEADLINE_S):
    """Check module 3 with `old` replaced by `new`.

    Return the feedback and the seconds, and expect no rank to be left.
    """
    text = (ROOT / "solutions" / MODULE_3.path).read_text()
    assert text.count(old) == 1
    ranks.SERVER.start()
    started = time.monotonic()
    check, conditions = CHECKS["test_launches_are_asynchronous"], Conditions(backend="gloo", deadline_s=deadline_s)
    outcome = run_on_text(check, text.replace(old, new), conditions)
    assert outcome.status == "failed"
    server = psutil.Process(ranks.SERVER._process.pid)
    assert server.children(recursive=True) == []
    assert list(ranks.SERVER.scratch.glob("run-*")) == []
    return str(outcome.verdict), time.monotonic() - started


def test_endless_loop_in_a_hook():
    told, _ = check_replacement(LAUNCH, "while dist.get_rank() == 1: pass\n            " + LAUNCH, LOOP_S)
    assert "stopped after 3 s" in told
    assert "rank 1 is in backward" in told and "in launch" in told  # the line it stands on
    assert "rank 0 waits in all_reduce #" in told and "which rank 1 never launched" in told


def test_endless_loop_on_all_ranks():
    told, _ = check_replacement(LAUNCH, "while True: pass\n            " + LAUNCH, LOOP_S)
    assert "rank 0 is in backward" in told and "rank 1 is in backward" in told


def test_a_rank_that_leaves():
    told, seconds = check_replacement(LAUNCH, LAUNCH + "\n            import os; dist.get_rank() == 1 and os._exit(0)")
    assert "rank 1 died without a result (exit code 0)" in told
    assert seconds < DEADLINE_S


def test_collectives_in_different_orders():
    reversed_on_rank_1 = (
        "self.waiting = [*getattr(self, 'waiting', []), parameter]\n"
        "            if len(self.waiting) < sum(p.requires_grad for p in self.module.parameters()):\n"
        "                return\n"
        "            for parameter in self.waiting if dist.get_rank() else reversed(self.waiting):\n"
        "                handle = dist.all_reduce(parameter.grad, group=self.process_group, async_op=True)\n"
        "                self.in_flight[parameter] = handle\n"
        "            return"
    )
    for _ in range(3):
        told, seconds = check_replacement(LAUNCH, reversed_on_rank_1)
        assert "launched all_reduce #" in told and ", but rank" in told and "in the same order" in told
        assert seconds < DEADLINE_S


def test_a_mismatch_names_the_line_of_both_ranks():
    broadcast = "dist.broadcast(parameter.grad, group=self.process_group, group_src=0)"
    told, _ = check_replacement(LAUNCH, f"if dist.get_rank(): {broadcast}\n            " + LAUNCH)
    call = r"rank (\d) launched (\w+) #\d+ \([^)]*\) at overlapped_ddp.py:(\d+) in launch"
    rank, op, line, peer, peer_op, peer_line = re.search(f"{call}, but {call}", " ".join(told.split())).groups()
    lines = {op: int(line), peer_op: int(peer_line)}
    assert {rank, peer} == {"0", "1"} and lines["all_reduce"] == lines["broadcast"] + 1


def test_one_launch_too_few():
    told, seconds = check_replacement(
        LAUNCH, "if dist.get_rank() and parameter.dim() == 1: return\n            " + LAUNCH
    )
    assert "some ranks skip" in told
    assert seconds < DEADLINE_S


def test_a_forgotten_wait_is_caught_every_time():
    text = (ROOT / "solutions" / MODULE_3.path).read_text()
    wrong = text.replace("handle.wait()", "handle is [*self.in_flight.values()][3] or handle.wait()")
    assert wrong != text
    for seed in range(5):
        outcome = run_on_text(CHECKS["test_every_handle_is_waited_on"], wrong, Conditions(seed=seed, backend="gloo"))
        assert "did not wait on" in str(outcome.verdict)
