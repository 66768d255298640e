"""Submissions that leave processes or files after the run."""

from hostile import parse

# A process that is nobody's child, in a session of its own, deaf to every signal that can be ignored.
DAEMON = """
import signal, time
def daemon(work):
    if os.fork(): return
    os.setsid()
    if os.fork(): os._exit(0)
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    os.closerange(0, 4096)
    try: work()
    finally: os._exit(0)
"""

EVERYBODY = """
def send(number):
    for _ in range(4 if dist.get_rank() == 0 else 0):
        if not os.fork():
            while True:
                try: os.kill(-1, number)
                except ProcessLookupError: pass
"""

CASES = parse(
    globals(),
    r"""
=== is right, and uses processes and shared memory of its own | 2 | | checks=ONE
import mmap, multiprocessing, subprocess
from multiprocessing import shared_memory
assert subprocess.run(["/bin/sh", "-c", "exit 7"]).returncode == 7
mmap.mmap(-1, 1 << 16).close()
block = shared_memory.SharedMemory(create=True, size=1 << 16); block.close(); block.unlink()
child = multiprocessing.get_context("fork").Process(target=print); child.start()
child.join(); assert child.exitcode == 0
torch.ones(4).share_memory_()
=== a daemon that waits for the end, and then writes results | 3 |  | DAEMON
rank = os.getpid()
def work():
    import contextlib, glob
    with contextlib.suppress(ProcessLookupError):
        while not os.kill(rank, 0): time.sleep(0.001)
    while True:
        for place in glob.glob("/tmp/**/results.json", recursive=True) + ["/tmp/results.json"]:
            try: open(place, "w").write('{"score": 100}')
            except OSError: pass
daemon(work)
=== processes that stop the process that ends them | 3 | | EVERYBODY
send(19)
=== processes that kill the process that ends them | 3 | | EVERYBODY long
send(9)
=== files, links and pipes everywhere, and directories that nobody may enter | 3
import contextlib
for place in (".", "/tmp", "/var/tmp", "/dev/shm", "/run/lock"):
    with contextlib.suppress(OSError):
        top = f"{place}/left {os.getpid()}"
        os.makedirs(top + "/d/e")
        open(top + "/file", "w").close()
        os.symlink("/etc", top + "/link")
        os.mkfifo(top + "/pipe")
        os.symlink("/", f"{place}/link-{os.getpid()}")
        for closed in ("/d/e", "/d", ""): os.chmod(top + closed, 0)
""",
)
