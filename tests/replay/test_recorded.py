"""Logs that were recorded by this and earlier versions are read for ever, and decided as then."""

import asyncio
import platform
from pathlib import Path

import pytest

from tangram.cli.replay import verified
from tangram.replay import verdict
from tangram.replay.logfile import LogFile
from tangram.replay.sources import FileSource
from tangram.scheduler.state import BEHAVIOUR
from tests.replay.record import FOLDER

FILES = sorted(FOLDER.glob("*.log"))


def test_this_behaviour_is_recorded() -> None:
    missing = {"chaos", "demo"} - {path.stem.rpartition("-")[2] for path in FILES if f"behaviour-{BEHAVIOUR}-" in path.name}
    assert not missing, "the behaviour has risen: record it by `python -m tests.replay.record`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_log_verifies(path: Path) -> None:
    report = asyncio.run(verified(FileSource(path)))
    assert report.others == {}
    assert report.windows > 20
    python = LogFile(path).header.python_version
    if python.split(".")[:2] == platform.python_version().split(".")[:2]:  # what is promised
        assert report.ok, (
            f"{verdict.text(report)}\nIf it is meant, raise BEHAVIOUR and record it by `python -m tests.replay.record`"
        )
