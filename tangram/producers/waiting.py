"""From the outcome in the log to the Result that a caller awaits."""

import asyncio
import time
from collections.abc import Callable, Generator

from tangram import messages as m
from tangram.producers.result import Result


class Waiting:
    """The future outcome of one action: await it for its Result. If whoever awaits it is cancelled, so is the action."""

    __slots__ = ("_cancel", "_future", "_id", "_since_s", "fetch", "orphan")

    def __init__(self, action_id: str, since_s: float, cancel: Callable[[], None]) -> None:
        """since_s: when it was asked for, on the monotonic clock. `cancel` is called if whoever awaits it is cancelled."""
        self._id, self._since_s, self._cancel = action_id, since_s, cancel
        self.orphan: Callable[[m.Result], None] | None = None
        """Called with the outcome if nobody waits for it any more."""
        self.fetch: Fetch | None = None
        """Called for an output that is a blob: it has to call `settle` again with the output itself, or `fail`."""
        self._future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        """task/client/n: under it `Client.result` finds the outcome, in this process and in a later one of the same name."""
        return self._id

    def cancel(self) -> None:
        """Asks for the end of the action. It still has one outcome, which may be another if it had ended already."""
        self._cancel()

    def settle(self, result: m.Result, output: m.Output, executor: str) -> None:
        if self._future.done():
            if self.orphan is not None:
                self.orphan(result)
            return
        if output.blob and self.fetch is not None:
            self.fetch(self, result, output, executor)
            return
        queued_s, startup_s, run_s = result.queued_ns / 1e9, result.startup_ns / 1e9, result.run_ns / 1e9
        # What was run before this call asked for it took longer than the call.
        act_s = max(time.monotonic() - self._since_s, queued_s + startup_s + run_s)
        owner = self._id.rpartition("/")[0]
        self._future.set_result(
            Result(
                id=f"{owner}/{result.same_as}" if result.same_as else self._id,
                outcome=result.outcome,
                reason=result.reason,
                detail=result.detail,
                exit_code=result.exit_code,
                stdout=output.stdout,
                stderr=output.stderr,
                stdout_bytes=output.stdout_bytes,
                stderr_bytes=output.stderr_bytes,
                data=output.data,
                units=result.units,
                executor=executor,
                attempt=result.attempt,
                queued_s=queued_s,
                startup_s=startup_s,
                run_s=run_s,
                overhead_s=max(0.0, act_s - queued_s - startup_s - run_s),
                act_s=act_s,
                cpu_s=result.cpu_ns / 1e9,
                memory_peak_bytes=result.memory_peak_bytes,
                retry_after_s=result.retry_after_ms / 1e3,
            )
        )

    def fail(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # whoever awaits it sees it; nobody has to

    def __await__(self) -> Generator[object, None, Result]:
        try:
            return (yield from self._future.__await__())
        except asyncio.CancelledError:
            self._cancel()
            raise


Fetch = Callable[[Waiting, m.Result, m.Output, str], None]
