"""Situations that come from memory: who else writes gradients, weights or options, and which tensors share memory."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from situations.models import SECOND
from situations.run import Net, Run, situation

FREED = "whose memory is released"  # module 11's weights, between steps
WRITTEN = "was written or replaced"  # module 11's weights, while a unit computes
SHARED = "share memory"
NOT_M15 = {"m15": "its docstring says that it does not support this"}


class Counting(Optimizer):
    """SGD that divides the learning rate by the number of the step, which it counts in its parameter group."""

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"] / group["k"])


@situation("pytorch PR 46750", "The optimizer counts steps in its parameter group.", needs="elementwise_optimizer")
def counter_in_group(run: Run) -> None:
    run.train(*run.prepare(Net(), Counting))


@situation("vqvae #1", "A weight's data is replaced between two steps.", needs="reads_weights")
def data_replaced(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for step in range(3):
        for weight in (ddp.module[0].weight, ddp.module[2].weight):
            weight.data = torch.renorm(weight.data, 2, 0, 0.5)
        run.train(ddp, optimizer, steps=1, start=step)


@situation("vqvae #1", "A layer replaces its weight's data in forward.", refused=WRITTEN)
def data_replaced_in_forward(run: Run) -> None:
    class Bounded(nn.Linear):
        def forward(self, x):
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
            return super().forward(x)

    run.train(*run.prepare(Net(nn.Linear(6, 8), nn.Tanh(), Bounded(8, 8), nn.Linear(8, 3))))


@situation("vector-quantize-pytorch PR 54", "A layer writes into its weight in forward.", refused=WRITTEN)
def written_in_forward(run: Run) -> None:
    class Bounded(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.copy_(torch.renorm(self.weight, 2, 0, 0.5))
            return super().forward(x)

    run.train(*run.prepare(Net(nn.Linear(6, 8), nn.Tanh(), Bounded(8, 8), nn.Linear(8, 3))))


@situation("pytorch #130932", "The gradients are computed without backward, and written to p.grad.", refused=FREED)
def gradients_by_hand(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer):
        parameters = list(ddp.module.parameters())
        for p, grad in zip(parameters, torch.autograd.grad(F.mse_loss(ddp(x), y), parameters), strict=True):
            p.grad = grad


@situation("pytorch #168143", "A parameter has a class of its own, which forward asks for.")
def class_of_parameter(run: Run) -> None:
    class Scaled(nn.Parameter):
        pass

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if isinstance(self.weight, Scaled) else 1)

    model = Net(Layer(6, 8), nn.Tanh(), Layer(8, 3))
    model[0].weight = Scaled(model[0].weight.detach())
    run.train(*run.prepare(model))


@situation("accelerate PR 3154", "Two weights are tied by their data.", refused=SHARED, not_for=NOT_M15)
def tied_by_data(run: Run) -> None:
    model = Net(nn.Linear(6, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    model[3].weight.data = model[1].weight.data
    run.train(*run.prepare(model))


def count_nodes(tensors: list[torch.Tensor | None]) -> int:
    """Return the number of autograd nodes behind these tensors."""
    nodes = {tensor.grad_fn for tensor in tensors if tensor is not None} - {None}
    waiting = list(nodes)
    while waiting:
        found = {node for node, _ in waiting.pop().next_functions if node} - nodes
        nodes |= found
        waiting += found
    return len(nodes)


@situation("pytorch #63812", "Gradients have a graph, as for AdaHessian.", refused="create_graph=True")
def create_graph(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    counts = []
    for x, y in run.batches(4):
        optimizer.zero_grad()
        F.mse_loss(ddp(x), y).backward(create_graph=True)
        ddp.finish_grad_sync()
        counts.append(count_nodes([p.grad for p in ddp.module.parameters()]))
        optimizer.step()
    run.record("the graph grows", torch.tensor(counts[3] > counts[2]))


@situation("pytorch #21344", "The model is wrapped again.", refused="was wrapped before", needs="wrapper")
def wrapped_again(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    run.train(ddp, optimizer, steps=2)
    model = ddp.module
    del run.wrapped[:], ddp, optimizer
    run.train(*run.prepare(model), steps=2, start=2)


@situation("pytorch #17356", "An embedding has sparse gradients.", refused="sparse=False", not_for=NOT_M15)
def sparse_embedding(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.embedding(x.abs().mul(4).long().clamp(max=8)).sum(1))

    run.train(*run.prepare(Model()))


@situation("pytorch #170648", "Weights have gradients in another dtype.", refused="grad_dtype", tolerance=1e-6)
def dtype_of_gradients(run: Run) -> None:
    model = Net()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    run.train(*run.prepare(model))


@situation("fairscale #918", "Two backwards take gradients of layers.", refused=("backward(inputs=...)", SECOND))
def backward_in_two_parts(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer):
        loss, parameters = F.mse_loss(ddp(x), y), list(ddp.module.parameters())
        loss.backward(inputs=parameters[:2], retain_graph=True)
        loss.backward(inputs=parameters[2:])


@situation(
    "DeepSpeed #2490",
    "Weights are transposed, so that they and their gradients are not contiguous.",
    not_for=dict.fromkeys(("m01", "m03"), "module 1's docstring says that it does not support such gradients"),
)
def transposed_weight(run: Run) -> None:
    model = Net()
    model[2].weight = nn.Parameter(torch.randn(8, 8).t())
    model[4].weight = nn.Parameter(torch.randn(8, 3).t())
    run.train(*run.prepare(model))


@situation("pytorch #143828", "The first parameter group is empty.", needs="groups", not_for={"m15": "has no clipping"})
def empty_first_group(run: Run) -> None:
    ddp, optimizer = run.prepare(Net(), SGD, lambda model: [{"params": []}, {"params": model.parameters()}], lr=1.0)
    for x, y in run.steps(ddp, optimizer, 0.1):
        F.mse_loss(ddp(x), y).backward()


def double(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(2)


@situation("pytorch #76464", "A hook, registered before wrapping, doubles accumulated gradients.")
def hook_before_wrapping(run: Run) -> None:
    model = Net()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(double)
    run.train(*run.prepare(model))


@situation("pytorch #76464", "Hooks, registered after wrapping, double and replace accumulated gradients.")
def hook_after_wrapping(run: Run) -> None:
    def replace(parameter):
        parameter.grad = 0.75 * parameter.grad

    ddp, optimizer = run.prepare(Net())
    for parameter in ddp.module.parameters():
        parameter.register_post_accumulate_grad_hook(double)
    run.train(ddp, optimizer, 2)
    for parameter in ddp.module.parameters():
        parameter.register_post_accumulate_grad_hook(replace)
    run.train(ddp, optimizer, 2, 2)


@situation(
    "pytorch #130932", "The loss is computed with torch.func.functional_call.", refused=("outside ddp(x)", FREED)
)
def functional_call(run: Run) -> None:
    ddp, optimizer = run.prepare(Net())
    for x, y in run.steps(ddp, optimizer):
        weights = dict(ddp.module.named_parameters())
        F.mse_loss(torch.func.functional_call(ddp.module, weights, x), y).backward()


@situation("pytorch PR 11109", "The weights are in float16.", refused="in float16 the sum may overflow", needs="dtypes")
def float16_weights(run: Run) -> None:
    run.prepare(Net().half())
    raise AssertionError("float16 is not refused")


@situation("axolotl #1589", "A layer has integer weights, which are frozen, as after quantization.")
def integer_weights(run: Run) -> None:
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(-32, 32, dtype=torch.int8).view(8, 8), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return F.linear(x, self.weight * self.scale[:, None] / 64)

    run.train(*run.prepare(Net(nn.Linear(6, 8), Quantized(), nn.Linear(8, 3))))


@situation("pytorch #76382", "A plain optimizer gets a second group later.", "use Zero2Optimizer", needs="wrapper")
def group_added_later(run: Run) -> None:
    ddp = run.wrap(Net())
    parts = ddp.shards() if hasattr(ddp, "shards") else [p for p in ddp.module.parameters() if p.requires_grad]
    first = 1 if hasattr(ddp, "shards") else 2  # the shard of the first layer, or its weight and its bias
    optimizer = SGD(parts[first:], lr=1.0, momentum=0.5)
    optimizer.add_param_group({"params": parts[:first], "lr": 0.5})
    run.train(ddp, optimizer)
