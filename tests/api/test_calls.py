"""Calls through a real executor: broker, scheduler, HTTP to a provider that does what it is told."""

import asyncio
import json
import time
from email.utils import formatdate
from pathlib import Path

import msgspec
import pytest

import tangram
from tangram.local import LocalStack
from tangram.loopback import Answer
from tangram.outcomes import Outcome
from tests.api.conftest import SECRET
from tests.api.provider import Provider
from tests.e2e.conftest import fold, whole_log

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_arguments_fill_the_url_and_its_query_and_the_answer_is_parsed(client: tangram.Client) -> None:
    page = await client.call("search", {"index": "a/b c", "q": "x&key=stolen", "limit": 3, "all": True, "tag": ["p", "q"]})
    assert page["path"] == "/search/a/b c"
    assert page["query"] == {"q": "x&key=stolen", "key": "[secret]", "limit": "3", "all": "true", "tag": "q"}


async def test_a_body_is_json_of_the_arguments_or_what_is_given(client: tangram.Client) -> None:
    asked = await client.call("post", {"n": [1, {"a": None}]})
    assert (asked["type"], json.loads(asked["body"])) == ("application/json", {"n": [1, {"a": None}]})
    asked = await client.call("post", {"q": 1}, body="<x/>", content_type="text/xml")
    assert (asked["type"], asked["body"], asked["query"]) == ("text/xml", "<x/>", {"q": "1"})


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (Answer(200, b'{"a": 1}', "application/problem+json; charset=utf-8"), {"a": 1}),
        (Answer(201, b"{nonsense", "application/json"), "{nonsense"),
        (Answer(200, "gr\u00fcn".encode(), "text/plain"), "gr\u00fcn"),
        (Answer(200, b"\xff\x00", ""), b"\xff\x00"),
        (Answer(204, b"", ""), ""),
    ],
)
async def test_what_the_caller_gets(client: tangram.Client, provider: Provider, answer: Answer, content: object) -> None:
    provider.answers["/small"] = [answer]
    assert await client.call("small") == content


async def test_a_secret_is_in_no_message_and_no_log(
    stack: LocalStack, client: tangram.Client, provider: Provider, logs: list[Path]
) -> None:
    asked = await client.call("search", {"index": "i", "q": "x"})
    assert provider.requests[-1].headers["authorization"] == f"Bearer {SECRET}", "the provider gets it"
    assert asked["authorization"] == "Bearer [secret]", "and whoever asks does not, though the endpoint shows it"
    provider.answers["/search/i"] = ["break", "break", "break"]
    await client.called("search", {"index": "i", "q": "x"})
    assert not any(SECRET.encode() in record.data for record in await whole_log(stack.url))
    assert logs
    assert not any(SECRET in path.read_text() for path in logs)


async def test_what_one_answer_sets_is_not_sent_with_the_next(client: tangram.Client) -> None:
    for _ in range(2):
        assert (await client.call("search", {"index": "i", "q": "x"}))["cookie"] == ""


# --- errors by kind ----------------------------------------------------------------------------------------------


async def test_a_client_s_error_is_an_answer(client: tangram.Client, provider: Provider) -> None:
    provider.answers["/small"] = [Answer(404, b'{"detail": "no such page"}')]
    with pytest.raises(tangram.CallError, match="HTTP 404") as caught:
        await client.call("small")
    result = caught.value.result
    assert (result.outcome, result.is_verdict) == (Outcome.FAILED, True)
    assert result.response is not None
    assert (result.response.status, result.response.content) == (404, {"detail": "no such page"})


@pytest.mark.parametrize("failure", [Answer(500), Answer(503), "break"])
async def test_what_may_be_sent_again_is_and_what_may_not_is_not(
    client: tangram.Client, provider: Provider, failure: Answer | str
) -> None:
    provider.answers["/keyed"] = [failure, failure]
    asked = await client.called("keyed", {"a": 1})
    assert (asked.outcome, asked.attempt) == (Outcome.OK, 3)
    keys = [each.headers["idempotency-key"] for each in provider.requests]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    provider.reset()
    provider.answers["/keyed"] = [failure] * 5
    failed = await client.called("keyed")
    assert (failed.outcome, failed.reason, len(provider.requests)) == (Outcome.ERROR, "upstream", 3)
    assert provider.requests[-1].headers["idempotency-key"] not in keys
    for options, path in (({"retry": "never"}, "keyed"), ({}, "post")):
        provider.reset()
        provider.answers[f"/{path}"] = [failure]
        once = await client.called(path, **options)  # type: ignore[arg-type]
        assert len(provider.requests) == 1
        lost = failure == "break" and path == "post"
        assert once.outcome is (Outcome.LOST if lost else Outcome.ERROR)
        assert not once.is_verdict


async def test_a_time_out_is_unknown_unless_the_call_may_be_repeated(client: tangram.Client, provider: Provider) -> None:
    for name, outcome in (("keyed", Outcome.TIMED_OUT), ("post", Outcome.LOST)):
        provider.answers[f"/{name}"] = ["wait"]
        result = await client.called(name, timeout=0.2)
        assert result.outcome is outcome
        assert result.run_s < 2


async def test_nobody_there(client: tangram.Client) -> None:
    """It is tried again as long as its caller would wait."""
    result = await client.called("nowhere", deadline=2.5)
    assert (result.outcome, result.run_s) == (Outcome.EXPIRED, 0)


@pytest.mark.parametrize("what", [Answer(200, bytes(1_001)), "gzip"])
async def test_an_answer_that_is_too_long_is_not_read(client: tangram.Client, provider: Provider, what: Answer | str) -> None:
    provider.answers["/small"] = [what]
    result = await client.called("small")
    assert (result.outcome, result.response) == (Outcome.OUTPUT_LIMIT, None)


async def test_redirects_stay_at_the_host(client: tangram.Client, provider: Provider) -> None:
    provider.answers["/small"] = [Answer(302, headers={"location": "/elsewhere?a=1"})]
    assert (await client.call("small"))["path"] == "/elsewhere"
    for away in ("http://localhost:1/", "https://127.0.0.1/", "//evil/", provider.url.replace("http", "ftp")):
        provider.answers["/small"] = [Answer(302, headers={"location": away})]
        result = await client.called("small")
        assert (result.outcome, result.reason) == (Outcome.ERROR, "upstream"), away
    provider.answers["/small"] = [Answer(307, headers={"location": "/small"})] * 9
    result = await client.called("small")
    assert (result.outcome, "redirects" in result.detail) == (Outcome.ERROR, True)


@pytest.mark.parametrize(
    ("endpoint", "arguments", "options", "words"),
    [
        ("search", {"q": "x"}, {}, "arguments.index"),
        ("search", {"q": "x", "index": ".."}, {}, ". or .."),
        ("search", {"q": "x", "index": "../../etc"}, {}, ". or .."),
        ("search", {"q": {"a": 1}, "index": "i"}, {}, "arguments.q"),
        ("post", {"x": msgspec.msgpack.Ext(1, b"")}, {}, "arguments: cannot be JSON"),
        ("search", {"q": "x", "index": "i"}, {"body": "b"}, "body: a GET has none"),
        ("unheard", {}, {}, "no executor serves unheard"),
    ],
)
async def test_what_cannot_be_sent_is_rejected_and_nobody_is_asked(
    client: tangram.Client,
    provider: Provider,
    endpoint: str,
    arguments: dict[str, object],
    options: dict[str, str],
    words: str,
) -> None:
    result = await client.called(endpoint, arguments, **options)  # type: ignore[arg-type]
    assert result.outcome is Outcome.REJECTED
    assert words in result.detail
    assert not provider.requests


async def test_a_call_that_is_cancelled_ends(client: tangram.Client, provider: Provider) -> None:
    provider.answers["/small"] = ["wait"]
    waiting = asyncio.create_task(client.called("small"))
    await provider.count("/small", 1)
    waiting.cancel()
    assert (await client.result(client._ledger.next_n - 1)).outcome is Outcome.CANCELLED


async def test_one_failure_among_many_costs_itself(client: tangram.Client, provider: Provider) -> None:
    provider.answers["/small"] = [Answer(404)]
    results = await asyncio.gather(*(client.called("small") for _ in range(20)))
    assert sorted(result.outcome for result in results) == ["failed", *["ok"] * 19]


# --- quotas ------------------------------------------------------------------------------------------------------


async def test_a_refusal_is_decided_again_with_its_attempt_unused(client: tangram.Client, provider: Provider) -> None:
    dated = {"retry-after": formatdate(time.time() + 1, usegmt=True)}
    for refusal in (Answer(429), Answer(429, headers={"retry-after": "0"}), Answer(503, headers=dated)):
        provider.answers["/search/i"] = [refusal]
        result = await client.called("search", {"index": "i", "q": "x"})
        assert (result.outcome, result.attempt) == (Outcome.OK, 1)
    assert len(provider.requests) == 6


async def test_refusals_are_bounded(client: tangram.Client, provider: Provider) -> None:
    provider.answers["/search/i"] = [Answer(429)] * 50
    result = await client.called("search", {"index": "i", "q": "x"})
    assert (result.outcome, result.reason, result.retry_after_s) == (Outcome.REJECTED, "over_limit", 0.1)
    assert len(provider.requests) == 20


async def test_an_endpoint_takes_of_its_quota_whatever_the_caller_says(client: tangram.Client, provider: Provider) -> None:
    provider.answers["/single"] = ["wait"] * 5
    calls = [asyncio.create_task(client.call("single")) for _ in range(5)]
    await provider.count("/single", 1)
    provider.gate.set()
    await asyncio.gather(*calls)
    assert provider.most["/single"] == 1


async def test_what_was_really_taken_is_counted(stack: LocalStack, client: tangram.Client, provider: Provider) -> None:
    before = fold(await whole_log(stack.url)).quotas["budget"].out
    provider.answers["/post"] = [Answer(200, b'{"usage": {"total": 17}}')]
    await client.call("post")
    await client.call("post", quotas={"budget": 5})
    assert fold(await whole_log(stack.url)).quotas["budget"].out == before + 17 + 5


async def test_a_blocking_caller(stack: LocalStack, provider: Provider) -> None:
    def ask() -> object:
        with tangram.Client.blocking(stack.url, task="b") as client:
            assert client.called("small").ok
            return client.call("small")["path"]

    assert await asyncio.to_thread(ask) == "/small"
