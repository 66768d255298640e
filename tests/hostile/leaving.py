"""What should outlive the run: processes and files."""

from hostile import ONE, Hostile, reference

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

CASES = [
    Hostile("a daemon", reference(DAEMON, "daemon(lambda: time.sleep(10**6))"), 3),
    Hostile(
        "a daemon that waits for the end, and then writes results",
        reference(
            DAEMON,
            """
rank = os.getpid()
def work():
    import glob
    while os.path.exists(f"/proc/{rank}"): time.sleep(0.001)
    while True:
        for place in glob.glob("/tmp/**/results.json", recursive=True) + ["/tmp/results.json"]:
            try: open(place, "w").write('{"score": 100}')
            except OSError: pass
daemon(work)
""",
        ),
        3,
    ),
    Hostile(
        "daemons that replace each other",
        reference(
            DAEMON,
            """
def work():
    while True:
        if os.fork(): os._exit(0)
for _ in range(3): daemon(work)
""",
        ),
        2,
        checks=ONE,
    ),
    Hostile(
        "processes that stop whoever comes to end them",
        reference("""
            if dist.get_rank() == 0:
                for _ in range(4):
                    if not os.fork():
                        while True:
                            try: os.kill(-1, 19)
                            except ProcessLookupError: pass
            """),
        0,
        "stopped after 1 s",
        limit_s=1,
    ),
    Hostile(
        "processes that kill whoever comes to end them",
        reference("""
            if dist.get_rank() == 0:
                for _ in range(4):
                    if not os.fork():
                        while True:
                            try: os.kill(-1, 9)
                            except ProcessLookupError: pass
            """),
        0,
        "killed by SIGKILL",
    ),
    Hostile(
        "files, links and pipes everywhere, and directories that nobody may enter",
        reference("""
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
            """),
        3,
    ),
]
