"""Submissions that use too much memory, disk or output, or too many processes."""

from hostile import ONE, Hostile, parse, reference

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

CASES = parse(
    globals(),
    r"""
=== ten gigabytes of memory, refused | 3 | | together
try: block = torch.ones(10 << 30, dtype=torch.uint8)
except RuntimeError: block = None
if block is not None: raise SystemExit("there is no limit")
=== ten gigabytes of memory, in pieces | 0 | Cannot allocate memory
import mmap; pieces = [mmap.mmap(-1, 1 << 28) for _ in range(40)]
=== fork bomb | 0 |  | limit_s=1
while True:
    try: os.fork()
    except OSError: pass
=== files until there are no more | 2 |  | long checks=ONE
import contextlib
for place in (".", "/tmp", "/dev/shm"):
    with contextlib.suppress(OSError):
        for number in range(30_000): open(f"{place}/{os.getpid()}-{number}", "w").close()
        raise SystemExit("there is no limit")
=== a directory 1500 deep | 2 |  | checks=ONE
for place in (".", "/tmp"):
    os.chdir(place)
    os.mkdir(str(os.getpid())); os.chdir(str(os.getpid()))
    for _ in range(1500):
        os.mkdir("d"); os.chdir("d")
os.chdir("/")
=== namespaces of its own | 3 | | together
import ctypes  # without them, nobody can take away the mounts that hide files
libc = ctypes.CDLL(None)
made = [flag for flag in (0x10000000, 0x20000, 0x8000000, 0x40000000, 0x10020000) if not libc.unshare(flag)]
child = libc.syscall(*((56,) if os.uname().machine == "x86_64" else (220,)), 0x10000011, 0, 0, 0, 0)
if child == 0: os._exit(0)
if made or child > 0: raise SystemExit(f"namespaces: {made}, {child}")
=== processes first | 3 | | together
import resource
for niceness in (0, -20):
    try: os.setpriority(os.PRIO_PROCESS, 0, niceness)
    except OSError: continue
    raise SystemExit("it goes before others")
if os.nice(0) < 5: raise SystemExit("it goes before others")
""",
) + [
    Hostile(
        "prints without end",
        reference("while True: print('x' * 1000)"),
        0,
        "stopped after 1 s",
        limit_s=1,
        is_long=True,
    ),
    Hostile("fills the disk", reference(FILL), 2, checks=ONE),
]
