"""The back end of api executors: each action is one request to a declared endpoint.

When it may start is the scheduler's to say, which owns the quotas. Here it is only said what came of it:

| what happened | what is said |
|---|---|
| 2xx | ok, with what was really taken |
| 429, 503 with Retry-After | given back: refused for so long, the quotas shrink |
| no connection | given back: never sent |
| 5xx, a connection that breaks, of an idempotent call | given back: failed, another attempt if there is one |
| the same of any other call, or no answer in time | `lost`: it may have arrived (5xx: `error`, upstream) |
| no answer in time of an idempotent call | `timed_out` |
| other 4xx | `failed`, with the answer |
| an answer that is too long | `output_limit` |
| a redirect to another host, an answer that is none | `error`, upstream |
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final
from urllib.parse import quote

import anyio
import anyio.lowlevel
import httpx
from msgspec.structs import replace

from tangram import limits
from tangram import messages as m
from tangram.executors.api.answer import is_refusal, retry_after_ms, spent
from tangram.executors.api.declared import Endpoint
from tangram.executors.api.request import BadCall, Prepared, prepare
from tangram.executors.attempt import error, invalid
from tangram.executors.backend import ActionKey, Ended, Grant, NoModels, NoPrograms, SessionKey
from tangram.outcomes import ErrorReason, Outcome

REDIRECTS_MAX: Final = 5
CONNECT_S: Final = 10.0
KEPT_S: Final = 2.0
"""Idle connections: less than servers do, so that none is closed under a request that must not be sent twice."""
_HIDDEN: Final = "[secret]"
_SECRET_LENGTH_MIN: Final = 6
"""What is shorter is in many an answer by chance."""

for _name in ("httpx", "httpcore"):  # they log URLs, in which a secret may stand
    logging.getLogger(_name).setLevel(logging.WARNING)


class ApiBackend(NoPrograms, NoModels):
    name = "api"

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self.unkillable: set[ActionKey] = set()
        self._endpoints = dict(endpoints)
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=KEPT_S),
            trust_env=False,  # no proxy and no password that happens to stand in the environment
            # What an answer sets for one task must not be sent for another.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )
        self._calls: dict[ActionKey, asyncio.Task[Ended]] = {}

    async def begin(self) -> None:
        """Nobody is called before there is something to ask; but what the first call would have to load is loaded: it would be on
        its way for so long that the next ones come with it."""
        await anyio.lowlevel.checkpoint()

    def services(self) -> dict[str, m.Service]:
        return {name: m.Service(cost=endpoint.cost) for name, endpoint in self._endpoints.items()}

    async def call(self, key: ActionKey, attempt: int, nonce: bytes, payload: m.Call, endpoint: str, *, timeout_ms: int) -> Ended:
        """Asks an endpoint; `output.data` is a Response."""
        declared = self._endpoints.get(endpoint)
        if declared is None:
            return invalid(f"service: no endpoint {endpoint!r} is declared here")
        if attempt > 1 and not declared.is_idempotent:
            return Ended(outcome=Outcome.LOST, detail="an attempt whose executor was lost may have reached the endpoint")
        try:
            prepared = prepare(declared, payload, f"{key.task}-{key.client}-{key.n}-{nonce.hex()}")
        except BadCall as why:
            return invalid(str(why))
        began_ns = time.monotonic_ns()
        task = self._calls[key] = asyncio.create_task(self._within(declared, prepared, timeout_ms))
        try:
            await asyncio.wait([task])
            ended = Ended(outcome=Outcome.CANCELLED) if task.cancelled() else task.result()
        finally:
            task.cancel()
            del self._calls[key]
        return _timed(ended, time.monotonic_ns() - began_ns)

    def kill(self, key: ActionKey) -> None:
        task = self._calls.get(key)
        if task is not None:
            task.cancel()

    async def _within(self, endpoint: Endpoint, prepared: Prepared, timeout_ms: int) -> Ended:
        try:
            async with asyncio.timeout(timeout_ms / 1e3):
                return await self._ask(endpoint, prepared)
        except TimeoutError:
            if endpoint.is_idempotent:
                return Ended(outcome=Outcome.TIMED_OUT, detail=f"no answer within {timeout_ms} ms")
            return Ended(outcome=Outcome.LOST, detail=f"no answer within {timeout_ms} ms: it may have been done")
        except (httpx.ConnectError, httpx.ConnectTimeout) as why:
            return Ended(outcome=Outcome.ERROR, not_begun=True, detail=_told(endpoint, "cannot be reached", why))
        except httpx.TransportError as why:
            return _broken(endpoint, _told(endpoint, "the connection broke", why))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, ValueError) as why:
            return error(ErrorReason.UPSTREAM, _told(endpoint, "no answer that can be read", why))

    async def _ask(self, endpoint: Endpoint, prepared: Prepared) -> Ended:
        request = self._http.build_request(endpoint.method, prepared.url, headers=prepared.headers, content=prepared.body or None)
        origin = _origin(request.url)
        for _ in range(REDIRECTS_MAX + 1):
            response = await self._http.send(request, stream=True, follow_redirects=False)
            try:
                if response.next_request is None:
                    return await self._answered(endpoint, response)
                request = response.next_request
            finally:
                await response.aclose()
            if _origin(request.url) != origin:
                return error(ErrorReason.UPSTREAM, "it redirects to another host")
        return error(ErrorReason.UPSTREAM, f"more than {REDIRECTS_MAX} redirects")

    async def _answered(self, endpoint: Endpoint, response: httpx.Response) -> Ended:
        status = response.status_code
        chunks: list[bytes] = []
        size = 0
        async for chunk in response.aiter_bytes():  # of a refusal, too: the connection is of use after that
            size += len(chunk)
            if size > endpoint.response_bytes:
                break
            chunks.append(chunk)
        if is_refusal(status, response.headers):
            after_ms = retry_after_ms(response.headers, endpoint.retry_after_s, time.time())
            return Ended(outcome=Outcome.ERROR, not_begun=True, retry_after_ms=after_ms, detail=f"HTTP {status}")
        if status >= 500:
            if endpoint.is_idempotent:
                return Ended(outcome=Outcome.ERROR, failed=True, detail=f"HTTP {status}")
            return error(ErrorReason.UPSTREAM, f"HTTP {status}")
        if size > endpoint.response_bytes:
            return Ended(outcome=Outcome.OUTPUT_LIMIT, detail=f"the answer is longer than {endpoint.response_bytes} bytes")
        body = b"".join(chunks)
        taken = spent(endpoint.spent, response.headers, body) if endpoint.spent else {}
        for secret in endpoint.secrets:  # an endpoint that shows what it was sent would tell it to whoever asked
            for shown in {secret, quote(secret, safe="")} if len(secret) >= _SECRET_LENGTH_MIN else ():
                body = body.replace(shown.encode(), _HIDDEN.encode())
        content_type = response.headers.get("content-type", "")[: limits.DETAIL_LENGTH_MAX]
        answer = m.Response(status=status, content_type=content_type, body=body)
        outcome, detail = Outcome.OK, ""
        if not 200 <= status < 300:
            outcome, detail = Outcome.FAILED, f"HTTP {status}"
        return Ended(outcome=outcome, detail=detail, output=m.Output(data=m.encode(answer)), spent=taken)

    # --- what it does not do -----------------------------------------------------------------------------------

    async def open(self, key: SessionKey, payload: m.SessionOpen, grant: Grant) -> Ended:
        return invalid("this executor calls endpoints: it has no sessions")

    async def close(self, key: SessionKey) -> Ended:
        return Ended(outcome=Outcome.OK)

    async def stop(self) -> None:
        tasks: Sequence[asyncio.Task[Ended]] = list(self._calls.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()


def _broken(endpoint: Endpoint, detail: str) -> Ended:
    if endpoint.is_idempotent:
        return Ended(outcome=Outcome.ERROR, failed=True, detail=detail)
    return Ended(outcome=Outcome.LOST, detail=f"{detail}: it may have been done")


def _told(endpoint: Endpoint, what: str, why: Exception) -> str:
    text = f"{what}: {type(why).__name__}: {why}"
    for secret in endpoint.secrets:
        text = text.replace(secret, _HIDDEN)
    return text[: limits.DETAIL_LENGTH_MAX]


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _timed(ended: Ended, run_ns: int) -> Ended:
    return ended if ended.not_begun else replace(ended, run_ns=run_ns)
