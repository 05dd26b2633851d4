"""The folders of sessions and single actions: `home` to work in and `tmp` beside it."""

import contextlib
import os
import shutil
import stat
from collections.abc import Callable
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
    """Removes a folder with all that is in it, also what was made unwritable; whether nothing is left. Blocking."""

    def unlock(function: Callable[..., object], name: str, _: object) -> None:
        with contextlib.suppress(OSError):
            for place in (os.path.dirname(name), name):
                if stat.S_ISDIR(os.lstat(place).st_mode):
                    os.chmod(place, 0o700)
        with contextlib.suppress(OSError):
            if function in (os.unlink, os.rmdir):
                function(name)
            else:
                shutil.rmtree(name, ignore_errors=True)

    if os.path.lexists(path):
        shutil.rmtree(path, onerror=unlock)
        shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)
