"""Free ports of this machine."""

import contextlib
import socket

_LOOPBACK = "127.0.0.1"


def find_addresses(count: int) -> list[str]:
    """Returns `count` different addresses on loopback that are free now.

    Nothing holds them after the return, so another program can take one before the
    worker does. That attempt fails, and the next one has other ports.
    """
    with contextlib.ExitStack() as stack:
        # All are open at once, or the system could give the same one twice.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_LOOPBACK, 0))
        return [f"{_LOOPBACK}:{each.getsockname()[1]}" for each in sockets]
