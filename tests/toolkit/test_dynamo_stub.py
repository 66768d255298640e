"""The stub for torch._dynamo: optimizers and process groups do not import the compiler, other code may."""

import rank_functions as functions
import torch

from brigade.runner.ranks import run_ranks


def test_optimizers_do_not_import_the_compiler():
    """If this fails, torch asks something else of torch._dynamo: `DynamoStub` must answer that too.

    Nothing breaks meanwhile, but every check takes a second longer.
    """
    [imported] = run_ranks(functions.every_optimizer, world_size=1)
    assert imported == []


def test_torch_ddp_does_not_import_the_compiler():
    """If this fails, its constructor asks something else of torch._dynamo: every rank with it takes a second longer."""
    assert run_ranks(functions.train_with_torch_ddp, world_size=2) == [[], []]


def test_who_wants_to_compile_gets_the_compiler():
    [found] = run_ranks(functions.compile_something, world_size=1)
    assert torch.equal(found["doubled"], torch.full((3,), 2.0))
    assert found["real"] and found["submodules"] == ["torch._dynamo.config", "torch._dynamo.utils"]


def test_a_submodule_comes_with_the_compiler():
    """The real submodule is imported once. A second copy would have its own options."""
    [found] = run_ranks(functions.import_a_submodule, world_size=1)
    assert found == {"same": True, "real": True}
