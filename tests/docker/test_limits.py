"""What a sandbox keeps programs from."""

from pathlib import Path

import pytest

from tangram.executors.backend import Grant
from tangram.outcomes import Outcome

from .conftest import CORES, IMAGE, Lab, eventually, running

HOG = "b = []\nwhile 1: b.append(b'x' * (8 << 20))"


async def test_memory(lab: Lab) -> None:
    async with lab.session(memory_mib=128) as session:
        ended = await lab.python(HOG, session=session, timeout_ms=60_000)
        assert (ended.outcome, ended.session_lost) == (Outcome.OUT_OF_MEMORY, False), ended
        # Only the kernel's count tells it from a plain SIGKILL.
        ended = await lab.sh("kill -9 $$", session=session)
        assert (ended.outcome, ended.exit_code) in ((Outcome.FAILED, -9), (Outcome.FAILED, 137))
        ended = await lab.sh("exit 137", session=session)
        assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, 137)


async def test_memory_of_a_child(local: Lab) -> None:
    async with local.session(memory_mib=128) as session:
        ended = await local.sh(f'python3 -ISc "{HOG}"; exit 0', session=session, timeout_ms=60_000)
        assert (ended.outcome, ended.exit_code, ended.detail) == (Outcome.OK, 0, "oom_kills=1")


@pytest.mark.skipif(Path("/sys/fs/cgroup/cgroup.controllers").exists(), reason="on cgroup v2 the limit is the session's")
async def test_memory_of_one_action(local: Lab) -> None:
    async with local.session(memory_mib=512) as session:
        grant = Grant(cores=(CORES[0],), millicores=1000, memory_mib=96)
        ended = await local.python(HOG, session=session, grant=grant, timeout_ms=60_000)
        assert ended.outcome is Outcome.OUT_OF_MEMORY, ended
        assert ended.memory_peak_bytes <= 96 << 20


async def test_no_network(local: Lab) -> None:
    script = (
        "import socket\n"
        "for address in (('1.1.1.1', 80), ('169.254.169.254', 80), ('172.17.0.1', 2375)):\n"
        "  try: socket.create_connection(address, 2)\n"
        "  except OSError as error: print(error.errno)\n"
        "print(sorted(name for _, name in socket.if_nameindex()))"
    )
    ended = await local.python(script)
    lines = ended.output.stdout.decode().splitlines()
    assert lines[:3] == ["101"] * 3, ended
    assert "eth0" not in lines[3]


async def test_no_rights(lab: Lab) -> None:
    async with lab.session() as session:
        for where in (session, None):
            ended = await lab.sh("grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status", session=where)
            found = dict(line.split(":\t") for line in ended.output.stdout.decode().splitlines())
            assert found == {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}


async def test_system_calls(local: Lab) -> None:
    script = """
import ctypes, errno, socket, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    return "allowed" if libc.syscall(number, *args) >= 0 else errno.errorcode[ctypes.get_errno()]
numbers = dict(io_uring_setup=425, bpf=321, keyctl=250, perf_event_open=298, userfaultfd=323, unshare=272, mount=165, setns=308)
print({name: call(number, 0, 0, 0, 0, 0) for name, number in numbers.items()})
for family in (40, 38, 17):
    try: socket.socket(family, socket.SOCK_STREAM); print("open", family)
    except OSError as error: print(errno.errorcode[error.errno])
threading.Thread(target=print, args=("thread",)).start()
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout, socket.socketpair()[0].fileno() > 0)
"""
    async with local.session() as session:
        ended = await local.python(script, session=session)
        text = ended.output.stdout.decode()
        assert "allowed" not in text, ended
        assert "open" not in text.replace("perf_event_open", ""), ended
        assert "thread" in text, ended
        assert "child\n True" in text, ended
        ended = await local.sh(
            "mkdir m; mount -t tmpfs x m || unshare -U true || mknod d b 8 0 || chroot / true", session=session
        )
        assert ended.outcome is Outcome.FAILED, ended
        assert (await local.sh("echo 1 >/proc/sys/kernel/sysrq", session=session)).outcome is Outcome.FAILED


async def test_fork_bomb_is_bounded_and_ended(local: Lab) -> None:
    bomb = "import os\nfor _ in range(2000):\n  try: os.fork()\n  except OSError: pass\nwhile 1: pass"
    async with local.session() as session:
        neighbour = await local.open()
        ended = await local.python(bomb, session=session, timeout_ms=1500)
        assert ended.outcome is Outcome.TIMED_OUT
        assert not ended.unkillable
        assert (await local.run("true", session=session)).outcome is Outcome.OK
        assert (await local.run("true", session=neighbour[0])).outcome is Outcome.OK


async def test_fork_bomb_through_the_engine_ends_with_the_container(docker: None) -> None:
    bomb = "import os\nwhile 1:\n  try:\n    os.fork(); os.setsid()\n  except OSError: pass"
    async with running_engine() as lab:
        key, _ = await lab.open()
        ended = await lab.python(bomb, session=key, timeout_ms=500)
        assert ended.outcome is Outcome.TIMED_OUT
        # A busy engine may take longer to end the container than a kill should; the cores are held until it has.
        await eventually(lambda: not lab.backend.unkillable, 60)
        following = await lab.run("true", session=key)
        assert following.outcome is (Outcome.ENVIRONMENT_LOST if ended.session_lost else Outcome.OK)


def running_engine():  # type: ignore[no-untyped-def]
    from tangram.executors.docker import DockerConfig

    return running(DockerConfig(image=IMAGE, cgroups=False))


@pytest.mark.parametrize("place", ["/tmp", "/workspace"])
async def test_disk_full_inside_only(local: Lab, place: str) -> None:
    grant = Grant(cores=(CORES[0],), millicores=1000, memory_mib=256)
    ended = await local.sh(f"head -c 200000000 /dev/zero >{place}/x; wc -c <{place}/x", grant=grant)
    assert b"No space left on device" in ended.output.stderr
    assert int(ended.output.stdout) == 64 << 20
    script = (
        f"import os\nn = 0\ntry:\n  while 1: open('{place}/%d' % n, 'w').close(); n += 1\nexcept OSError as e: print(n, e.errno)"
    )
    ended = await local.python(script, grant=grant)
    made, error = ended.output.stdout.split()
    assert (int(made) < 16_384, int(error)) == (True, 28), ended


async def test_no_trace_of_the_host(local: Lab) -> None:
    ended = await local.sh("ls /var/run/docker.sock /run/containerd 2>&1; hostname; cat /proc/1/environ | tr '\\0' '\\n'")
    text = ended.output.stdout.decode()
    assert "box" in text
    assert text.count("No such file") == 2
    assert "TANGRAM" not in text
