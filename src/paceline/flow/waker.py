"""Waking a loop that waits in `select`, from any thread."""

import contextlib
import socket


class Waker:
    """Call it to wake who waits for its `fileno`; calls are free and never wait."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)

    def __call__(self) -> None:
        """Wake; before the first wait, or after `close`, it does no harm."""
        # A full buffer wakes as well.
        with contextlib.suppress(OSError):
            self._theirs.send(b"!")

    def fileno(self) -> int:
        """For selectors."""
        return self._ours.fileno()

    def clear(self) -> None:
        """Forget the calls so far."""
        with contextlib.suppress(OSError):
            while self._ours.recv(4096):
                pass

    def close(self) -> None:
        """Give the descriptors back."""
        self._ours.close()
        self._theirs.close()
