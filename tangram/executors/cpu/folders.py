"""The folders of sessions and single actions: `home` to work in and `tmp` beside it."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from msgspec import Struct


class Folder(Struct, frozen=True):
    """A session's or action's own folder; `home` is where paths start and programs run."""

    path: Path

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def tmp(self) -> Path:
        return self.path / "tmp"

    def make(self) -> None:
        """Raises OSError; FileExistsError if it is there already."""
        self.path.mkdir(mode=0o700)
        self.home.mkdir()
        self.tmp.mkdir()

    def remove_if_empty(self) -> bool:
        """The quick way to remove a folder in which nothing was left."""
        try:
            for path in (self.tmp, self.home, self.path):
                path.rmdir()
        except FileNotFoundError:
            return not self.path.exists()
        except OSError:
            return False
        return True


def remove(path: Path) -> bool:
    """Removes a folder with all that is in it; whether nothing is left. Blocking.

    What a program made unwritable or nested deeper than Python's recursion goes is left to `chmod` and `rm`.
    """
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(path)
    if os.path.lexists(path):
        for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):
            subprocess.run([*command, "--", str(path)], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return not os.path.lexists(path)
