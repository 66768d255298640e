"""Run `brigade grade` for one student of a class. Stop when standard input closes because the parent has ended.

python -m brigade.grader.cli.grade_student --submission DIR --out FILE [options of brigade grade]
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from brigade.course.cli.main import main


def end_with_parent() -> None:
    """Wait until standard input closes, then terminate this process."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.exit(main(["grade", *sys.argv[1:]]))
