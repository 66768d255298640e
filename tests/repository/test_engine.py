"""The toolkit knows no particular module: what it needs to know of one is a field of the module's row."""

import re

from brigade.course.table.modules import ROOT

NAMES = re.compile("Zero|FullySharded|Prefetched|m0[0-9]_|m1[0-9]_")
TORCH = re.compile("ZeroRedundancyOptimizer|FullyShardedDataParallel")
TABLE = "course/table/modules.py"
TEXT = {  # a sentence for people, and examples in docstrings
    "course/table/submission.py": "`from ..m05_grad_buffer.grad_buffer import GradBuffer`",
    "lab/experiment.py": "`python lessons/m03_overlapped_ddp/measure/order.py`",
    "lab/notebook.py": "`from solutions.m01_naive_ddp.naive_ddp import NaiveDDP`",
    "ranks/rank/api.py": 'such as student("m01_naive_ddp", "NaiveDDP").',
    "ranks/rank/memory.py": "loss = FullyShardedDDP(model, ...)(x)",
}


def test_only_the_table_and_texts_name_modules_and_their_classes():
    files = {str(path.relative_to(ROOT / "brigade")): path for path in (ROOT / "brigade").rglob("*.py")}
    del files[TABLE]
    lines = [(name, line) for name, path in files.items() for line in path.read_text().splitlines()]
    found = [(name, line) for name, line in lines if NAMES.search(TORCH.sub("", line))]
    unexpected = [pair for pair in found if TEXT.get(pair[0], "\n") not in pair[1]]
    assert not unexpected
    assert sorted(TEXT) == sorted(name for name, _ in found), "each of these files has one such line"
