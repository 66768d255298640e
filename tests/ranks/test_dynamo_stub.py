"""The stubs for parts of torch: optimizers and process groups do not import these parts, but other code may."""

import sys

import hang_guard
import pytest
import torch
from hang_guard import HANG_S
from in_ranks import stubs as functions

from brigade.course.table.modules import ROOT
from brigade.ranks.dynamo_stub import KERNELS_STUB_VERSION
from brigade.ranks.runner.ranks import RankFailure, run_ranks


def test_the_testing_library_leaves_torch_alone():
    """It loads the runner of ranks, and nothing of the course, the lab or the grader."""
    program = (
        "import sys; finders = [*sys.meta_path]; import brigade.testing\n"
        "assert [finder for finder in sys.meta_path if finder not in finders] == [], sys.meta_path\n"
        "houses = {name.split('.')[1] for name in sys.modules if name.startswith('brigade.')}\n"
        "assert houses == {'ranks', 'testing'}, houses\n"
        "import torch._dynamo; assert torch._dynamo.__file__"
    )
    hang_guard.run([sys.executable, "-c", program], cwd="/", check=True)


def test_optimizers_do_not_import_the_compiler():
    """If this fails, torch uses another function of torch._dynamo, which `make_compiler_stub` must contain too.

    Until then, nothing breaks, but every check takes a second longer.
    """
    [imported] = run_ranks(functions.every_optimizer, world_size=1)
    assert imported == []


def test_torch_ddp_does_not_import_the_compiler():
    """If this fails, DDP's constructor uses another function of torch._dynamo, and every rank takes a second longer."""
    assert run_ranks(functions.train_with_torch_ddp, world_size=2) == [[], []]


def test_torch_zero_does_not_import_fsdp():
    """If this fails, `torch.distributed.optim` uses more of FSDP, and every rank takes two seconds longer."""
    assert list(run_ranks(functions.train_with_torch_zero)) == [{"weight": [-1.0] * 3, "imported": []}] * 2


def test_who_wants_to_compile_gets_the_compiler():
    [found] = run_ranks(functions.compile_something, world_size=1, deadline=HANG_S)
    assert torch.equal(found["doubled"], torch.full((3,), 2.0))
    assert found["real"] and found["submodules"] == ["torch._dynamo.config", "torch._dynamo.utils"]


def test_the_stub_for_kernels_is_used_in_the_version_of_the_requirements():
    """Before you change the version, find out which of `KERNEL_MODULES` the new version needs."""
    assert f"torch=={KERNELS_STUB_VERSION}" in (ROOT / "requirements.txt").read_text()


@pytest.mark.skipif(not torch.__version__.startswith(KERNELS_STUB_VERSION), reason="another version has no stub")
def test_the_kernels_of_the_meta_device_are_not_imported():
    """If this fails, torch imports the kernels for another purpose, and every command takes half a second longer.

    If an embedding no longer needs them, the tests below need another operator.
    """
    with pytest.raises(RankFailure, match="NotImplementedError"):
        run_ranks(functions.embed_on_the_meta_device, "", world_size=1)


@pytest.mark.parametrize(
    "use",
    [
        "import torch._decomp.decompositions, torch.nn.utils._expanded_weights",
        *(
            pytest.param(use, marks=pytest.mark.extended)
            for use in ("import torch._refs.nn.functional", "import torch.distributed.tensor")
        ),
        "torch._meta_registrations.device_hint",
        "from torch._subclasses import fake_tensor\nwith fake_tensor.FakeTensorMode(): torch.ones(3) + 1",
    ],
)
def test_who_needs_the_kernels_gets_the_kernels(use):
    """The order of the imports matters, because the packages import each other."""
    assert run_ranks(functions.embed_on_the_meta_device, use, world_size=1) == [[2, 3]]
