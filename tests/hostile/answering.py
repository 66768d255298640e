"""Submissions that answer nothing, or everything, instead of what they are asked. They contain no solution."""

from hostile import parse

NAMES = """
import sys
align = find_divergence = diagnose = load_trace = main = lambda *args, **kwargs: None
Trace = Call = dict
"""
SEND = """
import signal
import sys
from brigade.ranks.ipc import wire
def send(answer):
    frame = sys._getframe()
    while frame.f_code.co_name != "main" or "channel" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["channel"].send_result(wire.encode(answer))
    signal.pause()
"""
# A program that returns the right number, and prints all ranks and whole dumps.
EVERYTHING = """
def main(paths, html=None):
    import json, pathlib
    text = "dump_0.json dump_1.json dump_2.json: ranks 0, 1, 2 skipped a call"
    try:
        for file in (files := list_files(paths)):
            record = json.loads(file.read_bytes())
            for entry in record["entries"]:
                text += f"\\n{record['rank']} {entry['profiling_name']} {entry['line']} {record}"
        finding = diagnose(list(map(load_trace, files)))
    except (ValueError, OSError, TypeError):
        return print(text) or 2
    print(text)
    if html: pathlib.Path(html).write_text(text)
    return int(finding.kind != "healthy")
"""

CASES = parse(
    globals(),
    r"""
=== empties the list of questions | 0 | were asked for, and none came | alone NAMES modules=13 checks=ALL
frame = sys._getframe()
while frame:
    job = frame.f_locals.get("job")
    if isinstance(job, dict):
        job.update({name: empty for name, empty in (("jobs", "[]"), ("runs", [])) if name in job})
    frame = frame.f_back
=== sends a list without answers | 0 | were asked for, and none came | alone NAMES SEND modules=13 checks=ALL
send([])
=== sends a dict without answers | 0 | the entry 'gradients' is missing | alone SEND checks=ALL
send({})
=== prints everything that it reads | 0 | more than 50000 letters |
 EVERYTHING modules=13 checks=test_program,test_jobs_folders_and_pages
""",
)
