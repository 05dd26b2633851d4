"""What was decided, in words. Pure."""

from collections.abc import Sequence
from itertools import pairwise

from tangram import messages as m


def told(what: m.Item | m.Result) -> str:
    match what:
        case m.Start():
            return _start(what)
        case m.Result():
            return " ".join(filter(None, (str(what.outcome), what.reason, what.detail)))
        case m.EndSession():
            return f"end the session: {what.reason}"
        case m.Cancel():
            return "cancel"
        case _:
            return type(what).__name__.lower()


def _start(start: m.Start) -> str:
    parts = []
    if start.gpus:
        parts.append(f"{count(len(start.gpus), 'GPU')} {ranges(start.gpus)}")
    if start.cores:
        millicores = start.amounts.get("cpu", 0)
        part = f"{millicores} millicores of core" if 0 < millicores < 1_000 else count(len(start.cores), "core")
        parts.append(f"{part} {ranges(start.cores)}")
    parts += [f"{amount} {name}" for name, amount in start.amounts.items() if name not in ("cpu", "gpu")]
    if start.service:
        parts.append(f"with {start.service}")
    text = ", ".join(parts) or "start, on no units"
    return f"{text} (attempt {start.attempt}, predicted {start.predicted_us / 1e6:.3f} s)"


def count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def ranges(numbers: Sequence[int]) -> str:
    """ "0-3,8" of rising numbers."""
    begins = [numbers[0], *(after for before, after in pairwise(numbers) if after != before + 1)] if numbers else []
    ends = [*(before for before, after in pairwise(numbers) if after != before + 1), numbers[-1]] if numbers else []
    return ",".join(str(begin) if begin == end else f"{begin}-{end}" for begin, end in zip(begins, ends, strict=True))


def amount(name: str, low: int, high: int = 0) -> str:
    """ "2 cores", "1 to 8 GPUs", "512 memory": of a resource, as a cost names it."""
    scale = 1_000 if name == "cpu" else 1
    text = f"{low / scale:g}" if high <= low else f"{low / scale:g} to {high / scale:g}"
    unit = {"cpu": "core", "gpu": "GPU"}.get(name)
    return f"{text} {name}" if unit is None else f"{text} {unit}{'' if text == '1' else 's'}"
