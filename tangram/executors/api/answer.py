"""What an answer says beside its body: when to come again, and what was really taken. Pure: the time is passed in."""

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from tangram import limits
from tangram.messages import MALFORMED


def is_refusal(status: int, headers: Mapping[str, str]) -> bool:
    """429, or 503 that says when to come again (RFC 6585, RFC 9110 section 10.2.3)."""
    return status == 429 or (status == 503 and "retry-after" in headers)


def retry_after_ms(headers: Mapping[str, str], default_s: float, now_s: float) -> int:
    """Of a Retry-After in seconds or as a date; now_s: seconds since the epoch. At least 50, at most REFUSED_MS_MAX."""
    text = headers.get("retry-after", "").strip()
    seconds = default_s
    try:
        seconds = float(text) if text.replace(".", "", 1).isdigit() else parsedate_to_datetime(text).timestamp() - now_s
    except (ValueError, TypeError, OverflowError):
        pass
    if not math.isfinite(seconds):
        seconds = default_s
    return max(50, min(round(seconds * 1e3), limits.REFUSED_MS_MAX))


def spent(where: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> dict[str, int]:
    """By quota, as far as the answer says it in whole numbers."""
    found = {}
    parsed: Any = None
    for quota, path in where.items():
        value: Any
        if path.startswith("header:"):
            text = headers.get(path.removeprefix("header:").strip().lower(), "").strip()
            value = int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else None
        else:
            if parsed is None:
                try:
                    parsed = msgspec.json.decode(body)
                except MALFORMED:
                    parsed = {}
            value = parsed
            for step in path.split("."):
                value = value.get(step) if isinstance(value, dict) else None
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limits.AMOUNT_MAX:
            found[quota] = value
    return found
