"""Files of sessions."""

import hashlib
import os

import pytest

from tangram.outcomes import Outcome

from .conftest import Lab


async def test_write_and_read(lab: Lab) -> None:
    async with lab.session() as session:
        data = bytes(range(256))
        assert (await lab.write(session, "a/b/c.bin", data, 0o751)).outcome is Outcome.OK
        ended = await lab.read(session, "a/b/c.bin")
        assert (ended.outcome, ended.output.data) == (Outcome.OK, data)
        assert (await lab.read(session, "/workspace/a/b/c.bin")).output.data == data
        ended = await lab.sh("stat -c '%a %u' a a/b/c.bin; wc -c <a/b/c.bin", session=session)
        assert ended.output.stdout == b"755 0\n751 0\n256\n"
        assert (await lab.write(session, "a/b/c.bin", b"")).outcome is Outcome.OK
        assert (await lab.read(session, "a/b/c.bin")).output.data == b""
        assert (await lab.write(session, "/opt/new/x", b"1")).outcome is Outcome.OK
        assert (await lab.read(session, "/opt/new/x")).output.data == b"1"
        assert (await lab.write(session, "/top", b"1")).outcome is Outcome.OK
        assert (await lab.sh("cat /top", session=session)).output.stdout == b"1"


async def test_names(local: Lab) -> None:
    async with local.session() as session:
        for name in ("ü ñ", "-rf", "a\nb", "x" * 255, "*", "d" * 120 + "/" + "e" * 200, "..."):
            assert (await local.write(session, name, b"1")).outcome is Outcome.OK, name
            assert (await local.read(session, name)).output.data == b"1", name


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/", "a/", "/etc/../x", "."])
async def test_refused_paths(local: Lab, path: str) -> None:
    async with local.session() as session:
        for ended in (await local.write(session, path, b""), await local.read(session, path)):
            assert ended.outcome is Outcome.FAILED
            assert "path" in ended.detail


async def test_only_regular_files_are_read(local: Lab) -> None:
    async with local.session() as session:
        script = "ln -s /etc/passwd link; mkfifo fifo; mkdir dir; echo 1 >file; truncate -s 3G sparse; ln -s gone dangling"
        assert (await local.sh(script, session=session)).outcome is Outcome.OK
        for path in ("link", "fifo", "dir", "dangling", "/dev/null", "/dev/zero"):
            ended = await local.read(session, path)
            assert ended.outcome is Outcome.FAILED, path
            assert "path" in ended.detail
        ended = await local.read(session, "sparse")
        assert (ended.outcome, ended.detail) == (Outcome.FAILED, f"too large: {3 << 30} bytes")
        assert (await local.read(session, "none")).detail == "path: no such file"
        assert (await local.read(session, "file", size_max=1)).outcome is Outcome.FAILED
        assert (await local.read(session, "file", size_max=2)).output.data == b"1\n"


async def test_write_follows_no_link(local: Lab) -> None:
    async with local.session() as session:
        await local.sh("ln -s /etc linked; ln -s /etc/hostname link; mkdir dir; mkfifo fifo; echo 1 >file", session=session)
        ended = await local.write(session, "linked/x", b"1")
        assert (ended.outcome, ended.detail) == (Outcome.FAILED, "path: /workspace/linked is not a folder")
        assert (await local.write(session, "file/x", b"1")).outcome is Outcome.FAILED
        assert (await local.write(session, "dir", b"1")).outcome is Outcome.FAILED
        for path in ("link", "fifo"):
            assert (await local.write(session, path, b"new")).outcome is Outcome.OK
            assert (await local.read(session, path)).output.data == b"new"
        assert (await local.sh("ls /etc/x; cat /etc/hostname", session=session)).output.stdout == b"box\n"


async def test_a_file_of_20_mb(lab: Lab) -> None:
    data = os.urandom(20_000_000)
    async with lab.session() as session:
        assert (await lab.write(session, "large", data)).outcome is Outcome.OK
        seen = await lab.sh("sha256sum <large", session=session)
        assert seen.output.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
        ended = await lab.read(session, "large", size_max=len(data))
        assert (ended.outcome, ended.output.data == data) == (Outcome.OK, True)
        assert (await lab.read(session, "large", size_max=len(data) - 1)).outcome is Outcome.FAILED
        assert (await lab.write(session, "large/x", data)).outcome is Outcome.FAILED
