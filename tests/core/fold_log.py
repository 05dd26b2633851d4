"""`python -m tests.core.fold_log FILE` folds a recorded log and prints, for each record, the digest of the state after it and a
hash of what a leader would write then. Run under any PYTHONHASHSEED it prints the same."""

import hashlib
import sys
from pathlib import Path

import msgspec

from tangram import messages as m
from tangram.scheduler.compose import compose
from tangram.scheduler.fold import Record, step
from tangram.scheduler.state import State
from tangram.scheduler.window import plan


def save(log: list[Record], path: Path) -> None:
    path.write_bytes(msgspec.msgpack.encode(log))


def load(path: Path) -> list[Record]:
    return msgspec.msgpack.decode(path.read_bytes(), type=list[Record])


def lines(log: list[Record]) -> list[str]:
    state = State()
    found = []
    for record in log:
        step(state, record)
        written = hashlib.blake2b(digest_size=8)
        for subject, message in compose(state, plan(state), lambda _: b""):
            written.update(subject.encode() + m.encode(message))
        found.append(f"{record.seq} {state.digest.hex()} {written.hexdigest()}")
    return found


if __name__ == "__main__":
    print("\n".join(lines(load(Path(sys.argv[1])))))
