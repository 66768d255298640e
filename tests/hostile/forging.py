"""Submissions that forge results: files, messages on the rank's channel, values, and the record."""

from hostile import ONE, Hostile, parse, reference, skeleton

UNREADABLE = "wrote something unreadable to its channel"

# The channel is the one Unix socket that a rank has. `message` makes what `wire.py` reads, from JSON texts.
CHANNEL = """
import json, socket, stat, struct, time
def channel():
    for fd in range(256):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                found = socket.socket(fileno=os.dup(fd))
                if found.family == socket.AF_UNIX: return found
        except OSError: pass
def send(letter, body):
    channel().sendall(letter + struct.pack("<Q", len(body)) + body)
def message(value, sizes="[]", blobs=b""):
    header = f'{{"value": {value}, "sizes": {sizes}}}'.encode()
    return struct.pack("<Q", len(header)) + header + blobs
"""


# Everything that a results file might be, and everything that the grader has open.
RESULTS = """
import contextlib, glob
FORGED = '{"score": 100, "tests": []}'
places = ["results.json", "../results.json", "/autograder/results/results.json", "/tmp/results.json"]
places += glob.glob("/tmp/*/results.json") + glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/cwd/*.json")
for pid in glob.glob("/proc/[0-9]*"):
    with contextlib.suppress(OSError):
        words = open(pid + "/cmdline").read().split(chr(0))
        places += [word for word in words if word.endswith(".json")]
for place in places:
    with contextlib.suppress(OSError):
        with open(place, "w") as file: file.write(FORGED)
"""

CASES = parse(
    globals(),
    r"""
=== stacks that take long to read | 0 | stopped after 1 s | skeleton CHANNEL limit_s=1
text = b'File "' * 200_000
for fd in range(256):
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.set_blocking(fd, False)
            for _ in range(100):
                try: os.write(fd, text)
                except BlockingIOError: time.sleep(0.01)
    except OSError: pass
while True: pass
=== more values than any answer has | 0 | returned more than 50000 values | modules=14 checks=test_grid
def plan_grid(*_): return [[[0]] * 30_000, [[0]]]
=== a text longer than any answer's | 0 | returned a text of more than 50000 letters | modules=14 checks=test_grid
def plan_grid(*_): raise type("E" * 60_000, (ValueError,), {})
=== a gradient of NaN everywhere | 1 | is nan, expected
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        super().finish_grad_sync()
        for p in self.module.parameters(): p.grad = torch.full_like(p, float("nan"))
""",
)
CASES += parse(
    globals(),
    r"""
=== frames without end | 0 | more than 20000 events | long
event = b'[{"kind": "x", "time": 0.0, "phase": ""}]'
frames = (b"E" + struct.pack("<Q", len(event)) + event) * 10_000
found = channel()
while True: found.sendall(frames)
=== events that grow a hundred times in memory | 0 | sent more than | long
event = b'{"kind":"x","time":0.0,"phase":"","a":[' + b','.join([b'[]'] * 1_000_000) + b']}'
while True: send(b'E', b'[' + event + b']')
=== an exception with a million frames, in line 1e999 | 0 | UNREADABLE
frames = ','.join(['["f", 1e999, "w", "t"]'] * 100_000)
send(b'X', ('{"type": "E", "message": "m", "own": true, "frames": [' + frames + "]}").encode())
=== an exception with a message of megabytes | 0 | raised E: mmm
send(b'X', json.dumps({'type': 'E', 'message': 'm' * 4_000_000, 'own': True, 'frames': []}).encode())
=== result: one blob a hundred thousand times | 0 | UNREADABLE
send(b'R', message('[%s]' % ','.join(['{"bytes": 0}'] * 100_000), '[1000000]', bytes(1_000_000)))
=== result: gradients that are NaN | 0 | a dict of 5 was asked for
send(b'R', message('[{"dict": [["gradients", [{"dict": [["layers.0.weight", NaN]]}]], ["start", {"dict": []}]]}]'))
=== events of steps that collide | 0 | UNREADABLE | limit_s=10
event = {'kind': 'step', 'time': 0.0, 'phase': ''}
send(b'E', json.dumps([event | {'step': i * (2**61 - 1)} for i in range(1, 40_000)]).encode())
=== a frame that never ends | 0 | stopped after 1 s | limit_s=1
channel().sendall(b'R' + struct.pack('<Q', 1 << 20) + b'x')
=== descriptors on the channel | 0 | made another one
while True: socket.send_fds(channel(), [b'E'], [0] * 250)
=== garbage on the channel | 0 | UNREADABLE
channel().sendall(os.urandom(100_000))
=== a frame of a gigabyte | 0 | UNREADABLE | long
send(b'R', bytes(1 << 30))
=== result: a million values | 0 | wrote something unreadable | limit_s=10 long
send(b'R', message('[' + '[], ' * 999_999 + '[]]'))
""",
    "skeleton CHANNEL checks=ONE",
    "time.sleep(60)",
)
# What `LiveMemory` counts is nothing. Only the kernel's limit shows how much memory the rank has.
NOTHING = """
import sys
memory = sys.modules["brigade.ranks.rank.memory"].LiveMemory
memory.count = lambda self, **kinds: {**dict.fromkeys(kinds, 0), "other": 0}
memory.peak = property(lambda self: 0, lambda self, value: None)
"""
TOO_MUCH = "MiB of memory, besides what torch needs"
MEMORY = ("test_ring_memory", "test_gradient_memory", "test_scratch")

CASES += parse(
    globals(),
    r"""
=== counts nothing, and copies the tensor | 0 | TOO_MUCH | modules=0
def ring_all_reduce(tensor, process_group=None, reduce=ring_all_reduce):
    kept = tensor.clone()
    reduce(tensor, process_group)
=== counts nothing, and frees no bucket | 0 | TOO_MUCH | modules=10
class ShardedBucket(ShardedBucket):
    kept = []
    def start_grad_sync(self):
        super().start_grad_sync()
        self.kept.append(self.buffer.whole[self.bucket_indices[0]])
GradShardedDDP.group_class = ShardedBucket
=== counts nothing, and keeps what it has sent | 0 | TOO_MUCH | modules=16
kept, start = [], start_reduce_scatter
def start_reduce_scatter(*arguments, **options):
    handle = start(*arguments, **options)
    kept.append((handle.sent, handle.received))
    return handle
""",
    "NOTHING checks=MEMORY limit_s=900 long",
)
CASES += [
    Hostile("writes results wherever it may", skeleton(RESULTS), 0, "part (b)"),
    Hostile("writes results wherever it may, and is right", reference(RESULTS), 2, checks=ONE),
]
