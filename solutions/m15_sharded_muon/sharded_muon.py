"""Module 15: Muon on several ranks, an optimizer that needs whole matrices.

Module 8 cut the parameters into shards, which is right for every elementwise optimizer. Muon is not elementwise: it
orthogonalizes a matrix, and the result for half of a matrix is not half of the result. So here every matrix has one
owner, which keeps its momentum, orthogonalizes it, and sends the new weights to all ranks.

A step with N ranks and G groups of matrices takes three phases:

    1. gradients   one reduce-scatter per group: each owner gets the averages of its matrices
    2. update      each owner orthogonalizes its matrices (`orthogonalize`)
    3. weights     one all-gather per group, while the next group's matrices are orthogonalized

In the buffer of a group, row r contains the matrices of rank r in this group, one after the other. All rows are as long
as the longest one. `assign_matrices` balances the work of the ranks, and `plan_groups` keeps the rows equally long:

    group 0, shape (N, longest row)         group 1
    rank 0 | matrix 4 | matrix 0 |          rank 0 | matrix 7    |
    rank 1 | matrix 1     |......|          rank 1 | matrix 2 |..|
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

# torch 2.13 renamed these two. The newer names come first.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b and c of the iteration
EPSILON = 1e-7  # is added to the norm, so that a matrix of zeros stays zero

Shape = tuple[int, int]


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return a matrix with the same singular vectors as `matrix`, and singular values near 1 (Newton-Schulz).

    X starts as matrix / (norm + EPSILON), with the Frobenius norm. Each of `steps` iterations computes the small square
    matrix G = X Xᵀ, and replaces X by a X + (b G + c G²) X. All of this is computed in the matrix's dtype, with torch's
    matrix products. `matrix` does not change.

    The matrix products take at most 2 · `steps` · `count_cost(matrix.shape)` FLOPs.
    """
    # X may have more rows than columns. Which of X and Xᵀ makes G smaller?
    ### BEGIN SOLUTION part (a)
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # (short, long)
    x = x / (x.norm() + EPSILON)
    for _ in range(steps):
        gram = x @ x.T  # (short, short)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x
    ### END SOLUTION


def count_cost(shape: Shape) -> int:
    """Return half of the FLOPs of one iteration of `orthogonalize`: two products with the long side, one without."""
    short, long = sorted(shape)
    return short**2 * (2 * long + short)


def assign_matrices(shapes: Sequence[Shape], num_ranks: int) -> list[int]:
    """Return the owner of each matrix, a rank from 0 to `num_ranks` - 1.

    No rank has a larger sum of costs (`count_cost`) than the mean over the ranks plus the largest cost. For the
    matrices of real models (the reading's two lists) and 2 to 16 ranks, the largest sum is at most 1.10 times the mean.
    All ranks call this function and get the same result without communication.
    """
    ### BEGIN SOLUTION part (b)
    owners = [0] * len(shapes)
    loads = [0] * num_ranks
    for index in sorted(range(len(shapes)), key=lambda index: count_cost(shapes[index]), reverse=True):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += count_cost(shapes[index])
    return owners
    ### END SOLUTION


def plan_groups(
    shapes: Sequence[Shape], owners: Sequence[int], num_ranks: int, num_groups: int
) -> list[list[list[int]]]:
    """Return groups of matrices: the entry [k][r] lists the matrices of rank r in group k, perhaps none.

    Every matrix is in one group, in the list of its owner. There are at most `num_groups` groups, and none is empty.
    All rows of a group's buffer are as long as the longest one. For the reading's two lists, 4 groups, 2 to 16 ranks,
    and owners with balanced costs, there are 4 groups, all buffers together have at most 1.25 times the elements of the
    matrices, and the largest group has at most 1.25 times the mean number of elements.
    """
    ### BEGIN SOLUTION part (c)
    numels = [rows * columns for rows, columns in shapes]
    groups: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(num_groups)]
    lengths = [[0] * num_ranks for _ in range(num_groups)]  # of each row, in elements
    for index in sorted(range(len(shapes)), key=lambda index: numels[index], reverse=True):
        rank = owners[index]
        shortest = min(range(num_groups), key=lambda k: lengths[k][rank])
        groups[shortest][rank].append(index)
        lengths[shortest][rank] += numels[index]
    return [group for group in groups if any(group)]
    ### END SOLUTION


class ShardedMuon(Optimizer):
    """Train matrices with Muon. Each matrix has an owner, which alone keeps its momentum.

    The model has no wrapper, and its weights are already equal on all ranks. Parameters have two dimensions and one
    dtype that is not float16, otherwise ValueError. They share no memory, and their gradients are not sparse. Those
    that are frozen at construction are left alone. The trainable ones, in the order of `param_groups`, are `matrices`;
    `owners` and `groups` are what `assign_matrices` and `plan_groups` return for their shapes. `param_groups` may set
    `lr`, `momentum`, `weight_decay` and `steps`; `step` reads them each time, so schedulers work. A rank may own
    nothing.

    The set of trainable parameters is fixed at construction: `step` raises RuntimeError if one was frozen or unfrozen.
    So does `torch.amp.GradScaler`, which decides on each rank alone whether to step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        process_group: dist.ProcessGroup | None = None,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        steps: int = 5,
        num_groups: int = 4,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps})
        self.group_of: dict[nn.Parameter, int] = {}  # the number of a trainable matrix's parameter group
        for number, param_group in enumerate(self.param_groups):
            self.group_of |= {p: number for p in param_group["params"] if p.requires_grad}
        self.matrices = list(self.group_of)
        wrong = [tuple(p.shape) for p in self.matrices if p.dim() != 2]
        if wrong:
            raise ValueError(f"Muon trains matrices. Give parameters of shape {wrong[0]} to another optimizer")
        if len({p.dtype for p in self.matrices}) > 1:
            raise ValueError("all matrices of a ShardedMuon must have the same dtype")
        if any(p.dtype == torch.float16 for p in self.matrices):
            raise ValueError("sums of gradients in float16 may overflow: use bfloat16 or float32")
        self.process_group = process_group
        self.rank, self.num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        shapes = [(p.shape[0], p.shape[1]) for p in self.matrices]
        self.owners = assign_matrices(shapes, self.num_ranks)
        self.groups = plan_groups(shapes, self.owners, self.num_ranks, num_groups)

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:  # GradScaler's step reads this before it decides
        raise RuntimeError(
            "torch.amp.GradScaler decides on each rank alone whether to step, but a step here needs all of them: train "
            "without it, for example in bfloat16"
        )

    def make_buffer(self, k: int) -> Tensor:
        """Return the zeroed buffer of group k, of shape (ranks, elements of the longest row)."""
        lengths = [sum(self.matrices[i].numel() for i in row) for row in self.groups[k]]
        return self.matrices[0].new_zeros(self.num_ranks, max(lengths), requires_grad=False)

    def view_matrices(self, buffer: Tensor, lists: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """Return a view into the buffer for each matrix in `lists`, with the matrix's shape.

        The matrices in lists[r] are in row r of the buffer, one after the other.
        """
        views = {}
        for row, indices in zip(buffer, lists):
            numels = [self.matrices[i].numel() for i in indices]
            for i, piece in zip(indices, row[: sum(numels)].split(numels)):
                views[i] = piece.view(self.matrices[i].shape)
        return views

    def start_reduce_scatter(self, k: int) -> tuple[Tensor, dist.Work]:
        """Launch the reduce-scatter that averages the gradients of group k. A gradient that is None counts as zeros.

        Return this rank's row, of shape (elements,), which has the averages after the handle's wait, and the handle.
        """
        # A gradient and its matrix may be transposed views. `copy_` keeps the order of elements right.
        ### BEGIN SOLUTION part (d)
        buffer = self.make_buffer(k)
        for i, view in self.view_matrices(buffer, self.groups[k]).items():
            if self.matrices[i].grad is not None:
                view.copy_(self.matrices[i].grad)
        row = torch.empty_like(buffer[0])
        handle = reduce_scatter(row, buffer.flatten(), dist.ReduceOp.AVG, self.process_group, async_op=True)
        return row, handle
        ### END SOLUTION

    def update(self, i: int, grad: Tensor) -> Tensor:
        """Update the momentum of matrix i, which this rank owns, and return its new weights.

        With the momentum m (`self.state[matrix]["momentum_buffer"]`, zeros at first), the averaged gradient g and the
        options of the matrix's parameter group:

            m ← momentum · m + g
            O = orthogonalize(g + momentum · m, steps)
            W ← (1 - lr · weight_decay) W - lr · sqrt(max(1, rows / columns)) · O
        """
        matrix = self.matrices[i]
        options = self.param_groups[self.group_of[matrix]]  # `load_state_dict` replaces the dicts in param_groups
        lr, momentum, weight_decay = options["lr"], options["momentum"], options["weight_decay"]
        ### BEGIN SOLUTION part (e)
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        state["momentum_buffer"].mul_(momentum).add_(grad)
        direction = orthogonalize(grad + momentum * state["momentum_buffer"], options["steps"])
        scale = math.sqrt(max(1, matrix.shape[0] / matrix.shape[1]))
        return (1 - lr * weight_decay) * matrix - lr * scale * direction
        ### END SOLUTION

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. If there is a closure, call it first to compute the gradients, and return its loss.

        All reduce-scatters are launched before the first one is awaited. The all-gather of group k is launched before
        the reduce-scatter of group k + 1 is awaited. No all-gather is awaited before all are launched. There are no
        other collectives. Raise RuntimeError if the trainable parameters are not those of the construction.
        """
        if {p for options in self.param_groups for p in options["params"] if p.requires_grad} != self.group_of.keys():
            raise RuntimeError(
                "a parameter was frozen, unfrozen or replaced, or a group was added, after the optimizer was "
                "constructed: construct it again"
            )
        with torch.enable_grad():
            loss = closure() if closure else None
        # An all-gather's input is this rank's row with the new weights, and its output is the group's buffer.
        ### BEGIN SOLUTION part (f)
        reductions = [self.start_reduce_scatter(k) for k in range(len(self.groups))]
        gathers = []
        for k, (row, handle) in enumerate(reductions):
            handle.wait()
            own = [self.groups[k][self.rank]]
            for i, view in self.view_matrices(row[None], own).items():
                view.copy_(self.update(i, view))
            gathers.append(self.start_all_gather(k, row))
        for k, (buffer, handle) in enumerate(gathers):
            handle.wait()
            for i, view in self.view_matrices(buffer, self.groups[k]).items():
                self.matrices[i].copy_(view)
        ### END SOLUTION
        return loss

    def start_all_gather(self, k: int, row: Tensor) -> tuple[Tensor, dist.Work]:
        """Launch the all-gather of group k, with this rank's row. Return the group's buffer and the handle."""
        buffer = self.make_buffer(k)
        return buffer, all_gather(buffer.flatten(), row, self.process_group, async_op=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of one process, on the CPU, on every rank. All ranks must call this method.

        It has the form of torch's optimizers: state["state"][j] is {"momentum_buffer": m} for each trainable parameter,
        and j is its number in `param_groups`, where frozen ones count too.
        """
        # `super().state_dict()` returns this form for the momentum that this rank has. Before the first step, all
        # momentum is zero.
        ### BEGIN SOLUTION part (g)
        momentum: dict[int, Tensor] = {}
        for k, lists in enumerate(self.groups):
            row = torch.zeros_like(self.make_buffer(k)[0])
            for i, view in self.view_matrices(row[None], [lists[self.rank]]).items():
                view.copy_(self.state[self.matrices[i]].get("momentum_buffer", view))
            buffer, handle = self.start_all_gather(k, row)
            handle.wait()
            momentum |= {i: view.cpu().clone() for i, view in self.view_matrices(buffer, lists).items()}
        everyone = [p for options in self.param_groups for p in options["params"]]
        numbers = {p: number for number, p in enumerate(everyone)}
        state = {numbers[p]: {"momentum_buffer": momentum[i]} for i, p in enumerate(self.matrices)}
        return super().state_dict() | {"state": state}
        ### END SOLUTION

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, which may come from any number of ranks. Each rank keeps what it owns.

        The dict itself keeps all its entries.
        """
        ### BEGIN SOLUTION part (h)
        super().load_state_dict(state_dict)
        for p, owner in zip(self.matrices, self.owners):
            if owner != self.rank:
                self.state.pop(p, None)
        ### END SOLUTION
