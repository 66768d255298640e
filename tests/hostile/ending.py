"""Ranks that end, hang, or end each other."""

from hostile import Hostile, parse, reference

# What module 1's class does in these, before anything else.
IN_FINISH = """
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        attack()
        super().finish_grad_sync()
"""

CASES = parse(
    globals(),
    r"""
=== os._exit in the run of four ranks: only that check is lost | 7 | died without a result (exit code 0) |
IN_FINISH checks=ALL
def attack():
    if dist.get_world_size() == 4: os._exit(0)
=== one rank kills itself | 2 | | IN_FINISH checks=ONE
# The kernel ignores it, because each rank is process 1 of its own.
def attack():
    if dist.get_rank(): os.kill(os.getpid(), 9)
=== one rank leaves out a collective | 0 | deadlock
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        if not dist.get_rank(): super().finish_grad_sync()
=== an exception without end | 0 | raised Endless: xxxx | checks=ONE
class Endless(BaseException): pass
raise Endless('x' * 10**7 + '\x1b[2J')
=== an exception that cannot be told | 0 | exit code 0
class Mute(BaseException):
    def __str__(self): os._exit(0)
raise Mute
=== stops all that it may | 2 | | IN_FINISH checks=ONE
def attack():
    try: os.kill(-1, 19)
    except ProcessLookupError: pass
=== kills all that it may, and its parent | 2 |  | IN_FINISH checks=ONE
import contextlib
def attack():
    for pid in (os.getppid(), 1, -1):
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.kill(pid, 9)
=== closes its channel, and waits | 0 | died without a result
import socket, stat, time
for fd in range(256):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            if socket.socket(fileno=os.dup(fd)).family == socket.AF_UNIX: os.close(fd)
    except OSError: pass
time.sleep(10**6)
""",
) + [
    Hostile("os._exit at import", reference("os._exit(0)"), 0, "died without a result (exit code 0)"),
    Hostile("endless loop at import", reference("while True: pass"), 0, "stopped after 1 s", limit_s=1),
    Hostile("a crash in C", reference("import ctypes; ctypes.string_at(0)"), 0, "killed by SIGSEGV"),
]
