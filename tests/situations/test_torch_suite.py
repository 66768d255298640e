"""Torch's own tests of DistributedDataParallel pass on the wrappers, or the wrappers refuse them with a sentence.

The lists below name every test in torch's wheel that uses DistributedDataParallel. Those that do not apply are about
things that the wrappers do not have.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from toolkit.hang_guard import HANG_S

from brigade.course.submission import read
from brigade.runner.ranks import run_calls
from brigade.texts import PACKAGE
from situations.run import WORLD
from situations.torch_suite import SUITE, WRAPPERS, run_torch_test

# Right with every wrapper, or refused with a sentence by the wrappers in REFUSED.
APPLICABLE = [
    "test_DistributedDataParallel",
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_create_graph",
    "test_ddp_forward_backward_hook",
    "test_ddp_inference",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_static_graph_nested_types",
    "test_ddp_zero_output_features",
    "test_grads_same_across_ranks_with_no_sync",
    "test_static_graph_multi_forward",
]
HAVE_HOOKS = ("m03", "m04", "m05", "m06", "m07", "m09")
WRAPPED_BEFORE, NOT_PICKLED = "the model was wrapped before", "a wrapper cannot be copied or pickled"
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {  # the sentence, and the wrappers
    "test_DistributedDataParallel": (NOT_PICKLED, tuple(WRAPPERS)),
    "test_DistributedDataParallelCPU": (NOT_PICKLED, tuple(WRAPPERS)),
    "test_DistributedDataParallelCPU_grad_is_view": (NOT_PICKLED, tuple(WRAPPERS)),
    "test_ddp_new_tensor_in_fwd": (WRAPPED_BEFORE, HAVE_HOOKS),
    "test_ddp_new_tensor_in_fwd_static_graph": (WRAPPED_BEFORE, HAVE_HOOKS),
    "test_ddp_returns_tensor_with_no_grad": (WRAPPED_BEFORE, HAVE_HOOKS),
    "test_ddp_static_graph_nested_types": (WRAPPED_BEFORE, HAVE_HOOKS),  # it wraps a layer, and then the whole model
}
# A test with one of these words does not apply, for the reason.
NOT_APPLICABLE = {
    "SyncBatchNorm sync_bn non_default_stream ddp_device": "they need a GPU",
    "hook_parity allreduce_hook then_hook comm_hook hook_pickling via_hook buffer_hook localSGD": "communication hooks",
    "profiling logging debug_param python_error different_graph remove_autograd": "torch's logs and profiles",
    "control_flow has_finalized is_actually_static sink_noclone": "internals of torch's reducer",
    "bucket_assignment bucket_cap_mb_list rebuild_buckets sync_module_states": "torch's plan of buckets",
    "uneven join": "joins of uneven inputs, of which module 12 has its own",
    "mixed_precision device_mesh compile apply_optim_in_backward": "other features of torch",
    "broadcast_buffer init_sync_buffers": "buffers that are broadcast in forward",
    "ignore_params get_data_parallel_params": "parameters that are ignored",
    "model_diff verify_model": "models that differ between ranks, which the wrappers do not compare",
    "requires_grad invalid_static static_graph_api nested_unused": "errors of torch, where the wrappers are right",
    "unused_in_loss skip_all_reduce_unused undefined_grad stateless_api": "None as a gradient that may be zeros here",
}


def find_file() -> Path:
    """Return torch's file of tests. Skip the test that calls this if torch has none."""
    spec = importlib.util.find_spec(SUITE.rpartition(".")[0])
    path = Path(spec.submodule_search_locations[0], "distributed_test.py") if spec else Path("missing")
    if not path.exists():
        pytest.skip("this torch has no file of tests")
    return path


def list_tests() -> set[str]:
    """Return the names of torch's tests that use DistributedDataParallel, directly or in a helper."""
    text = find_file().read_text()
    lines, sources = text.splitlines(), {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase":
            functions = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            sources = {part.name: "\n".join(lines[part.lineno - 1 : part.end_lineno]) for part in functions}
    using = {name for name, source in sources.items() if "DistributedDataParallel(" in source or "DDP(" in source}
    helpers = {f"self.{name}(" for name in using if not name.startswith("test_")}
    using |= {name for name, source in sources.items() if any(helper in source for helper in helpers)}
    return {name for name in using if name.startswith("test_")}


def find_reason(name: str) -> str | None:
    """Return why a test does not apply, or None."""
    return next((why for words, why in NOT_APPLICABLE.items() if any(word in name for word in words.split())), None)


def test_every_test_has_a_verdict():
    unknown = {name for name in list_tests() if name not in APPLICABLE and not find_reason(name)}
    assert not unknown, "torch has new tests: run them with every wrapper, and put them into a list"


@pytest.mark.extended
@pytest.mark.parametrize("kind", WRAPPERS)
def test_torch_tests_pass_or_are_refused(kind):
    names = [name for name in APPLICABLE if name in list_tests()]
    if kind == "m03":  # its reading says that every rank must use every parameter
        names.remove("test_grads_same_across_ranks_with_no_sync")
    package = {PACKAGE: read("solutions", 9)}
    calls = [(name, kind) for name in names]
    faults = {}
    results = run_calls(run_torch_test, calls, world_size=WORLD, packages=package, mode="record", deadline=4 * HANG_S)
    for name, messages in zip(names, results, strict=True):
        sentence, kinds = REFUSED.get(name, ("", ()))
        is_right = all(sentence in message for message in messages) if kind in kinds else not any(messages)
        if not is_right:
            faults[name] = messages
    assert not faults
