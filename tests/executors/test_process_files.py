"""Files go in whole and come out only from inside the session."""

import os
import stat
from pathlib import Path

import pytest

from tangram.outcomes import ErrorReason, Outcome
from tests.executors.conftest import Lab

OUTSIDE = ["/etc/passwd", "../secret", "a/../../secret", "..", "/", "link", "linked/passwd", "loop"]


async def test_a_file_comes_back_as_it_was(lab: Lab) -> None:
    async with lab.session() as session:
        for path, data, mode in (("f", b"", 0o644), ("deep/er/f", b"\x00\xff\n" * 1000, 0o600), ("x", b"#!", 0o755)):
            assert (await lab.write(session, path, data, mode)).outcome is Outcome.OK
            ended = await lab.read(session, path, size_max=len(data))
            assert (ended.outcome, ended.output.data) == (Outcome.OK, data)
            assert stat.S_IMODE((lab.home(session) / path).stat().st_mode) == mode
        absolute = str(lab.home(session) / "deep/other")
        assert (await lab.write(session, absolute, b"1")).outcome is Outcome.OK
        assert (await lab.read(session, "deep/other")).output.data == b"1"
        assert sorted(path.name for path in (lab.home(session) / "deep").rglob("*")) == ["er", "f", "other"]


async def test_a_write_replaces_whole_files(lab: Lab) -> None:
    async with lab.session() as session:
        await lab.write(session, "f", b"a long first content")
        opened = os.open(lab.home(session) / "f", os.O_RDONLY)
        await lab.write(session, "f", b"short")
        assert os.read(opened, 100) == b"a long first content"
        os.close(opened)
        assert (await lab.read(session, "f")).output.data == b"short"


@pytest.mark.parametrize("path", OUTSIDE)
async def test_what_is_outside_is_refused(lab: Lab, tmp_path: Path, path: str) -> None:
    secret = tmp_path / "passwd"
    secret.write_bytes(b"secret")
    async with lab.session() as session:
        home = lab.home(session)
        (home / "link").symlink_to(secret)
        (home / "linked").symlink_to(tmp_path)
        (home / "loop").symlink_to("loop")
        (home / "a").mkdir()
        ended = await lab.read(session, path)
        assert ended.outcome is Outcome.FAILED
        assert ended.detail
        ended = await lab.write(session, path, b"changed")
        if path not in ("link", "loop"):
            assert ended.outcome is Outcome.FAILED
    assert secret.read_bytes() == b"secret"


async def test_a_link_that_stays_inside_is_followed(lab: Lab) -> None:
    async with lab.session() as session:
        await lab.write(session, "real/f", b"data")
        (lab.home(session) / "link").symlink_to("real")
        assert (await lab.read(session, "link/f")).output.data == b"data"
        assert (await lab.write(session, "link/g", b"more")).outcome is Outcome.OK
        assert (await lab.read(session, "real/g")).output.data == b"more"


async def test_only_regular_files_are_read_and_none_hangs(lab: Lab) -> None:
    async with lab.session() as session:
        home = lab.home(session)
        os.mkfifo(home / "fifo")
        (home / "folder").mkdir()
        (home / "environ").symlink_to("/proc/self/environ")
        if os.geteuid() == 0:
            os.mknod(home / "zero", stat.S_IFCHR | 0o600, os.makedev(1, 5))
        for name in ("fifo", "folder", "environ", "zero", "missing", "folder/", "f" * 256):
            assert (await lab.read(session, name)).outcome is Outcome.FAILED
        for name in ("folder", "fifo/f", "f" * 256, "folder/"):
            assert (await lab.write(session, name, b"")).outcome is Outcome.FAILED


async def test_a_file_that_is_too_large_says_its_size(lab: Lab) -> None:
    async with lab.session() as session:
        await lab.write(session, "f", b"12345")
        assert (await lab.read(session, "f", size_max=4)).detail == "too large: 5 bytes"
        await lab.sh("truncate -s 5G sparse", session=session)
        assert "too large" in (await lab.read(session, "sparse")).detail


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small disk")
async def test_a_full_disk_is_an_error_and_leaves_no_half_file(lab: Lab) -> None:
    async with lab.session() as session:
        small = lab.home(session) / "small"
        small.mkdir()
        if (await lab.sh(f"mount -t tmpfs -o size=64k none {small}")).exit_code:
            pytest.skip("may not mount")
        try:
            await lab.write(session, "small/f", b"before")
            ended = await lab.write(session, "small/f", b"x" * 300_000)
            assert (ended.outcome, ended.reason) == (Outcome.ERROR, ErrorReason.DISK)
            assert (await lab.read(session, "small/f")).output.data == b"before"
            assert [path.name for path in small.iterdir()] == ["f"]
        finally:
            assert (await lab.sh(f"umount {small}")).exit_code == 0
