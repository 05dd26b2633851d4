from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the gpu extra is not installed")

from tangram.executors.gpu.device import CpuDevice
from tangram.executors.gpu.ledger import Ledger

MIB = 1 << 20


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    found = Ledger(tmp_path / "device", 64 * MIB, "test")
    yield found
    found.close()


@pytest.fixture
def device(ledger: Ledger) -> CpuDevice:
    return CpuDevice(ledger)
