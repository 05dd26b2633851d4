"""What a look at /proc shows while processes come and go."""

import os
import signal
import subprocess
import sys

from tangram.executors.cpu.procs import clear_now, scan

DAEMON = """
import os, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
time.sleep(60)
"""


def test_a_daemon_is_seen_though_its_parents_end_during_the_look() -> None:
    """A look just then finds the parent dead and has listed no child yet. One look in four was fooled by that."""
    for n in range(40):
        mark = f"TANGRAM_TEST=procs-{os.getpid()}-{n}"
        name, _, value = mark.partition("=")
        started = subprocess.run([sys.executable, "-ISc", DAEMON], env={**os.environ, name: value}, check=True)
        assert started.returncode == 0
        found = scan(set()).find([mark.encode()], {})
        for one in found:
            os.kill(one.pid, signal.SIGKILL)
        assert clear_now([mark.encode()], {}, 5)
        assert found, f"look {n} saw nothing"
