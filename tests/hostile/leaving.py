"""Submissions that leave processes or files after the run."""

from hostile import ONE, Hostile, reference

# What stays in the kernel when all processes of a user are gone, by the name of the system call; a later grading run
# could read it. Numbers are those of x86_64 and of aarch64. `left` returns the calls that succeed.
KERNEL = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
text, process, user, session, everybody = b"the answers", -2, -4, -3, 0o1666
def call(x86_number, number, *words):
    given = [ctypes.c_char_p(w) if isinstance(w, bytes) else ctypes.c_long(w) for w in words]
    return libc.syscall(ctypes.c_long(x86_number if x86 else number), *given)
def left():
    tries = {f"add_key to key ring {ring}": call(248, 217, b"user", b"answers", text, len(text), ring)
             for ring in (process, -5, user, session)}
    tries["keyctl: get_persistent"] = call(250, 219, 22, -1, process)
    tries["keyctl: join_session_keyring"] = call(250, 219, 1, b"answers")
    tries["request_key"] = call(249, 218, b"user", b"answers", b"", user)
    tries["shmget"] = call(29, 194, os.getpid(), 1 << 16, everybody)
    tries["msgget"] = call(68, 186, os.getpid(), everybody)
    tries["semget"] = call(64, 190, os.getpid(), 1, everybody)
    tries["mq_open"] = call(240, 180, b"answers", os.O_CREAT | os.O_RDWR, 0o666, 0)
    return [name for name, result in tries.items() if result != -1]
"""

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
    Hostile(
        "something in the kernel for the next grading run",
        reference(KERNEL, "if left(): raise SystemExit(f'left {left()}')"),
        3,
    ),
    Hostile(
        "is right, and uses processes and shared memory of its own",
        reference("""
            import mmap, multiprocessing, subprocess
            from multiprocessing import shared_memory
            assert subprocess.run(["/bin/sh", "-c", "exit 7"]).returncode == 7
            mmap.mmap(-1, 1 << 16).close()
            block = shared_memory.SharedMemory(create=True, size=1 << 16); block.close(); block.unlink()
            child = multiprocessing.get_context("fork").Process(target=print); child.start()
            child.join(); assert child.exitcode == 0
            torch.ones(4).share_memory_()
            """),
        3,
    ),
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
        "processes that stop the process that ends them",
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
        "processes that kill the process that ends them",
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
