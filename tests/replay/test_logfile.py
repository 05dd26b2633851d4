"""A log in a file: what is read is what was written, and whatever is wrong with a file is said."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tangram import messages as m
from tangram.errors import ConfigError, UnreadableLog
from tangram.replay.logfile import LogFile, LogWriter
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import State
from tests.replay.synthetic import busy_log

LOG = busy_log(400)
MIDDLE = 700
"""Messages before the checkpoint of a file that has one."""


def folded(log: list[Record], state: State | None = None) -> State:
    state = State() if state is None else state
    for record in log:
        step(state, record)
    return state


def written(path: Path, log: list[Record] = LOG, state: State | None = None) -> Path:
    with LogWriter(path, state) as writer:
        if state is not None:
            writer.payloads(m.CheckpointPayloads(ids=[("t", "c", 1)], payloads=[b"p"]))
        for record in log:
            writer.message(record)
    return path


def from_checkpoint(path: Path) -> Path:
    return written(path, LOG[MIDDLE:], folded(LOG[:MIDDLE]))


def test_a_whole_log_comes_back(tmp_path: Path) -> None:
    file = LogFile(written(tmp_path / "log"))
    assert file.state() is None
    assert list(file.records()) == LOG
    assert list(file.records()) == LOG, "again"
    assert (tmp_path / "log").stat().st_size < sum(len(record.data) for record in LOG)


def test_a_log_with_a_checkpoint_folds_on_to_the_same_state(tmp_path: Path) -> None:
    file = LogFile(from_checkpoint(tmp_path / "log"))
    state = file.state()
    assert state is not None
    assert [part.payloads for part in file.payloads()] == [[b"p"]]
    assert folded(list(file.records()), state).digest == folded(LOG).digest


def test_an_unwritten_file_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before")
    with pytest.raises(TypeError), LogWriter(path, None) as writer:
        writer.message(LOG[0]._replace(data=object()))  # type: ignore[arg-type]
    assert [each.name for each in tmp_path.iterdir()] == ["log"]
    assert path.read_text() == "before"
    with pytest.raises(ConfigError, match="No such file"):
        LogWriter(tmp_path / "no" / "log", None)


def repacked(raw: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A file whose records were changed, and packed again in order."""
    line, _, packed = raw.partition(b"\n")
    return line + b"\n" + zlib.compress(change(zlib.decompress(packed)))


def records(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = 4 + int.from_bytes(data[:4], "big")
        found.append(data[:size])
        data = data[size:]
    return found


def without(index: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        found = records(data)
        del found[index]
        return b"".join(found)

    return change


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "is empty"),
    "foreign": (lambda _: b"\x1f\x8b\x08 some other archive\n", "is no log of"),
    "newer": (lambda raw: raw.replace(b'{"tangram_log":1', b'{"tangram_log":2', 1), "has format 2, this version reads 1"),
    "first line": (lambda raw: raw.replace(b'"digest"', b'"digest', 1), "first line is damaged"),
    "cut off": (lambda raw: raw[: len(raw) // 2], "cut off behind message"),
    "cut off at once": (lambda raw: raw[: raw.index(b"\n") + 1], "checkpoint that it starts from is missing"),
    "a bit": (lambda raw: raw[:-4000] + bytes([raw[-4000] ^ 16]) + raw[-3999:], "damaged|checksum|cut off|missing|order"),
    "no end": (lambda raw: repacked(raw, without(-1)), "cut off behind message"),
    "a message less": (lambda raw: repacked(raw, without(-30)), "messages [0-9]+ to [0-9]+ are missing"),
    "the last one less": (lambda raw: repacked(raw, without(-2)), "checksum is wrong"),
    "no state": (lambda raw: repacked(raw, without(0)), "checkpoint that it starts from is missing"),
    "another state": (lambda raw: raw.replace(b'"checkpoint_seq":7', b'"checkpoint_seq":6', 1), "another one than"),
    "changed": (lambda raw: repacked(raw, lambda data: data.replace(b"coding", b"cuding", 1)), "checksum is wrong|another one"),
    "a giant": (lambda raw: repacked(raw, lambda data: data[:-60] + b"\xff" * 60), "damaged|cut off"),
    "more behind": (lambda raw: raw + b"more", "something follows its end"),
}


def read(path: Path) -> None:
    file = LogFile(path)
    file.state()
    list(file.payloads())
    list(file.records())


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, damage: str) -> None:
    change, says = DAMAGES[damage]
    path = from_checkpoint(tmp_path / "log")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UnreadableLog, match=says) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("damage", ["cut off", "no end", "a message less", "the last one less", "more behind"])
def test_of_a_damaged_file_what_can_be_read_is_read(tmp_path: Path, damage: str) -> None:
    change, says = DAMAGES[damage]
    path = from_checkpoint(tmp_path / "log")
    path.write_bytes(change(path.read_bytes()))
    file = LogFile(path, partial=True)
    state = file.state()
    assert state is not None
    readable = list(file.records())
    assert readable == LOG[MIDDLE : MIDDLE + len(readable)]
    assert len(readable) > 100
    with pytest.raises(UnreadableLog, match=says):
        raise UnreadableLog("", file.problem)


def test_every_place_at_which_a_file_is_cut_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "log", LOG[:60])
    whole = path.read_bytes()
    for size in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(UnreadableLog):
            list(LogFile(path).records())


def test_the_first_line_tells_people_what_it_is(tmp_path: Path) -> None:
    with from_checkpoint(tmp_path / "log").open("rb") as file:
        head = json.loads(file.readline())
    assert (head["tangram_log"], head["checkpoint_seq"], head["without_payloads"]) == (1, MIDDLE, False)
