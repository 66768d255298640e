"""Megatron-LM contains the names that the readings and claims mention, at the one commit that they all name.

The repository is not here, so the table is kept by hand. To check it against a checkout that has the commit:

    MEGATRON_LM=path/to/Megatron-LM pytest tests/toolkit/test_megatron.py
"""

import os
import re
import subprocess

import pytest
from documents import SECTION

from brigade.course.modules import MODULES, ROOT, TRAINING_MODULES

COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"  # 2026-08-22
LINK = f"(https://github.com/NVIDIA/Megatron-LM/tree/{COMMIT})"
CHECKOUT = os.environ.get("MEGATRON_LM")

DISTRIBUTED = "megatron/core/distributed"
OPTIMIZER = "megatron/core/optimizer"
# Looked up at COMMIT: file, and the names that are in it.
NAMES = {
    f"{DISTRIBUTED}/distributed_data_parallel.py": """DistributedDataParallel broadcast_params _make_backward_post_hook
        _make_forward_pre_hook grad_added_to_main_grad main_grad no_sync zero_grad_buffer""",
    f"{DISTRIBUTED}/distributed_data_parallel_config.py": """align_param_gather average_in_collective bucket_size
        grad_reduce_in_fp32 optim_grads overlap_grad_reduce overlap_param_gather pad_buckets_for_high_nccl_busbw""",
    f"{DISTRIBUTED}/finalize_model_grads.py": """_allreduce_non_tensor_model_parallel_grads _flatten_dense_tensors
        _unflatten_dense_tensors""",
    f"{DISTRIBUTED}/param_and_grad_buffer.py": """_ParamAndGradBucket _ParamAndGradBucketGroup
        _ParamAndGradBuffer _coalescing_manager _compute_default_per_buffer_param_layout cached_grad_buffer_shard_list
        cached_param_buffer_shard_list finish_grad_sync finish_param_sync force_single_bucket_group is_first_batch
        offload_to_cpu partition_buckets register_grad_ready reload_from_cpu shard_buffer start_grad_sync
        start_param_sync""",
    f"{OPTIMIZER}/clip_grads.py": "get_grad_norm_fp32",
    f"{OPTIMIZER}/distrib_optimizer.py": """DistributedOptimizer HybridDeviceOptimizer
        _build_model_and_main_param_groups _build_model_gbuf_param_range_map _build_model_gbuf_range
        _compute_per_buffer_param_layout dp_reshardable fully_reshardable init_state_fn sharded_state_dict
        step_with_ready_grads""",
    f"{OPTIMIZER}/layer_wise_optimizer.py": "LayerWiseDistributedOptimizer",
    f"{OPTIMIZER}/param_layout.py": """PerBufferParamLayout bucket_indices pad_bucket_end pad_param_start
        param_index_map""",
    "docs/user-guide/features/dist_optimizer.md": "",
}
KNOWN = {name for names in NAMES.values() for name in names.split()}
OTHERS = {"grad", "itemsize"}  # torch's, in the same paragraphs


def read_about_megatron(entry):
    """Return what a reading says about Megatron-LM: a column of a chapter's table, or a paragraph."""
    reading = (entry.lesson / "README.md").read_text()
    if table := reading.partition("## What others decided\n")[2].partition("\n## ")[0]:
        rows = [[cell.strip() for cell in line.split("|")[1:]] for line in table.splitlines() if line.startswith("| ")]
        found = [" ".join(row[n] for row in rows) for n, head in enumerate(rows[0]) if "Megatron-LM" in head]
    else:
        section = reading.partition(SECTION)[2].partition("\n## ")[0]
        found = [" ".join(one.split()) for one in section.split("\n\n") if one.strip().startswith("**Megatron-LM**")]
    if table and not found:
        pytest.skip("the chapter's table has no column about Megatron-LM")
    assert len(found) == 1, f"lessons/{entry.package}/README.md has {len(found)} texts on Megatron-LM, not one"
    return found[0]


def unknown(text):
    """Return the identifiers and paths in inline code that the table lacks."""
    missing = set()
    for code in re.findall(r"`([^`]+)`", text):
        if "/" in code or code.endswith(".py"):
            if not code.startswith("torch/") and not any(f"/{path}".endswith(f"/{code}") for path in NAMES):
                missing.add(code)
        elif name := re.fullmatch(r"\.?(?:\w+\.)*(\w+?)(?:=\w+|\(\))?", code):
            missing |= {name[1]} - KNOWN - OTHERS
    return missing


@pytest.mark.parametrize("entry", TRAINING_MODULES, ids=lambda entry: entry.package)
def test_a_reading_names_the_commit_and_nothing_that_is_not_in_it(entry):
    text = read_about_megatron(entry)
    assert LINK in text, f"lessons/{entry.package}/README.md does not name the commit {LINK}"
    missing = unknown(text.replace("`torch/_utils.py`", ""))
    assert not missing, (
        f"lessons/{entry.package}/README.md names what the table here lacks: {', '.join(sorted(missing))}"
    )


def read_claims(text):
    """Return the rows of the claims tables in a Markdown text, as lists of cells, without headings."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[0] not in ("name", "claim")]


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_the_table_of_a_reading_names_its_claims(entry):
    box = (entry.lesson / "README.md").read_text().partition("## Claims, checked\n")[2].partition("\n## ")[0]
    page = (ROOT / "docs" / "claims.md").read_text().partition(f"## Module {entry.number}: ")[2].partition("\n## ")[0]
    names = [row[-1] for row in read_claims(box)]
    assert names == [row[0] for row in read_claims(page) if row[0] in names]


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize("path", NAMES)
def test_the_table_is_what_the_commit_has(path):
    done = subprocess.run(["git", "-C", CHECKOUT, "show", f"{COMMIT}:{path}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [name for name in NAMES[path].split() if not re.search(rf"\b{name}\b", done.stdout)] == []
