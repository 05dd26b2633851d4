"""`python -m tests.replay.speed [ACTIONS]`: how fast a file is verified, and in how much memory. 64 actions a message, 4 hosts of
64 cores."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tangram.bench.scheduler import ENVELOPE, Case, Core
from tangram.replay.logfile import LogWriter

HOSTS, CORES = 4, 64


def write(path: Path, actions: int) -> None:
    core = Core(Case(0, HOSTS, (CORES,)))
    done = 0
    with LogWriter(path, None) as file:
        while done < actions:
            core.submit(4 * ENVELOPE)
            for _, made in list(core.decide()):
                done += core.finish(made)
            for record in core.log:
                file.message(record)
            core.log.clear()


def main() -> None:
    actions = int(sys.argv[1]) if sys.argv[1:] else 200_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.log")
        write(path, actions)
        begin_s = time.perf_counter()
        verify = subprocess.Popen([sys.executable, "-m", "tangram", "replay", "--verify", "--file", str(path)])
        peak_kib = 0
        while verify.poll() is None:
            for line in Path(f"/proc/{verify.pid}/status").read_text().splitlines():
                peak_kib = max(peak_kib, int(line.split()[1])) if line.startswith("VmHWM") else peak_kib
            time.sleep(0.1)
        took_s = time.perf_counter() - begin_s
        print(
            f"{actions} actions in {took_s:.1f} s, start-up included: {actions / took_s:,.0f}/s; peak {peak_kib / 1024:.0f} MiB"
        )


if __name__ == "__main__":
    main()
