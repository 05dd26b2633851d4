"""What a sandbox's container may do: the one place where its isolation is decided.

`strict` is for one program without a session: a read-only root, an unprivileged user, small file systems in memory.
`workspace` is for sessions on the images of tasks: the image's own user and a writable layer. All else is the same.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

from msgspec import Struct

LABEL_INCARNATION: Final = "tangram.incarnation"
LABEL_SESSION: Final = "tangram.session"
LABEL_ACTION: Final = "tangram.action"
STRICT_UID: Final = 10001
HOME: Final = "/workspace"
"""Where programs run and paths start, unless the image says otherwise."""
IDLE_SCRIPT: Final = "while :; do sleep 2147483; case $? in 126|127) exit 1;; esac; done"
"""The main process: waits, reaps orphans, and as process 1 cannot be killed by the programs beside it (`kill -9 -1`)."""


class DockerConfig(Struct, frozen=True, kw_only=True):
    """How this back end makes containers.

    image: for one-shot programs, and for sessions that name none. memory_mib: the limit where a grant names none.
    creates_max: containers that are made or removed at the same time, because engines stall under many. create_s: for
    making one, with the wait for its turn. runtime: of the engine ("runsc"); "" is its default. cgroups: whether limits
    are written to the containers' control groups: None where that is possible, False never (`docker update` instead).
    """

    image: str = ""
    memory_mib: int = 1024
    pids_max: int = 256
    tmp_mib: int = 64
    workspace_mib: int = 64
    inodes_max: int = 16_384
    shm_mib: int = 16
    file_mib_max: int = 4096
    files_open_max: int = 1024
    runtime: str = ""
    cgroup_parent: str = ""
    creates_max: int = 4
    create_s: float = 120.0
    cgroups: bool | None = None


@cache
def seccomp() -> str:
    """Our own profile: an engine's own is as old as the engine."""
    return files(__package__).joinpath("seccomp.json").read_text()


def container(
    config: DockerConfig, image: str, labels: Mapping[str, str], *, strict: bool, memory_mib: int, home: str
) -> dict[str, Any]:
    """The body of a create call."""
    memory = (memory_mib or config.memory_mib) << 20
    limits: dict[str, Any] = {
        "NetworkMode": "none",
        "IpcMode": "private",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges", f"seccomp={seccomp()}"],
        "PidsLimit": config.pids_max,
        "Memory": memory,
        "MemorySwap": memory,
        "ShmSize": min(config.shm_mib << 20, memory),
        "LogConfig": {"Type": "none", "Config": {}},
        "Ulimits": [
            _ulimit("nofile", config.files_open_max),
            _ulimit("core", 0),
            _ulimit("fsize", config.file_mib_max << 20),
        ],
        "RestartPolicy": {"Name": "no"},
        "Privileged": False,
    }
    if config.runtime:
        limits["Runtime"] = config.runtime
    if config.cgroup_parent:
        limits["CgroupParent"] = config.cgroup_parent
    body = {
        "Image": image,
        "Hostname": "box",
        "Entrypoint": ["/bin/sh", "-c", IDLE_SCRIPT],
        "Cmd": [],
        "WorkingDir": home,
        "Labels": dict(labels),
        "StopTimeout": 1,
        "Healthcheck": {"Test": ["NONE"]},
        "NetworkDisabled": True,
        "HostConfig": limits,
    }
    if strict:
        body["User"] = f"{STRICT_UID}:{STRICT_UID}"
        limits["ReadonlyRootfs"] = True
        limits["Tmpfs"] = {
            "/tmp": _tmpfs(config.tmp_mib, config.inodes_max, "mode=1777"),
            HOME: _tmpfs(config.workspace_mib, config.inodes_max, f"uid={STRICT_UID},gid={STRICT_UID},mode=0700"),
        }
    return body


def _ulimit(name: str, value: int) -> dict[str, Any]:
    return {"Name": name, "Soft": value, "Hard": value}


def _tmpfs(mib: int, inodes: int, more: str) -> str:
    # Without nr_inodes, empty files eat the container's memory. Programs may be run from it: compilers put them there.
    return f"rw,nosuid,nodev,exec,size={mib}m,nr_inodes={inodes},{more}"
