"""What the process that grades one submission has to do: `brigade grade` makes it, and a class sends it as JSON."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brigade.grader import formats
from brigade.grader.grading import TOTAL_S
from brigade.ranks.errors import UserError


@dataclass(frozen=True)
class GradeRequest:
    """Grade these modules of a submission, and write the results to the file `out`, or print them if it is "".

    The paths are those of one directory or archive, or of several module files. The seed follows from the text and from
    the `secret` if there is one. Otherwise it is `seed`, or drawn if that is None. Several checks may run `at_a_time`.
    The other fields are options of `brigade grade`.
    """

    modules: tuple[int, ...]
    submission: tuple[str, ...] = ()
    out: str = ""
    form: str = "json"
    visibility: str | None = None
    extra: tuple[str, ...] = ()
    seed: int | None = None
    secret: str = ""
    prior: str = "auto"
    backend: str = "gloo"
    share_gpu: bool = False
    limit: float = TOTAL_S
    at_a_time: int = 1

    def encode(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))


def decode(text: str) -> GradeRequest:
    """Return the request that `encode` has turned into text."""
    fields: dict[str, Any] = json.loads(text)
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return GradeRequest(**{**fields, **lists})


def read_secret(path: Path, draws_one: bool = False) -> bytes:
    """Return the content of a file, without space around it. Raise UserError if there is none.

    If there is no file, and `draws_one`, draw a secret, which only the owner of the file can read.
    """
    try:
        if draws_one and not path.exists():
            formats.write(path, secrets.token_hex(), is_secret=True)
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if not secret:
        raise UserError(f"{path} is empty, but it must contain a secret")
    return secret
