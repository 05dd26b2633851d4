"""What a program gets, and what is told of it."""

import asyncio
import os
import time

from tangram import limits
from tangram.executors.backend import Grant
from tangram.outcomes import Outcome, RejectReason

from .conftest import CORES, Lab


async def test_exit_codes_and_streams(lab: Lab) -> None:
    async with lab.session() as session:
        ended = await lab.sh("echo out; echo err >&2; exit 3", session=session)
        assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, 3)
        assert (ended.output.stdout, ended.output.stderr) == (b"out\n", b"err\n")
        assert ended.startup_ns > 0
        assert ended.run_ns > 0
        ended = await lab.run("true", session=session)
        assert (ended.outcome, ended.exit_code) == (Outcome.OK, 0)
        ended = await lab.run("no-such-program", session=session)
        assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, 127)
        assert b"no-such-program" in ended.output.stderr
        ended = await lab.sh("pwd", session=session, cwd="no/such")
        assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, 126)


async def test_one_shot_is_strict(local: Lab) -> None:
    ended = await local.sh("id -u; touch /etc/x /usr/bin/x /x; echo ok >/tmp/a; echo ok >b; cat /tmp/a b; pwd")
    assert ended.output.stdout == b"10001\nok\nok\n/workspace\n"
    assert ended.output.stderr.count(b"Read-only file system") == 3
    await local.backend.settled()
    assert await local.containers() == []


async def test_session_keeps_its_files_and_environment(local: Lab) -> None:
    async with local.session(env={"A": "session", "B": "session"}) as session:
        await local.sh("echo 1 >f; echo 2 >/etc/f", session=session)
        ended = await local.sh(
            'cat f /etc/f; echo "$A $B $C $TANGRAM_UNITS $OMP_NUM_THREADS $TANGRAM_SESSION"',
            session=session,
            env={"B": "action"},
            more_env={"C": "service"},
        )
        assert ended.output.stdout.decode() == f"1\n2\nsession action service 1 1 {session}\n"
        hidden = await local.sh("env", session=session)
        assert b"PYTEST" not in hidden.output.stdout
        assert b"HOSTNAME=box" in hidden.output.stdout


async def test_stdin_arrives_whole(lab: Lab) -> None:
    data = b"line\n" * 200_000
    async with lab.session() as session:
        ended = await lab.run("sha256sum", session=session, stdin=data)
        import hashlib

        assert ended.output.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
        assert (await lab.sh("read a; cat; echo $a", session=session, stdin=b"1\n2\n")).output.stdout == b"2\n1\n"


async def test_unread_stdin_hides_no_exit_code(local: Lab) -> None:
    async with local.session() as session:
        for _ in range(10):
            group = [local.sh("echo gone >&2; exit 3", session=session, stdin=b"x" * 1_000_000) for _ in range(5)]
            for ended in await asyncio.gather(*group):
                assert (ended.outcome, ended.exit_code, ended.output.stderr) == (Outcome.FAILED, 3, b"gone\n")


async def test_output_is_whole_or_head_and_tail(lab: Lab) -> None:
    async with lab.session() as session:
        for size in (65_536, limits.OUTPUT_BYTES_MAX, 5_000_000):
            ended = await lab.python(f"import sys; sys.stdout.buffer.write(b'a' + b'b' * {size - 2} + b'c')", session=session)
            assert ended.output.stdout_bytes == size
            assert len(ended.output.stdout) == min(size, limits.OUTPUT_BYTES_MAX)
            assert ended.output.stdout[:1] + ended.output.stdout[-1:] == b"ac"


async def test_output_arrives_live(local: Lab) -> None:
    seen: list[tuple[str, bytes]] = []
    async with local.session() as session:
        running = local.sh("echo one; sleep 1; echo two >&2", session=session, on_output=lambda *each: seen.append(each))
        await asyncio.sleep(0.6)
        assert seen == [("stdout", b"one\n")]
        await running
        assert seen[1:] == [("stderr", b"two\n")]


async def test_closed_streams_are_no_end(lab: Lab) -> None:
    async with lab.session() as session:
        ended = await lab.sh("echo 1; exec >&- 2>&-; sleep 1; exit 4", session=session)
        assert (ended.outcome, ended.exit_code, ended.output.stdout) == (Outcome.FAILED, 4, b"1\n")
        assert ended.run_ns > 900_000_000
        ended = await lab.sh("exec >&- 2>&-; sleep 97", session=session, timeout_ms=500)
        assert ended.outcome is Outcome.TIMED_OUT


async def test_refused_before_anything_is_made(local: Lab) -> None:
    ended = await local.run("true", env={"LD_PRELOAD": "x"})
    assert (ended.outcome, ended.reason) == (Outcome.REJECTED, RejectReason.INVALID)
    _, ended = await local.open(env={"LD_AUDIT": "x"})
    assert ended.outcome is Outcome.REJECTED
    assert await local.containers() == []


async def test_cores_as_granted_and_changing(lab: Lab) -> None:
    async with lab.session() as session:
        for count in (1, len(CORES), 1):
            cores = tuple(CORES[-count:])
            script = "import os; print(len(os.sched_getaffinity(0)), os.environ['TANGRAM_UNITS'])"
            ended = await lab.python(script, session=session, grant=Grant(cores=cores, millicores=1000 * count))
            assert ended.output.stdout.decode() == f"{count} {count}\n", ended
            assert (
                await lab.sh(
                    "nproc", session=session, grant=Grant(cores=cores, millicores=1000 * count), env={"OMP_NUM_THREADS": ""}
                )
            ).output.stdout.decode() == f"{count}\n"


async def test_a_fraction_of_a_core(lab: Lab) -> None:
    script = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    async with lab.session() as session:
        ended = await lab.python(script, session=session, grant=Grant(cores=(CORES[0],), millicores=200))
        assert float(ended.output.stdout) < 0.4, ended
        # How much it then gets depends on who else uses this machine; what it may have does not.
        show = "cd /sys/fs/cgroup; cat cpu.max 2>/dev/null || cat cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us"
        quota, period = (await lab.sh(show, session=session)).output.stdout.split()
        assert quota in (b"max", b"-1") or int(quota) >= int(period)


async def test_overlapping_actions_do_not_slow_each_other(lab: Lab) -> None:
    async with lab.session() as session:
        began = time.monotonic()
        running = []
        for delay in (0.1, 0.2, 0.05, 0.3, 0.1, 0.0, 0.2, 0.0):
            # Some begin just when the last of the others ends, after which the session would rest.
            running.append(lab.python("for _ in range(1_000_000): pass", session=session))
            await asyncio.sleep(delay)
        assert not [(each.outcome, each.detail) for each in await asyncio.gather(*running) if each.outcome is not Outcome.OK]
        assert time.monotonic() - began < 6


async def test_no_session(local: Lab) -> None:
    from tangram.executors.backend import SessionKey

    nowhere = SessionKey("task", "client", 10_000)
    ended = await local.run("true", session=nowhere)
    assert (ended.outcome, ended.session_lost) == (Outcome.ENVIRONMENT_LOST, True)
    assert (await local.write(nowhere, "a", b"")).outcome is Outcome.ENVIRONMENT_LOST
    assert (await local.backend.close(nowhere)).outcome is Outcome.OK


async def test_container_removed_behind_our_back(lab: Lab) -> None:
    key, _ = await lab.open()
    running = lab.sh("sleep 30", session=key)
    await asyncio.sleep(0.5)
    (container,) = await lab.containers()
    await lab.engine.call("DELETE", f"/containers/{container}", {"force": "1"})
    ended = await running
    assert (ended.outcome, ended.session_lost) == (Outcome.ENVIRONMENT_LOST, True)
    for each in (await lab.run("true", session=key), await lab.write(key, "a", b""), await lab.read(key, "a")):
        assert each.outcome is Outcome.ENVIRONMENT_LOST, each
    assert (await lab.backend.close(key)).outcome is Outcome.OK


async def test_large_input_and_more_output_when_asked_for(lab: Lab) -> None:
    data = os.urandom(20_000_000)
    ended = await lab.sh("cat; head -c 1000000 /dev/zero >&2", stdin=data, output_max=20_000_000, timeout_ms=60_000)
    assert (ended.outcome, ended.output.stdout == data, ended.output.stderr) == (Outcome.OK, True, bytes(1_000_000))


async def test_a_large_input_to_programs_that_fail_at_once(lab: Lab) -> None:
    async with lab.session() as session:
        running = [lab.sh(f"echo real {n} >&2; exit 3", stdin=bytes(1_000_000), session=session) for n in range(8)]
        for n, ended in enumerate(await asyncio.gather(*running)):
            assert (ended.outcome, ended.exit_code, ended.output.stderr) == (Outcome.FAILED, 3, b"real %d\n" % n)
