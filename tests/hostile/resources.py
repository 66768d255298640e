"""More memory, processes, disk and output than there is."""

from hostile import ONE, Hostile, reference, skeleton

# Writes until it may not, everywhere; more than the private directories can hold would come from the machine's disk.
FILL = """
import contextlib, shutil
megabyte, written = bytes(1 << 20), 0
for place in (".", "/tmp", "/var/tmp", "/dev/shm", "/run/lock"):
    for number in range(200):
        with contextlib.suppress(OSError):
            with open(f"{place}/fill-{os.getpid()}-{number}", "wb", buffering=0) as file:
                for _ in range(30):
                    written += file.write(megabyte)
                    if written > 400 << 20: raise SystemExit("there is no limit")
            continue
        break
"""

CASES = [
    Hostile(
        "ten gigabytes of memory, refused",
        reference("""
            try: block = torch.ones(10 << 30, dtype=torch.uint8)
            except RuntimeError: block = None
            if block is not None: raise SystemExit("there is no limit")
            """),
        3,
    ),
    Hostile(
        "ten gigabytes of memory, in pieces",
        reference("import mmap; pieces = [mmap.mmap(-1, 1 << 28) for _ in range(40)]"),
        0,
        "Cannot allocate memory",
    ),
    Hostile(
        "fork bomb",
        reference("""
            while True:
                try: os.fork()
                except OSError: pass
            """),
        0,
        limit_s=1,
    ),
    Hostile(
        "threads until there are no more",
        skeleton("""
            import threading, time
            try:
                while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            except RuntimeError: pass
            """),
        0,
    ),
    Hostile("a megabyte of prints", reference("for _ in range(1000): print('\\x1b[31m' + 'x' * 1000)"), 3),
    Hostile("prints without end", reference("while True: print('x' * 1000)"), 0, "stopped after 1 s", limit_s=1),
    Hostile("fills the disk", reference(FILL), 2, checks=ONE),
    Hostile(
        "files until there are no more",
        reference("""
            import contextlib
            for place in (".", "/tmp", "/dev/shm"):
                with contextlib.suppress(OSError):
                    for number in range(30_000): open(f"{place}/{os.getpid()}-{number}", "w").close()
                    raise SystemExit("there is no limit")
            """),
        2,
        checks=ONE,
    ),
    Hostile(
        "a directory 1500 deep",
        reference("""
            for place in (".", "/tmp"):
                os.chdir(place)
                os.mkdir(str(os.getpid())); os.chdir(str(os.getpid()))
                for _ in range(1500):
                    os.mkdir("d"); os.chdir("d")
            os.chdir("/")
            """),
        2,
        checks=ONE,
    ),
    Hostile(
        "shared memory that stays",
        reference("""
            import ctypes
            found = ctypes.CDLL(None).shmget(os.getpid(), ctypes.c_size_t(1 << 24), 0o1666)
            if found < 0: raise SystemExit("no shared memory at all")
            """),
        3,
    ),
]
