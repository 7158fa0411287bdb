"""Worker processes: started with an environment of their own, dead when their parent is."""

import contextlib
import ctypes
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import process as mp_process
from multiprocessing import spawn
from typing import Any

from paceline.flow.signals import ignore_signals, signals_held_back

_PR_SET_PDEATHSIG = 1

_HEADER = struct.Struct("!Q")

GRACE = 0.5
"""Seconds in which a killed process is gone, unless the kernel holds it in a frozen read."""

# Nothing of the working folder may stand for a module of Python's (-P), and the package may be
# one that only the parent's own path leads to.
_BOOT = """\
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from paceline.flow.process import begin
begin(int(sys.argv[1]), int(sys.argv[2]))
"""

_PREPARED = (
    "sys_path",
    "sys_argv",
    "orig_dir",
    "dir",
    "init_main_from_name",
    "init_main_from_path",
)


@dataclass(frozen=True)
class Child:
    """The parent's hold on a process that it has started."""

    name: str
    process: "subprocess.Popen[bytes]"
    socket: socket.socket
    """The parent's end; its end of file is the child's end."""

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self.process.pid

    def is_gone(self) -> bool:
        """Whether it has ended; looks, and does not wait."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it at once; does not wait until it is gone."""
        self.process.kill()

    def wait(self, seconds: float) -> bool:
        """Wait for its end; False where it is still there after that time."""
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def how_it_ended(self) -> str:
        """In words that follow a name: `was killed by SIGKILL`, `ended with exit code 3`."""
        code = self.process.poll()
        if code is None:
            return "closed its connection and did not end"
        if code >= 0:
            return f"ended with exit code {code}"
        how = f"was killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL:
            how += " (when memory runs out, the kernel kills like this)"
        return how


def start_child(
    target: Callable[..., None],
    args: tuple[Any, ...],
    *,
    name: str,
    environment: Mapping[str, str],
) -> Child:
    """Run `target(socket, *args)` in a new process; both ends of the socket are stream ends.

    `target` is a module's top-level function. `environment` is added to this process's own for
    the child alone: nothing here changes, so other threads may read theirs meanwhile. The child
    ignores SIGTERM and SIGINT from its birth on, and on Linux the kernel kills it when the thread
    that called this ends, so that must be one that lives as long as the children. `args` are
    small (some kilobytes); what may be large goes through the socket once the child asks for it.

    Raises OSError where the system gives no more processes, RuntimeError in a child that is
    itself importing its main module: a script that starts processes needs the guard
    `if __name__ == "__main__"`.
    """
    found = spawn.get_preparation_data(name)
    prepared = {key: found[key] for key in _PREPARED if key in found}
    order = pickle.dumps((target, args), pickle.HIGHEST_PROTOCOL)
    ours, theirs = socket.socketpair()
    process = None
    try:
        with theirs, signals_held_back():
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-c", _BOOT),
                    *(str(theirs.fileno()), str(os.getpid()), json.dumps(prepared["sys_path"])),
                    name,
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
            )
        # Where it is dead already, whoever reads from it next sees that.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_bytes(ours, pickle.dumps(prepared))
            send_bytes(ours, order)
    except BaseException:
        ours.close()
        if process is not None:
            process.kill()
            process.wait(GRACE)
        raise
    return Child(name, process, ours)


def end_children(children: Iterable[Child], seconds: float) -> list[Child]:
    """Kill them, and wait; returns those that are left after `seconds`, held by the kernel."""
    everyone = list(children)
    # Killed, because they ignore SIGTERM; all of them before the first is waited for.
    for child in everyone:
        child.kill()
        child.socket.close()
    deadline = time.monotonic() + seconds
    return [child for child in everyone if not child.wait(deadline - time.monotonic())]


def begin(descriptor: int, parent: int) -> None:
    """What a new process does first; `start_child` calls it there."""
    ignore_signals()
    _die_with_parent(parent)
    end = socket.socket(fileno=descriptor)
    # Marks the process for those who would start more of them while its main module is imported.
    current: Any = mp_process.current_process()
    current._inheriting = True  # noqa: SLF001
    try:
        spawn.prepare(pickle.loads(receive_bytes(end)))  # type: ignore[attr-defined]
        target, args = pickle.loads(receive_bytes(end))
    except EOFError:
        return
    finally:
        del current._inheriting  # noqa: SLF001
    target(end, *args)


def environment_of(threads: int) -> dict[str, str]:
    """What OpenMP reads when a process loads it; no later call can change it.

    Passive waiting: a pool's threads that spin while another process needs the core make both
    several times slower. Tokenizers make no threads of their own: several processes share the work.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


def send_bytes(end: socket.socket, data: bytes) -> None:
    """Send one message over a blocking end. Raises OSError where the other end is closed."""
    end.sendall(_HEADER.pack(len(data)))
    end.sendall(data)


def receive_bytes(end: socket.socket) -> bytes:
    """Wait for one message on a blocking end. Raises EOFError where the other end is closed."""
    (size,) = _HEADER.unpack(_receive_exactly(end, _HEADER.size))
    return bytes(_receive_exactly(end, size))


def _receive_exactly(end: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        try:
            count = end.recv_into(rest)
        except ConnectionResetError:
            count = 0
        if not count:
            raise EOFError
        rest = rest[count:]
    return data


class Mailbox:
    """The parent's end of a child's line: neither sending nor receiving ever waits.

    A child that is frozen in the middle of a message, or does not read its own, holds up nobody.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._inbox = bytearray()
        self._outbox = bytearray()
        self.is_closed = False
        """Whether the other end is closed; what it had sent before is still collected."""

    def fileno(self) -> int:
        """For selectors."""
        return self._end.fileno()

    @property
    def wants_to_send(self) -> bool:
        """Whether something waits until the child reads on: `flush` when its end has room."""
        return bool(self._outbox) and not self.is_closed

    def post(self, data: bytes) -> None:
        """Send one message, now or in later calls of `flush`."""
        self._outbox += _HEADER.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send as much of what waits as the socket takes."""
        try:
            while self.wants_to_send:
                del self._outbox[: self._end.send(self._outbox)]
        except BlockingIOError:
            return
        except OSError:
            # What the child said last is still to be read, so this end is not closed by it.
            self._outbox.clear()

    def collect(self) -> list[bytes]:
        """All messages that are there in full."""
        try:
            while data := self._end.recv(1 << 18):
                self._inbox += data
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        found = []
        while len(self._inbox) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._inbox)
            if len(self._inbox) < _HEADER.size + size:
                break
            found.append(bytes(self._inbox[_HEADER.size : _HEADER.size + size]))
            del self._inbox[: _HEADER.size + size]
        return found


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies.

    Elsewhere than on Linux a worker ends when it next asks for an item.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before that call: then somebody else is the parent now.
    if os.getppid() != parent:
        os._exit(1)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
