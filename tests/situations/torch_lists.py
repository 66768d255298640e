"""Lists of torch's own tests: which wrappers pass each of them or refuse it, and why the others do not apply.

The lists of DistributedDataParallel name every test in torch's wheel that uses it. A pair of a test and a wrapper is in
`PASSED`, in `REFUSED`, or left out for the reason in `LEFT_OUT` or in `KINDS_LEFT_OUT`.
"""

from __future__ import annotations

WRAPPERS = ("m01", "m02", "m03", "m04", "m05", "m06", "m07", "m09")  # their gradients are in p.grad
HAVE_HOOKS = WRAPPERS[2:]
UNEVEN = tuple(name for name in WRAPPERS if name != "m03")  # ranks may use other parameters, or have no input
KINDS = (*WRAPPERS, "m08", "m08a", "m10", "m11", "m14", "m16")

# Test: the wrappers that pass it.
PASSED: dict[str, tuple[str, ...]] = {
    "test_DistributedDataParallel_with_amp_and_grad_is_view": WRAPPERS,
    "test_accumulate_gradients_no_sync": WRAPPERS,
    "test_accumulate_gradients_no_sync_allreduce_hook": WRAPPERS,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": WRAPPERS,
    "test_accumulate_gradients_no_sync_grad_is_view": WRAPPERS,
    "test_ddp_broadcast_buffer": WRAPPERS,
    "test_ddp_compile_static_graph": ("m03",),
    "test_ddp_create_graph": WRAPPERS,
    "test_ddp_forward_backward_hook": WRAPPERS,
    "test_ddp_hook_parity_allreduce": WRAPPERS,
    "test_ddp_hook_parity_allreduce_process_group": WRAPPERS,
    "test_ddp_hook_parity_post_localSGD": WRAPPERS,
    "test_ddp_inference": WRAPPERS,
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false": WRAPPERS,
    "test_ddp_join_model_equivalence": UNEVEN,
    "test_ddp_join_respects_forward_sync_buffers_false": UNEVEN,
    "test_ddp_namedtuple": WRAPPERS,
    "test_ddp_new_tensor_in_fwd": ("m01", "m02"),
    "test_ddp_new_tensor_in_fwd_static_graph": ("m01", "m02"),
    "test_ddp_remove_autograd_hooks": ("m01", "m02"),
    "test_ddp_returns_tensor_with_no_grad": ("m01", "m02"),
    "test_ddp_shared_grad_acc_unused_params": WRAPPERS,
    "test_ddp_sink_noclone": WRAPPERS,
    "test_ddp_static_graph_nested_types": ("m01", "m02"),
    "test_ddp_uneven_input_exception": UNEVEN,
    "test_ddp_uneven_input_join_disable": WRAPPERS,
    "test_ddp_zero_output_features": WRAPPERS,
    "test_grads_same_across_ranks_with_no_sync": UNEVEN,
    "test_output_unused_in_loss_dict_module": ("m03",),
    "test_output_unused_in_loss_tuple_module": ("m03",),
    "test_post_localSGD_optimizer_parity": WRAPPERS,
    "test_post_localSGD_optimizer_parity_grad_is_view": WRAPPERS,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": WRAPPERS,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": WRAPPERS,
    "test_post_localSGD_optimizer_step_reload": WRAPPERS,
    "test_stateless_api_with_ddp": ("m03",),
    "test_static_graph_multi_forward": WRAPPERS,
}

# Test: a part of the sentence with which the wrappers refuse it, and these wrappers.
WRAPPED_BEFORE, NOT_PICKLED = "the model was wrapped before", "a wrapper cannot be copied or pickled"
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "test_DistributedDataParallel": (NOT_PICKLED, WRAPPERS),
    "test_DistributedDataParallelCPU": (NOT_PICKLED, WRAPPERS),
    "test_DistributedDataParallelCPU_grad_is_view": (NOT_PICKLED, WRAPPERS),
    "test_ddp_new_tensor_in_fwd": (WRAPPED_BEFORE, HAVE_HOOKS),
    "test_ddp_new_tensor_in_fwd_static_graph": (WRAPPED_BEFORE, HAVE_HOOKS),
    "test_ddp_remove_autograd_hooks": (WRAPPED_BEFORE, HAVE_HOOKS),
    "test_ddp_returns_tensor_with_no_grad": (WRAPPED_BEFORE, HAVE_HOOKS),
    "test_ddp_static_graph_nested_types": (WRAPPED_BEFORE, HAVE_HOOKS),  # it wraps a layer, and then the whole model
}

# Why a test is not run on a wrapper that is in neither list: the reason of the test, or else that of the wrapper.
ZEROS = "it expects None as a gradient that no rank has, and this may be zeros here"
LEFT_OUT = {
    "test_ddp_compile_static_graph": "it runs on one wrapper, because it compiles for half a minute",
    "test_output_unused_in_loss_dict_module": ZEROS,
    "test_output_unused_in_loss_tuple_module": ZEROS,
    "test_stateless_api_with_ddp": ZEROS,
}
KINDS_LEFT_OUT = {
    "m03": "a rank has no input, or uses other parameters: its docstring demands that every rank uses all of them",
    "m08": "the test reads p.grad, of which this rank's part has averages",
    "m08a": "it has no wrapper, so p.grad is the rank's own until the step",
    "m10": "the test reads p.grad, which is None after the finish",
    "m11": "the test reads p.grad or weights, which are in shards",
    "m14": "the test reads p.grad or weights, which are in shards",
    "m16": "it rounds gradients to bfloat16, and the test compares them in float32",
}

# A test with one of these words does not apply to any wrapper, for the reason.
NOT_APPLICABLE = {
    "SyncBatchNorm sync_bn non_default_stream ddp_device": "they need a GPU",
    "apply_optim_in_backward": "torch's optimizer in backward needs a GPU, and steps before gradients are averaged",
    "powerSGD comm_hook_logging": "communication hooks that change gradients, which the wrappers do not have",
    "buffer_hook via_hook": "communication hooks for buffers",
    "profiling logging debug_param python_error different_graph": "torch's logs and profiles",
    "control_flow has_finalized is_actually_static": "internals of torch's reducer",
    "bucket_assignment bucket_cap_mb_list rebuild_buckets sync_module_states": "torch's plan of buckets",
    "grad_div_uneven": "an average over the ranks that still have inputs: module 12 weights tokens instead",
    "test_ddp_uneven_inputs": "joins with powerSGD's hook, and with buffers that are broadcast",
    "mixed_precision device_mesh": "options of torch that the wrappers do not have",
    "deprecation_warning": "a warning of torch",
    "ignore_params get_data_parallel_params": "parameters that are ignored",
    "model_diff verify_model": "models that differ between ranks: the course's runner ends the deadlock before torch's",
    "requires_grad invalid_static static_graph_api nested_unused": "errors of torch, where the wrappers are right",
    "undefined_grad": "a hook without a gradient: None, where module 3 needs one, and zeros elsewhere",
    "skip_all_reduce_unused": "the number of buckets that torch has reduced",
}

# Torch's test of FSDP: its models, and for each sharding strategy the kinds that divide the same. Each pair is a test.
FSDP_MODELS = (
    "NestedWrappedModule",
    "AlwaysWrapNestedWrappedModule",
    "NonUniformReqGradNWM",
    "TransformerWithSharedParams",
)
FSDP_STRATEGIES: dict[str, tuple[str, ...]] = {
    "NO_SHARD": ("m05",),
    "SHARD_GRAD_OP": ("m10", "m11"),
    "FULL_SHARD": ("m11",),
    "HYBRID_SHARD": ("m14",),
}
FSDP_NOT_APPLICABLE = {
    "MixtureOfExperts": "its experts have process groups of their own",
    "NestedWrappedModuleWithDelay": "it delays GPUs. On CPUs, it is NestedWrappedModule",
    "mixed_precision": "the test's own reference, torch.autocast, has another dtype on CPUs",
}

# Torch's tests of collectives that module 0's functions pass in the place of torch's.
RING = (
    "test_all_gather_into_cat_tensor_cuda",
    "test_all_gather_into_stack_tensor_cuda",
    "test_all_reduce_full_group_sum",
    "test_all_reduce_group_sum",
    "test_all_reduce_sum",
    "test_all_reduce_sum_complex",
    "test_reduce_scatter_tensor_cuda",
)
