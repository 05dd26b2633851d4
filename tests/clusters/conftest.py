"""Brokers in containers, each with its data on a volume, the other roles on this host.

Skipped without Docker, or without an image of nats-server: TANGRAM_TEST_NATS_IMAGE, else what deploy/nats/make-test-image.sh
makes, else the public one, which testcontainers pulls. With "docker" in TANGRAM_REQUIRE a skip is a failure.
"""

import contextlib
import os
import random
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import pytest

os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")  # its image would have to be pulled; we clean up ourselves

from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

DEPLOY = Path(__file__).parents[2] / "deploy" / "nats"
MADE_HERE, PUBLIC = "tangram-test-nats:latest", "nats:2.15"
PASSWORD = secrets.token_urlsafe(24)


def _image() -> str:
    """Raises DockerException."""
    client = docker.from_env(timeout=60)
    try:
        wanted = os.environ.get("TANGRAM_TEST_NATS_IMAGE", "")
        if not wanted:
            with contextlib.suppress(docker.errors.ImageNotFound):
                client.images.get(MADE_HERE)
                return MADE_HERE
        try:
            client.images.get(wanted or PUBLIC)
        except docker.errors.ImageNotFound:
            client.images.pull(wanted or PUBLIC)
        return wanted or PUBLIC
    finally:
        client.close()


@pytest.fixture(scope="session")
def image() -> str:
    try:
        return _image()
    except docker.errors.DockerException as error:
        missing = (
            f"no engine, or no image of nats-server ({' '.join(str(error).split())[:300]}); see deploy/nats/make-test-image.sh"
        )
    if "docker" in os.environ.get("TANGRAM_REQUIRE", ""):
        pytest.fail(missing)
    pytest.skip(missing)


def free_ports(count: int) -> list[int]:
    """Below those that a kernel gives to connections: what is down for a moment has to find its port free again."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1_000):
        with socket.socket() as each, contextlib.suppress(OSError):
            each.bind(("0.0.0.0", port))
            found.append(port)
        if len(found) == count:
            break
    return found


class Node:
    """A nats-server in a container. What is killed comes back as a new container on the same volume, name and port."""

    def __init__(self, image: str, config: Path, name: str, port: int, network: Network, env: dict[str, str]) -> None:
        self.name, self.port = name, port
        self.volume = f"{network.name}-{name}"
        self._image, self._config, self._network = image, config, network
        self._env = {"TANGRAM_PASSWORD": PASSWORD, "NATS_DATA": "/data", **env}
        self._container: DockerContainer | None = None

    @property
    def url(self) -> str:
        return f"nats://tangram:{PASSWORD}@127.0.0.1:{self.port}"

    def start(self) -> None:
        container = DockerContainer(self._image).with_command("-c /nats.conf").with_envs(**self._env)
        container.with_volume_mapping(str(self._config), "/nats.conf", "ro").with_volume_mapping(self.volume, "/data", "rw")
        container.with_network(self._network).with_network_aliases(self.name).with_bind_ports(4222, self.port)
        self._container = container
        container.start()

    def kill(self) -> None:
        """SIGKILL; the volume stays."""
        container, self._container = self._container, None
        if container is not None:
            with contextlib.suppress(docker.errors.APIError):  # it has ended by itself
                container.get_wrapped_container().kill()
            container.stop(delete_volume=False)

    def pause(self) -> None:
        """It stands still, its connections stay."""
        assert self._container is not None
        self._container.get_wrapped_container().pause()

    def go_on(self) -> None:
        assert self._container is not None
        self._container.get_wrapped_container().unpause()

    def lose_disk(self) -> None:
        client = docker.from_env()
        with contextlib.suppress(docker.errors.NotFound):
            client.volumes.get(self.volume).remove()
        client.close()

    def logs(self) -> str:
        return "" if self._container is None else b"\n".join(self._container.get_logs()).decode(errors="replace")

    def wait(self, timeout_s: float = 30.0) -> None:
        """Until it takes connections."""
        end = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.settimeout(1)
                if connection.recv(5) == b"INFO ":
                    return
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)


@contextlib.contextmanager
def running(nodes: list[Node]) -> Iterator[list[Node]]:
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait()
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.lose_disk()


@pytest.fixture
def network(image: str) -> Iterator[Network]:
    with Network() as made:
        yield made
        made._docker.client.close()


@pytest.fixture
def single(image: str, network: Network) -> Iterator[Node]:
    (port,) = free_ports(1)
    with running([Node(image, DEPLOY / "single-node.conf", "nats-1", port, network, {})]) as (node,):
        yield node


@pytest.fixture
def cluster(image: str, network: Network) -> Iterator[list[Node]]:
    """Three nodes with deploy/nats/cluster.conf."""
    routes = secrets.token_urlsafe(24)
    names = ["nats-1", "nats-2", "nats-3"]
    env = {"NATS_ROUTES_PASSWORD": routes}
    env |= {f"NATS_ROUTE_{n}": f"nats-route://routes:{routes}@{name}:6222" for n, name in enumerate(names, 1)}
    nodes = [
        Node(image, DEPLOY / "cluster.conf", name, port, network, {**env, "NATS_NAME": name})
        for name, port in zip(names, free_ports(3), strict=True)
    ]
    with running(nodes) as up:
        yield up
