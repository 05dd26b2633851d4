"""A recorded log, folded by other processes whose strings hash otherwise, makes the same state and the same decisions."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

from tests.core.chaos import Chaos
from tests.core.fold_log import lines, load, save

ROOT = Path(__file__).parents[2]


def test_a_recorded_log_is_decided_alike_whatever_the_hash_seed(tmp_path: Path) -> None:
    chaos = Chaos(Random(7))
    chaos.run(600, check_every=600)
    chaos.heal()
    path = tmp_path / "log"
    save(chaos.world.log, path)
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.core.fold_log", str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "4000")
    ]
    printed = [run.communicate(timeout=60)[0].splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert printed[0] == printed[1] == lines(load(path))
    assert [line.split(" ")[1] for line in printed[0]] == [digest.hex() for digest in chaos.world.digests]
    assert len({line.split(" ")[2] for line in printed[0]}) > 50, "hardly anything was decided"
