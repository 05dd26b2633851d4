"""Where things are: the broker's url, the folders for state."""

import os
from pathlib import Path

DEFAULT_URL = "nats://127.0.0.1:4222"


def home() -> Path:
    """$TANGRAM_HOME, else ~/.tangram: the embedded broker's data, locks and sandboxes."""
    return Path(os.environ.get("TANGRAM_HOME") or Path.home() / ".tangram")


def broker_url(url: str | None = None) -> str:
    """`url`, else $TANGRAM_NATS, else what a broker started by `tangram up` has left for this user, else the default."""
    if url:
        return url
    from_environment = os.environ.get("TANGRAM_NATS")
    if from_environment:
        return from_environment
    try:
        return (home() / "broker" / "broker.url").read_text().strip()
    except OSError:
        return DEFAULT_URL
