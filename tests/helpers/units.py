"""Expectations about module 11: weights, and orders of calls."""

from functools import partial

import torch

from brigade.course.checks.expectations import MANY_STEPS, expect_equal, explain_failures, replace_cause
from brigade.ranks.claims import At, each_step, evaluate, show
from brigade.ranks.runner.ranks import PerRank
from m11_fully_sharded import causes, scenario
from m11_fully_sharded.expected import get_unit_type, lay_out, train_plain


def make_jobs(case, parts=("weights",), **more):
    """Return each rank's job, with the unit type of the case's model. Ranks of the case's group return `parts`."""
    jobs = case.make_jobs(unit_type=get_unit_type(case), **more)
    return PerRank(job | {"parts": parts if rank in case.group else ()} for rank, job in enumerate(jobs))


def expect_orders(submission, world, orders):
    """Expect training with each of these orders of calls to be right, or to be refused if this is allowed.

    `orders` are pairs of an element of ORDERS and reshard_after_forward. Every second run has checkpointed blocks.
    """
    cases, jobs = [], []
    for number, (order, is_resharded) in enumerate(orders):
        options = {"steps": 2, "dtype": torch.float64, "hidden_layers": 3}
        case = submission.case("Blocks", world, **options, micro_batches=2 - isinstance(order, tuple))
        for step in (step for steps in case.batches for step in steps if order == scenario.TWICE):
            step[1] = step[0]
        arguments = {"reshard_after_forward": is_resharded, "prefetch": number % 3}
        forward = "checkpointed" if number % 2 else ""
        cases.append(case)
        jobs.append(make_jobs(case, number=number, order=order, arguments=arguments, forward=forward))
    all_results = run_each(submission, scenario.train_unusually, jobs)
    for case, (order, _), results in zip(cases, orders, all_results, strict=True):
        what = f"with {' '.join(order)}" if isinstance(order, tuple) else f"with {order}"
        refused = [rank for rank, result in enumerate(results) if "refusal" in result]
        if refused:
            may_refuse = scenario.EVALUATION not in order and order not in scenario.UNSYNCED
            cause = causes.FORGOTTEN_BACKWARD if order == (scenario.EVALUATION, scenario.PLACES[1]) else ""
            got = f"RuntimeError: {results[refused[0]]['refusal']}"
            At(refused[0]).claim(f"a step {what} is right", may_refuse, got, cause)
            continue
        for rank, result in enumerate(results):
            when, kept = "after an evaluation, if no backward is due", causes.KEPT_AFTER_EVALUATION
            expect_freed(result["evaluated"], when, kept, rank)
            expect_freed(result["alive"], f"after the finish of a step {what}", causes.ROOT_STAYS, rank)
        otherwise = partial(causes.explain_order_of_calls, order, results.events, len(lay_out(case)))
        expect_trained(results, case, f"weights after 2 steps {what}", otherwise=otherwise)
        numels = sorted(layout["numel"] for unit in lay_out(case) for layout, _ in unit.values())
        for step in each_step(results.events, 2 if order[0] == scenario.EVALUATION else 0):
            reduced, what = step.launches("reduce_scatter"), f"a step {what} reduces each unit once"
            reduced.claim(what, sorted(one.numel for one in reduced) == numels, cause=causes.REDUCED_TWICE)


def expect_trained(results, case, what, expected=None, tolerance=MANY_STEPS, otherwise="", hypotheses=None):
    """Expect each rank's state dict to have the weights `expected`, by default those of plain training.

    `otherwise` is a likely cause, or finds one.
    """
    events = getattr(results, "events", [])
    expected = train_plain(case)[0] if expected is None else expected
    for rank, result in enumerate(results):
        missing = [name for name in expected if result["weights"].get(name) is None]
        At(rank).equal("parameters that full_state_dict does not return: {}", missing, [])
        other = [name for name, value in expected.items() if result["weights"][name].dtype != value.dtype]
        dtypes = "parameters that full_state_dict returns in another dtype than they had before wrapping: {}"
        At(rank).equal(dtypes, other, [], causes.CONVERTED)
    with replace_cause(partial(causes.explain_garbage, events)), explain_failures([], lambda: evaluate(otherwise)):
        expect_equal(
            what,
            [result["weights"] for result in results],
            expected,
            ranks=case.group[: len(results)],
            tolerance=tolerance,
            hypotheses=hypotheses,
        )


def expect_optimizer_state(states, expected):
    """Expect the state of each rank's optimizer to have the entries of a plain optimizer's, or all to be None."""
    for rank, state in enumerate(states):
        is_same = (state is None) == (states[0] is None)
        At(rank).claim("all ranks have the same method full_optimizer_state_dict", is_same, "some have none")
    actual, wanted = [flatten_state(state) for state in states if state is not None], flatten_state(expected)
    for rank, entries in enumerate(actual):
        At(rank).equal("the entries of full_optimizer_state_dict are {}", sorted(entries), sorted(wanted))
        dtypes = [str([(name, show(one[name].dtype)) for name in sorted(one)]) for one in (entries, wanted)]
        At(rank).equal("the dtypes in full_optimizer_state_dict are {}", *dtypes)
    expect_equal("full_optimizer_state_dict has a plain optimizer's state", actual, wanted, tolerance=MANY_STEPS)


def flatten_state(state):
    """Return the tensors of an optimizer's state by text such as "exp_avg of parameter 3"."""
    entries = sorted(state.items())
    return {f"{key} of parameter {number}": value for number, entry in entries for key, value in entry.items()}


def expect_freed(alive, when, cause, rank, step=None):
    """Expect that no parameter has memory. `alive` are the names of those that have, and may contain a name twice."""
    names = list(dict.fromkeys(alive))
    At(rank, step).equal(f"parameters whose full weights have memory {when}: {{}}", names, [], cause)


def run_each(submission, function, jobs_per_call):
    """Call a function of the scenario once for each element of `jobs_per_call`. Return the results of each call."""
    with replace_cause(partial(causes.explain_failure, submission, function, jobs_per_call)):
        return submission.run_each(function, jobs_per_call)
