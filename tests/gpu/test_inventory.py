"""The GPUs of a host by the real bindings, over a test double of the driver's library; and without any."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.executors.gpu.inventory import grouped

pytest.importorskip("pynvml", reason="the gpu extra is not installed")
COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = Path(__file__).with_name("libnvidia_ml.c")
_READ = """
import json, sys
from dataclasses import asdict
from tangram.executors.gpu import inventory
try:
    print(json.dumps([{**asdict(gpu), "links": sorted(gpu.links)} for gpu in inventory.read()]))
except (inventory.NoGpus, inventory.BrokenGpus) as error:
    print(json.dumps({"error": type(error).__name__, "words": str(error)}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler: the double of the driver's library cannot be built")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)], check=True)
    return folder


def read(library: Path | None, **fake: str) -> Any:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
    } | fake
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library)
    done = subprocess.run([sys.executable, "-c", _READ], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has a driver")
def test_without_a_driver_there_are_none_and_the_reason_is_said() -> None:
    assert read(None) == {"error": "NoGpus", "words": "no GPUs, because there is no NVIDIA driver library"}


def test_each_gpu_is_read_with_its_memory_and_node(library: Path) -> None:
    gpus = read(library, FAKE_GPUS="2")
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-fake-0", "GPU-fake-1"]
    assert (gpus[1]["name"], gpus[1]["memory_mib"], gpus[1]["free_mib"], gpus[1]["numa"]) == ("Fake H1", 80 << 10, 20 << 10, 0)


def test_a_driver_that_knows_only_the_older_memory_query_is_asked_that(library: Path) -> None:
    assert read(library, FAKE_GPUS="1", FAKE_OLD_MEMORY="1")[0]["free_mib"] == 40 << 10


def test_linked_gpus_are_made_neighbours(library: Path) -> None:
    gpus = read(library, FAKE_GPUS="4", FAKE_LINKS="0-2,1-3")
    assert [gpu["index"] for gpu in gpus] == [0, 2, 1, 3]
    assert [gpu["links"] for gpu in gpus] == [[1], [0], [3], [2]]


def test_a_gpu_in_slices_is_its_slices(library: Path) -> None:
    gpus = read(library, FAKE_GPUS="2", FAKE_MIG="1")
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-fake-0", "MIG-fake-1-0", "MIG-fake-1-1"]
    assert [gpu["memory_mib"] for gpu in gpus] == [80 << 10, 20 << 10, 20 << 10]
    assert [gpu["is_mig"] for gpu in gpus] == [False, True, True]


@pytest.mark.parametrize(
    ("fake", "error", "words"),
    [
        ({"FAKE_INIT": "9"}, "NoGpus", "the NVIDIA driver is not loaded"),
        ({"FAKE_GPUS": "0"}, "NoGpus", "the driver knows of none"),
        ({"FAKE_INIT": "18"}, "BrokenGpus", "does not work"),
        ({"FAKE_INIT": "4"}, "BrokenGpus", "does not work"),
        ({"FAKE_GPUS": "1", "FAKE_UUID_ERROR": "15"}, "BrokenGpus", "cannot be read"),
        ({"FAKE_GPUS": "1", "FAKE_UUID_ERROR": "16"}, "BrokenGpus", "cannot be read"),
        ({"FAKE_GPUS": "2", "CUDA_VISIBLE_DEVICES": ""}, "NoGpus", "CUDA_VISIBLE_DEVICES"),
    ],
    ids=["not loaded", "none", "mismatch", "no permission", "lost", "reset required", "hidden"],
)
def test_none_and_broken_are_told_apart(fake: dict[str, str], error: str, words: str, library: Path) -> None:
    found = read(library, **fake)
    assert found["error"] == error
    assert words in found["words"]


@pytest.mark.parametrize(
    ("visible", "uuids"), [("1", ["GPU-fake-1"]), ("GPU-fake-2,0", ["GPU-fake-0", "GPU-fake-2"]), ("0,9,1", ["GPU-fake-0"])]
)
def test_hidden_gpus_are_not_offered(visible: str, uuids: list[str], library: Path) -> None:
    gpus = read(library, FAKE_GPUS="3", CUDA_VISIBLE_DEVICES=visible)
    assert [gpu["uuid"] for gpu in gpus] == uuids


@given(st.integers(0, 9).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8))))))
def test_an_order_by_links_has_every_gpu_once(case: tuple[int, set[tuple[int, int]]]) -> None:
    count, links = case
    both = {(a, b) for x, y in links for a, b in ((x, y), (y, x)) if a != b}
    assert sorted(grouped(count, both)) == list(range(count))
    assert grouped(count, set()) == list(range(count))
