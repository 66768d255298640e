"""Mistakes in module 12."""

from mutants import Mutant

SORTED = "for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):"
LIGHTEST = "lightest = loads.index(min(loads))"
GROUP = "dist.all_reduce(totals, group=self.ddp.process_group)"
SCALE = "scale = dist.get_world_size(self.ddp.process_group) / num_tokens"
SYNCED = "contextlib.nullcontext() if number == len(micro_batches) else self.ddp.no_sync()"
FINISH = "        self.ddp.finish_grad_sync()\n"
TOTAL = "total += loss.detach()"
ZERO = "if isinstance(self.optimizer, ZeroOptimizer):"
LOSS = "loss = total / num_tokens"
FINITE = "math.isfinite(loss) and math.isfinite(norm)"
CLIP = "max_norm = math.inf if self.max_norm is None else self.max_norm"
SKIP = (
    "        if is_skipped:\n            self.optimizer.zero_grad()\n        else:\n            self.optimizer.step()\n"
)
CLEAR = "        self.optimizer.zero_grad()\n        if num_tokens == 0:"
ITERATOR = "iterator = iter(batches) if iterator is None else iterator"
TAKEN = "taken = list(itertools.islice(iterator, micro_batches))"
RAISED = "error = raised"
RAISE = "                raise error\n"
FAILED = 'raise RuntimeError(f"the iterables of {num_failed} other ranks raised an exception")'
ACTIVE = "if not num_active:"
TRAIN = "results.append(self.train(taken, num_tokens))"
ERROR = "            if error:\n"
LOOP = "        iterator, results = None, []\n"

ASSIGNMENT = ("test_assignment",)
WEIGHTS = ("test_tokens_weigh_equally",)
RESULTS = ("test_results",)
IDLE = ("test_idle_ranks",)
COLLECTIVES = ("test_collectives",)
CLIPPING = ("test_clipping",)
DECISION = ("test_one_decision",)
RUN = ("test_run",)
RAISES = ("test_iterable_raises",)

MUTANTS = [
    Mutant(
        "empty sequences left out",
        SORTED,
        SORTED.replace("range(len(lengths))", "(i for i, n in enumerate(lengths) if n)"),
        ASSIGNMENT,
        "length 0 are left out",
    ),
    Mutant(
        "ties broken at random",
        SORTED,
        SORTED.replace("lengths[index],", '(lengths[index], __import__("random").SystemRandom().random()),'),
        ASSIGNMENT,
        "both differ between ranks",
    ),
    Mutant(
        "equal numbers of sequences",
        SORTED,
        "for index in range(len(lengths)):\n        loads = [len(part) for part in parts]",
        ASSIGNMENT,
        "dealt in the given order",
    ),
    Mutant(
        "consecutive pieces", LIGHTEST, "lightest = index * num_ranks // len(lengths)", ASSIGNMENT, "consecutive pieces"
    ),
    Mutant(
        "the mean of the ranks' means",
        SCALE,
        "scale = 1 / max(sum(count_tokens(targets) for _, targets in micro_batches), 1)",
        WEIGHTS,
        "these means are averaged",
    ),
    Mutant("the number of ranks forgotten", SCALE, "scale = 1 / num_tokens", WEIGHTS, "the wrapper averages"),
    Mutant(
        "every micro-batch counts equally",
        "(loss * scale).backward()",
        "(loss / max(count_tokens(targets), 1) / len(micro_batches)).backward()",
        WEIGHTS,
        "averages the means of its micro-batches",
    ),
    Mutant(
        "the number of all ranks instead of the group's",
        SCALE,
        SCALE.replace("self.ddp.process_group", ""),
        WEIGHTS,
        "size of the world",
    ),
    Mutant("tokens of all groups", GROUP, "dist.all_reduce(totals)", WEIGHTS, "over all ranks of the world"),
    Mutant("every backward reduces", SYNCED, "contextlib.nullcontext()", WEIGHTS, "no_sync"),
    Mutant("the first backward reduces", SYNCED, SYNCED.replace("len(micro_batches)", "1"), WEIGHTS, "no_sync"),
    Mutant("no backward reduces", SYNCED, "self.ddp.no_sync()", COLLECTIVES, "nothing overlaps"),
    Mutant(
        "an idle rank does not finish",
        FINISH,
        "        if micro_batches:\n            self.ddp.finish_grad_sync()\n",
        IDLE,
        "does not call finish_grad_sync",
    ),
    Mutant(
        "an idle rank keeps its gradients",
        CLEAR,
        CLEAR.replace("        self", "        if micro_batches:\n            self", 1),
        IDLE,
        "does not clear its gradients",
    ),
    Mutant(
        "losses summed before the finish",
        FINISH,
        "        self.sum_over_ranks([total.item()], torch.float64)\n" + FINISH,
        IDLE + COLLECTIVES,
        "before finish_grad_sync",
    ),
    Mutant(
        "a barrier in every step",
        FINISH,
        FINISH + "        dist.barrier(self.ddp.process_group)\n",
        COLLECTIVES,
        "a barrier counts",
    ),
    Mutant("the last loss only", TOTAL, "total = loss.detach()", RESULTS, ""),
    Mutant("only its own loss", LOSS, "loss = loss_sum / num_tokens", RESULTS, "that of this rank's own tokens"),
    Mutant("the loss is a sum", LOSS, "loss = total", RESULTS, "the sum over the tokens"),
    Mutant("max_norm ignored", CLIP, "max_norm = math.inf", CLIPPING, "max_norm is ignored"),
    Mutant(
        "the gradient of the sum clipped",
        CLIP,
        CLIP.replace("self.max_norm", "self.max_norm / num_tokens").replace(
            "self.max_norm / num_tokens is", "self.max_norm is"
        ),
        CLIPPING,
        "before it is divided by",
    ),
    Mutant("torch clips a ZeroOptimizer's gradients", ZERO, "if False:", CLIPPING, "only this rank's shard"),
    Mutant("only the loss decides", FINITE, "math.isfinite(loss)", DECISION, "whether the gradient is finite"),
    Mutant("only the gradient decides", FINITE, "math.isfinite(norm)", DECISION, "whether the loss is finite"),
    Mutant(
        "infinity counts as finite",
        FINITE,
        "not math.isnan(loss) and not math.isnan(norm)",
        DECISION,
        "excludes NaN and infinity",
    ),
    Mutant(
        "a skipped step leaves gradients",
        SKIP,
        SKIP.replace("            self.optimizer.zero_grad()\n", "            pass\n"),
        DECISION,
        "does not clear the gradients",
    ),
    Mutant(
        "a skipped step is taken with zeros",
        SKIP,
        SKIP.replace("zero_grad()\n        else:\n    ", "zero_grad(set_to_none=False)\n"),
        DECISION,
        "momentum and weight decay still act",
    ),
    Mutant("the step is never skipped", SKIP, "        self.optimizer.step()\n", DECISION, "although is_skipped"),
    Mutant(
        "run ends with the first rank",
        ACTIVE,
        "if num_active < dist.get_world_size(self.ddp.process_group):",
        RUN,
        "the first rank has no data left",
    ),
    Mutant(
        "the last batches dropped",
        TAKEN,
        TAKEN + "\n                taken = taken if len(taken) == micro_batches else []",
        RUN,
        "are dropped",
    ),
    Mutant(
        "all batches read at once",
        ITERATOR,
        ITERATOR.replace("iter(batches)", "iter(list(batches))"),
        RUN + RAISES,
        "turns the iterable into a list",
    ),
    Mutant("the iterable begins again", ITERATOR, "iterator = iter(batches)", RUN, "iter(batches) only once"),
    Mutant(
        "an additional all-reduce per step",
        TRAIN,
        "results.append(self.step(taken))",
        RUN,
        "Let the number of tokens carry it",
    ),
    Mutant("an exception is raised at once", RAISED, "raise", RAISES, "before the other ranks know"),
    Mutant(
        "an exception of iter() escapes",
        LOOP,
        "        iterator, results = iter(batches), []\n",
        RAISES,
        "before the other ranks know",
    ),
    Mutant(
        "the exception is wrapped",
        RAISE,
        '                raise RuntimeError("no more data") from error\n',
        RAISES,
        "the exception object itself",
    ),
    Mutant("the other ranks return", FAILED, "return results", RAISES, "the exception is lost"),
    Mutant(
        "the others take the step",
        ERROR,
        "            if num_failed and num_active:\n                self.train(taken, num_tokens)\n" + ERROR,
        RAISES,
        "the step whose batches",
    ),
]

SAMPLE = ("the number of ranks forgotten", "max_norm ignored")
