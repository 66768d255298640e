"""Submissions whose threads do what only the recorded thread may do."""

from hostile import parse
from hostile.forging import CHANNEL, UNREADABLE

TOLD = "the threads of a submission must not use tensors or collectives"
APART = """
import threading
def apart(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()
"""

CASES = parse(
    globals() | {"CHANNEL": CHANNEL, "UNREADABLE": UNREADABLE},
    r"""
=== all launches in a thread | 0 | TOLD
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self): apart(super().finish_grad_sync)
=== a launch in a thread that nobody awaits | 0 | TOLD
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        def launch():
            try: dist.barrier()
            except RuntimeError: pass
        apart(launch)
        super().finish_grad_sync()
=== launches in a pool of threads, through the private start | 0 | TOLD
import _thread
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        done = threading.Event()
        for p in self.module.parameters():
            _thread.start_new_thread(dist.all_reduce, (p.grad,), {"async_op": True})
        done.wait()
=== waits in a thread | 0 | TOLD
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        for p in self.module.parameters():
            apart(dist.all_reduce(p.grad, async_op=True).wait)
=== asks in a thread whether a launch is complete | 0 | TOLD
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        apart(dist.barrier(async_op=True).is_completed)
        super().finish_grad_sync()
=== a group that a thread creates | 0 | TOLD
class NaiveDDP(NaiveDDP):
    def __init__(self, module, process_group=None):
        apart(dist.new_group)
        super().__init__(module, process_group)
=== a border for which a thread asks | 0 | TOLD
from brigade.ranks.rank import recording
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        apart(recording.ask, 0, 0, torch.zeros(4))
        super().finish_grad_sync()
=== an event that a thread records | 0 | TOLD
from brigade.ranks.rank import recording
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        apart(recording.note, "wait")
        super().finish_grad_sync()
=== a message that a thread writes between those of the main thread | 0 | UNREADABLE | CHANNEL
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        apart(send, b"Z", b"")
        super().finish_grad_sync()
=== results that a thread sends while the main thread does nothing | 0 | | skeleton CHANNEL
import signal
class NaiveDDP(NaiveDDP):
    def __init__(self, module, process_group=None):
        threading.Thread(target=send, args=(b"R", message("[]"))).start()
        signal.pause()
""",
    "APART",
)
