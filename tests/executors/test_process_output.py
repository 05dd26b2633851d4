"""Output is read while the program runs, kept within bounds, counted whole, and never decoded."""

import asyncio
import os
import resource
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram import limits
from tangram.executors.cpu.output import HeadTail, Held, whole_end, whole_start
from tangram.messages import Output
from tangram.outcomes import Outcome
from tests.executors.conftest import PYTHON, Lab

HALF = limits.OUTPUT_BYTES_MAX // 2


def kept(total: int) -> bytes:
    return b"\0" * min(total, limits.OUTPUT_BYTES_MAX)


@pytest.mark.parametrize("size", [65_537, 131_073, 262_145, 5_000_000])
async def test_output_larger_than_a_pipe_does_not_block(lab: Lab, size: int) -> None:
    for streams, script in (
        ("1", "head -c {} /dev/zero"),
        ("2", "head -c {} /dev/zero >&2"),
        ("12", "head -c {} /dev/zero & head -c {} /dev/zero >&2; wait"),
    ):
        ended = await lab.sh(script.format(size, size), timeout_ms=10_000)
        assert ended.outcome is Outcome.OK
        sizes = [size if stream in streams else 0 for stream in "12"]
        assert [ended.output.stdout_bytes, ended.output.stderr_bytes] == sizes
        assert [ended.output.stdout, ended.output.stderr] == [kept(total) for total in sizes]


async def test_bytes_that_are_no_text_are_kept(lab: Lab) -> None:
    ended = await lab.sh(r"printf '\376\000\377'; printf '\200' >&2")
    assert ended.output == Output(stdout=b"\xfe\x00\xff", stderr=b"\x80", stdout_bytes=3, stderr_bytes=1)


async def test_a_character_across_a_chunk_stays_whole(lab: Lab) -> None:
    text = "a" * 65_535 + "é"
    ended = await lab.run(*PYTHON, f"import sys; sys.stdout.buffer.write({text!r}.encode())")
    assert ended.output.stdout.decode() == text


async def test_a_cut_splits_no_character(lab: Lab) -> None:
    script = "import sys; sys.stdout.buffer.write('é€𝄞'.encode()*100_000)"
    ended = await lab.run(*PYTHON, script)
    assert ended.output.stdout_bytes == 900_000
    assert limits.OUTPUT_BYTES_MAX - 8 <= len(ended.output.stdout) <= limits.OUTPUT_BYTES_MAX
    ended.output.stdout.decode()


async def test_what_is_in_the_pipe_when_the_program_ends_is_kept(lab: Lab) -> None:
    ended = await lab.sh("head -c 60000 /dev/zero; sleep 60 & exit 0")
    assert ended.output.stdout_bytes == 60_000


async def test_output_arrives_while_the_program_runs(lab: Lab) -> None:
    chunks: list[tuple[str, bytes]] = []
    arrived = asyncio.Event()

    def receive(stream: str, data: bytes) -> None:
        chunks.append((stream, data))
        arrived.set()

    async with lab.session() as session:
        task = lab.sh("echo first; until [ -e go ]; do sleep 0.01; done; echo last >&2", session=session, on_output=receive)
        await arrived.wait()
        assert chunks == [("stdout", b"first\n")]
        await lab.write(session, "go", b"")
        ended = await task
    assert chunks == [("stdout", b"first\n"), ("stderr", b"last\n")]
    assert (ended.output.stdout, ended.output.stderr) == (b"first\n", b"last\n")


async def test_a_listener_that_fails_does_not_harm_the_action(lab: Lab) -> None:
    def fail(stream: str, data: bytes) -> None:
        raise RuntimeError(stream)

    assert (await lab.sh("echo fine", on_output=fail)).output.stdout == b"fine\n"


async def test_runaway_output_is_ended_in_flat_memory(limited: Lab) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ended = await limited.sh("cat /dev/zero")
    assert ended.outcome is Outcome.OUTPUT_LIMIT
    assert limits.OUTPUT_KILL_BYTES < ended.output.stdout_bytes < limits.OUTPUT_KILL_BYTES + (8 << 20)
    assert len(ended.output.stdout) == limits.OUTPUT_BYTES_MAX
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 16 * 1024


async def test_a_noisy_background_process_does_not_starve_the_executor(lab: Lab) -> None:
    async with lab.session() as session:
        await lab.sh("yes & exit 0", session=session)
        before = time.process_time()
        for _ in range(20):
            await asyncio.sleep(0.02)
        assert time.process_time() - before < 0.2


async def test_input_that_nobody_reads_does_no_harm(lab: Lab) -> None:
    async def one() -> None:
        ended = await lab.sh("exit 3", stdin=b"i" * (1 << 20))
        assert (ended.outcome, ended.exit_code, ended.output.stderr) == (Outcome.FAILED, 3, b"")

    for _ in range(5):
        await asyncio.gather(*(one() for _ in range(10)))


async def test_input_arrives_whole(lab: Lab) -> None:
    data = os.urandom(300_000)
    ended = await lab.sh("cat", stdin=data)
    assert ended.output.stdout_bytes == len(data)
    assert ended.output.stdout == whole_end(data[:HALF]) + whole_start(data[-HALF:])
    assert (await lab.sh("cat; echo $?")).output.stdout == b"0\n"


@given(
    st.lists(st.text().map(str.encode) | st.binary(), max_size=20),
    st.integers(1, 40).map(lambda half: 2 * half),
)
@settings(max_examples=300, deadline=None)
def test_head_and_tail_are_those_of_the_stream(chunks: list[bytes], bytes_max: int) -> None:
    kept = HeadTail(bytes_max, Held())
    for chunk in chunks:
        kept.add(chunk)
    whole = b"".join(chunks)
    assert kept.total == len(whole)
    if len(whole) <= bytes_max:
        assert kept.value() == whole
    else:
        half = bytes_max // 2
        assert kept.value() == whole_end(whole[:half]) + whole_start(whole[len(whole) - half :])


@given(st.lists(st.integers(1, 200_000), max_size=20), st.integers(0, 500_000))
@settings(max_examples=100, deadline=None)
def test_when_all_that_may_be_held_is_in_use_a_stream_keeps_its_usual_share_at_least(sizes: list[int], free: int) -> None:
    held = Held(free)
    kept = HeadTail(limits.OUTPUT_KEPT_BYTES_MAX, held)
    whole = b"".join(bytes([65 + index]) * size for index, size in enumerate(sizes))
    at = 0
    for size in sizes:
        kept.add(whole[at : at + size])
        at += size
    value = kept.value()
    assert held.free >= 0
    assert len(value) >= min(len(whole), limits.OUTPUT_BYTES_MAX)
    assert len(value) <= limits.OUTPUT_BYTES_MAX + free + HALF
    assert whole.startswith(value[:HALF])
    assert whole.endswith(value[HALF:][-HALF:])
    if len(whole) <= limits.OUTPUT_BYTES_MAX + free:
        assert value == whole
    kept.close()
    assert held.free == free


async def test_more_is_kept_when_more_is_asked_for(lab: Lab) -> None:
    script = "head -c 3000000 /dev/urandom | tee copy; head -c 3000001 /dev/zero >&2"
    async with lab.session() as session:
        ended = await lab.sh(script, session=session, output_max=3_000_000)
        assert (await lab.read(session, "copy", 3_000_000)).output.data == ended.output.stdout
    assert (ended.output.stdout_bytes, ended.output.stderr_bytes) == (3_000_000, 3_000_001)
    assert ended.output.stderr == bytes(3_000_000)
    assert (await lab.sh("echo one", output_max=0)).output == Output(stdout_bytes=4)


@given(st.text(), st.integers(0, 200))
@settings(max_examples=300, deadline=None)
def test_cutting_text_gives_text(text: str, at: int) -> None:
    data = text.encode()
    at = min(at, len(data))
    head, tail = whole_end(data[:at]), whole_start(data[at:])
    assert text.startswith(head.decode())
    assert text.endswith(tail.decode())
    assert len(head) > at - 4
    assert len(tail) > len(data) - at - 4
