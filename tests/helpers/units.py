"""Expectations about module 11: weights, and orders of calls."""

from functools import partial

import torch

from brigade.checks.expectations import (
    MANY_STEPS,
    evaluate,
    expect,
    expect_equal,
    explain_failures,
    join_names,
    replace_cause,
)
from m11_fully_sharded import causes as diagnosis
from m11_fully_sharded import scenario as scenarios
from m11_fully_sharded.expected import lay_out, train_plain

JOB = {"unit_type": "Block"}


def expect_orders(submission, world, orders, options, dtype=torch.float64, tolerance=MANY_STEPS):
    """Expect training with each of these orders, a part of ORDERS, to be right, or to be refused if this is allowed.

    options[i] are options of the jobs for orders[i].
    """
    cases = []
    for order in orders:
        micro_batches = 2 - isinstance(order, tuple)
        cases.append(
            submission.case("Blocks", world, steps=2, dtype=dtype, hidden_layers=3, micro_batches=micro_batches)
        )
        for step in (step for steps in cases[-1].batches for step in steps if order == scenarios.TWICE):
            step[1] = step[0]
    jobs = [
        case.make_jobs(**JOB, number=number, order=order, **more)
        for number, (case, order, more) in enumerate(zip(cases, orders, options))
    ]
    all_results = run_each(submission, scenarios.train_unusually, jobs)
    for case, order, results in zip(cases, orders, all_results):
        what = f"with {' '.join(order)}" if isinstance(order, tuple) else f"with {order}"
        refused = [rank for rank, result in enumerate(results) if "refusal" in result]
        if refused:
            may_refuse = scenarios.EVALUATION not in order and order not in scenarios.UNSYNCED
            cause = diagnosis.FORGOTTEN_BACKWARD if order == (scenarios.EVALUATION, scenarios.PLACES[1]) else ""
            got = f"RuntimeError: {results[refused[0]]['refusal']}"
            expect(may_refuse, f"a step {what} is right", got, cause, rank=refused[0])
            continue
        for rank, result in enumerate(results):
            expected = "after an evaluation, all full weights are freed if no backward is due"
            expect_none(result["evaluated"], expected, diagnosis.KEPT_AFTER_EVALUATION, rank=rank)
            expected = f"after the finish of a step {what}, all full weights are freed"
            expect_none(result["alive"], expected, diagnosis.ROOT_STAYS, rank=rank)
        otherwise = partial(diagnosis.explain_order_of_calls, order, results.events, len(lay_out(case)))
        expect_trained(results, case, f"weights after 2 steps {what}", None, tolerance, otherwise)


def expect_trained(results, case, what, expected=None, tolerance=MANY_STEPS, otherwise="", hypotheses=None):
    """Expect each rank's state dict to have the weights `expected`, by default those of plain training.

    `otherwise` is a likely cause, or finds one.
    """
    events = getattr(results, "events", [])
    expected = train_plain(case)[0] if expected is None else expected
    for rank, result in enumerate(results):
        other = [name for name, value in expected.items() if result["weights"][name].dtype != value.dtype]
        what_dtypes = "full_state_dict returns the dtypes that the parameters had before wrapping"
        expect(not other, what_dtypes, f"{join_names(other)} have other dtypes", diagnosis.CONVERTED, rank=rank)
    with replace_cause(partial(diagnosis.explain_garbage, events)), explain_failures([], lambda: evaluate(otherwise)):
        expect_equal(
            what,
            [result["weights"] for result in results],
            expected,
            ranks=case.group[: len(results)],
            tolerance=tolerance,
            hypotheses=hypotheses,
        )


def expect_none(names, expected, cause, what="have memory", **place):
    """Expect a list of names to be empty. They are of what is not as expected."""
    expect(not names, expected, f"{join_names(list(dict.fromkeys(names)), 4)} {what}", cause, **place)


def run_each(submission, scenario, jobs_per_call):
    """Call a scenario once for each element of `jobs_per_call`, and return the results of each call."""
    with replace_cause(partial(diagnosis.explain_failure, submission, scenario, jobs_per_call)):
        return submission.run_each(scenario, jobs_per_call)
