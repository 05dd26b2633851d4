"""What a caller gets back."""

from typing import Any

import msgspec
from msgspec import Struct

from tangram import messages as m
from tangram.outcomes import Outcome


class Response(Struct, frozen=True, kw_only=True):
    """What an endpoint has answered. status: of HTTP. body: bytes as they were sent, decompressed."""

    status: int
    content_type: str = ""
    body: bytes = b""

    @property
    def content(self) -> Any:
        """The body: parsed if it says that it is JSON and is, a text if it is one, else the bytes."""
        kind = self.content_type.partition(";")[0].strip().lower()
        if kind == "application/json" or kind.endswith("+json"):
            try:
                return msgspec.json.decode(self.body)
            except m.MALFORMED:
                pass
        try:
            return self.body.decode()
        except UnicodeDecodeError:
            return self.body


class Result(Struct, frozen=True, kw_only=True):
    """How an action ended. All times are in seconds.

    queued_s: until it was decided. startup_s, run_s: measured by the executor. overhead_s: the rest of act_s, which is the
    action completion time (ACT) as this client saw it, from the call to the result. cpu_s: processor time, 0 if unknown.
    stdout, stderr: bytes as written; of a longer stream head and tail are kept, and stdout_bytes and stderr_bytes say how
    long it was. data: a file's content. exit_code: None where no program ended; -N if signal N ended it. id: task/client/n of
    what was run; of what shares the outcome of an earlier action of the same key, that action's.
    """

    id: str
    outcome: Outcome
    reason: str = ""
    detail: str = ""
    exit_code: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    data: bytes = b""
    units: int = 0
    executor: str = ""
    attempt: int = 1
    queued_s: float = 0.0
    startup_s: float = 0.0
    run_s: float = 0.0
    overhead_s: float = 0.0
    act_s: float = 0.0
    cpu_s: float = 0.0
    memory_peak_bytes: int = 0
    retry_after_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def is_verdict(self) -> bool:
        """Whether a trainer may use the outcome as a signal; if not, the step is to be masked."""
        return self.outcome.is_verdict

    @property
    def response(self) -> "Response | None":
        """What an endpoint has answered to a call; None if it has not, or if this was none."""
        if self.exit_code is not None or not self.data:
            return None
        try:
            found = m.decode_response(self.data)
        except m.MALFORMED:
            return None
        return Response(status=found.status, content_type=found.content_type, body=found.body)

    @property
    def core_seconds(self) -> float:
        """Cores that were held for it, times how long."""
        return self.units * (self.startup_s + self.run_s)

    @property
    def text(self) -> str:
        """stdout as text; bytes that are no UTF-8 are shown as \\xNN."""
        return self.stdout.decode("utf-8", "backslashreplace")

    def __str__(self) -> str:
        words = [self.outcome.value]
        if self.reason:
            words.append(f"({self.reason})")
        if self.exit_code is not None:
            words.append(f"exit code {self.exit_code}")
        if self.detail:
            words.append(f"- {self.detail}")
        return " ".join(words)
