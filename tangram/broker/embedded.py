"""A nats-server of our own: for the demo, for one machine, for tests. Loopback only, JetStream in a folder of its own.

The server ends with the process that started it, also when that is killed; its data, port and credential stay in the
folder and are used again.
"""

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from tangram.broker.errors import BrokerError
from tangram.broker.server_binary import find_server

START_TIMEOUT_S: Final = 20.0
"""A large store takes a while to be read."""
STOP_TIMEOUT_S: Final = 10.0
LOCK_TIMEOUT_S: Final = 0.5
"""A server that was just killed with its parent still has its files open for a moment."""
MAX_PAYLOAD_BYTES: Final = 1_048_576
USER: Final = "tangram"
URL_FILE: Final = "broker.url"
_LAUNCHER: Final = Path(__file__).with_name("_die_with_parent.py")

Sync = Literal["always", "default"]


class EmbeddedServerError(BrokerError):
    """The server could not be started; the message says why, with the last lines of its log."""


class EmbeddedServer:
    """A running server. A context manager; blocking calls (start takes about 0.1 s), usable from any thread.

    `url` holds the credential; it is also in `<data_dir>/broker.url`, readable by the owner only.
    """

    def __init__(self, data_dir: Path, *, port: int, sync: Sync, extra_config: str) -> None:
        self.data_dir: Final = data_dir
        self._port_wanted, self._sync, self._extra_config = port, sync, extra_config
        self.port = 0
        self._password = ""
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, data_dir: Path, *, port: int = 0, sync: Sync = "always", extra_config: str = "") -> Self:
        """Starts a server on `data_dir`, which is made if need be.

        `port` 0 takes the port of the last time, or any free one. `sync` "default" leaves fsync to every two minutes: faster,
        and an operating system crash can lose what was acknowledged. `extra_config` is appended to the configuration.
        Raises EmbeddedServerError: binary missing, folder in use by a live server, port taken, configuration refused.
        """
        server = cls(data_dir.absolute(), port=port, sync=sync, extra_config=extra_config)
        server._start()
        return server

    @property
    def url(self) -> str:
        return f"nats://{USER}:{self._password}@127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the server process. Raises EmbeddedServerError if it was stopped."""
        if self._process is None:
            raise EmbeddedServerError("the server is stopped")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ends the server in order; kills it if it takes longer than STOP_TIMEOUT_S. May be called again."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the server at once (SIGKILL), as a crash of the process would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stops it if it runs, and starts it on the same data, port and credential. Raises as `start`."""
        self.stop()
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        binary = find_server()
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._read_credential()
        first_port = self._port_wanted or self.port or -1
        lock = self._lock()
        try:
            try:
                self._run(binary, first_port, lock)
            except EmbeddedServerError:
                # The port of the last time may be somebody else's by now; one that was asked for is not negotiable.
                if self._port_wanted or first_port == -1 or not _port_taken(first_port):
                    raise
                self._run(binary, -1, lock)
        finally:
            os.close(lock)  # the server has inherited it, so the folder is locked exactly as long as the server lives
        _write_private(self.data_dir / URL_FILE, self.url + "\n")

    def _run(self, binary: Path, port: int, lock: int) -> None:
        config = self.data_dir / "nats-server.conf"
        _write_private(config, self._config(port))
        for stale in self.data_dir.glob("*.ports"):
            stale.unlink(missing_ok=True)
        self._process = _spawn([str(binary), "-c", str(config)], lock)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        pause_s = 0.005
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                break
            found = self._port_of(self._process.pid)
            if found and _answers(found):
                self.port = found
                return
            time.sleep(pause_s)
            pause_s = min(0.05, pause_s * 1.5)
        ended = self._process.poll()
        self.kill()
        how = f"did not start in {START_TIMEOUT_S:g} s" if ended is None else f"ended at once (exit code {ended})"
        raise EmbeddedServerError(f"nats-server {how}; its log {self.data_dir / 'nats-server.log'} ends:\n{self._log_end()}")

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _lock(self) -> int:
        descriptor = os.open(self.data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except OSError:
                if time.monotonic() < deadline_s:
                    time.sleep(0.01)
                    continue
                os.close(descriptor)
                raise EmbeddedServerError(
                    f"{self.data_dir} is in use by a running nats-server (its url is in {self.data_dir / URL_FILE})"
                ) from None

    def _read_credential(self) -> None:
        if self._password:
            return
        try:
            parts = urlsplit((self.data_dir / URL_FILE).read_text().strip())
            self._password, self.port = parts.password or "", parts.port or 0
        except (FileNotFoundError, ValueError):
            pass
        self._password = self._password or secrets.token_urlsafe(24)

    def _config(self, port: int) -> str:
        sync = "  sync_interval: always\n" if self._sync == "always" else ""
        return (
            "# Written by tangram at each start; holds a credential.\n"
            f"listen: 127.0.0.1:{port}\n"
            "server_name: tangram-embedded\n"
            f"max_payload: {MAX_PAYLOAD_BYTES}\n"
            "max_pending: 64MB\n"
            f"log_file: {json.dumps(str(self.data_dir / 'nats-server.log'))}\n"
            "logfile_size_limit: 16MB\n"
            "logfile_max_num: 3\n"
            f"ports_file_dir: {json.dumps(str(self.data_dir))}\n"
            f"authorization {{ user: {USER}, password: {json.dumps(self._password)} }}\n"
            f"jetstream {{\n  store_dir: {json.dumps(str(self.data_dir))}\n{sync}}}\n"
            "feature_flags { js_ack_fc_v2: false }\n"
            f"{self._extra_config}\n"
        )

    def _port_of(self, pid: int) -> int:
        for path in self.data_dir.glob(f"*_{pid}.ports"):
            try:
                return urlsplit(json.loads(path.read_text())["nats"][0]).port or 0
            except (ValueError, LookupError, OSError):
                return 0  # being written
        return 0

    def _log_end(self) -> str:
        try:
            return "\n".join((self.data_dir / "nats-server.log").read_text(errors="replace").splitlines()[-5:])
        except OSError:
            return "(no log)"


def _spawn(command: list[str], lock: int) -> "subprocess.Popen[bytes]":
    """Starts `command` so that the kernel kills it when we end.

    PR_SET_PDEATHSIG fires when the *thread* that forked ends, so a thread of its own forks and then stays until the server
    is gone: callers may start us from a worker thread that does not live long. A launcher, not preexec_fn, sets it:
    Python code between fork and exec can deadlock in a process with threads.
    """
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *command]
    started: list[subprocess.Popen[bytes] | OSError] = []
    ready = threading.Event()

    def keep() -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C is for us: clients have to finish before the broker goes
            )
        except OSError as error:
            started.append(error)
            ready.set()
            return
        started.append(process)
        ready.set()
        process.wait()

    threading.Thread(target=keep, name="nats-server keeper", daemon=True).start()
    ready.wait()
    result = started[0]
    if isinstance(result, OSError):
        raise EmbeddedServerError(f"cannot start {command[0]}: {result}")
    return result


def _write_private(path: Path, text: str) -> None:
    """Replaces `path`; at no moment can anybody but the owner read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False


def _port_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
