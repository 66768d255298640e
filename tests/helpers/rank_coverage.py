"""For `make coverage`: a rank saves its coverage before it sends its result, because it is killed afterwards."""

from __future__ import annotations

from typing import Any

import coverage

from brigade.ranks.ipc.channel import Channel


def saving(send: Any) -> Any:
    def save_and_send(*args: Any) -> None:
        if measured := coverage.Coverage.current():
            measured.save()
        send(*args)

    return save_and_send


Channel.send_result, Channel.send_failure = saving(Channel.send_result), saving(Channel.send_failure)
