"""Bytes and subjects, without a server."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client

from tangram.broker.errors import (
    BrokerError,
    BrokerTimeout,
    BrokerUnavailable,
    Busy,
    MessageTooLarge,
    NotLeader,
    PublishRefused,
    refusal,
)
from tangram.broker.link import without_credentials
from tangram.broker.log import stamp_ns
from tangram.broker.replies import Replies
from tangram.broker.wire import Delivery, PubAck, ack_metadata, header_bytes

V1 = "$JS.ACK.TANGRAM.reader.3.1201.77.1795963746406366128.9"
V2 = "$JS.ACK._.hash1234.TANGRAM.reader.3.1201.77.1795963746406366128.9.token"


@pytest.mark.parametrize("reply", [V1, V2, V2.removesuffix(".token")])
def test_both_forms_of_the_ack_subject_read_the_same(reply: str) -> None:
    assert tuple(ack_metadata(reply)) == (3, 1201, 77, 1795963746406366128, 9)


@pytest.mark.parametrize("reply", ["", "_INBOX.a.b", "$JS.ACK.a.b.c", "$JS.ACK.S.C.1.2.3.4.x", V1 + ".1"])
def test_anything_else_is_refused(reply: str) -> None:
    with pytest.raises(ValueError, match=r"acknowledgement|invalid literal"):
        ack_metadata(reply)


names = st.text("ABCabc-", min_size=1, max_size=20)
values = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=40)


@given(st.dictionaries(names, values, max_size=5))
def test_header_bytes_are_those_that_nats_writes(headers: dict[str, str]) -> None:
    written: list[bytes] = []

    class Recorder(Client):  # the real encoder; only the socket is left out
        async def _send_command(self, cmd: bytes, priority: bool = False) -> None:
            written.append(cmd)

    asyncio.run(Recorder()._send_publish("s", "", b"", 0, dict(headers)))
    control, _, rest = written[0].partition(b"\r\n")
    assert header_bytes(headers) == int(control.split()[2]) == len(rest) - len(b"\r\n")


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T00:00:01.5Z", 1_500_000_000),
        ("2026-11-29T14:49:06.406366128Z", 1795963746406366128),
    ],
)
def test_stamps_are_exact(text: str, ns: int) -> None:
    assert stamp_ns(text) == ns


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, 10071, NotLeader),
        (503, 10077, Busy),
        (400, 10164, Busy),
        (409, 10158, Busy),
        (503, 10008, Busy),
        (500, 10118, Busy),
        (503, 0, Busy),
        (429, 10167, Busy),
        (400, 10054, MessageTooLarge),
        (400, 10060, PublishRefused),
    ],
)
def test_refusals_by_kind(status: int, code: int, kind: type[BrokerError]) -> None:
    assert type(refusal(status, code, "words")) is kind


def test_urls_are_shown_without_their_credential() -> None:
    urls = "nats://user:secret@a:4222,tls://token@b:4222,nats://c:4222,user:secret@d"
    assert without_credentials(urls) == "nats://a:4222,tls://b:4222,nats://c:4222,d"


async def test_answers_find_their_question_and_strays_are_dropped() -> None:
    replies = Replies("in.")
    loop = asyncio.get_running_loop()
    first, second, third = (loop.create_future() for _ in range(3))
    subjects = [replies.expect_ack(future, float(at)) for at, future in enumerate((first, second, third))]
    replies.take(Delivery(subjects[1], b'{"stream":"S","seq":7,"duplicate":true}', None, ""))
    replies.take(Delivery(subjects[1], b'{"stream":"S","seq":8}', None, ""))
    replies.take(Delivery("in.999", b"{}", None, ""))
    assert second.result() == PubAck(7, True)
    replies.expire(1.5, BrokerTimeout("late"))
    assert isinstance(first.exception(), BrokerTimeout)
    assert not third.done()
    replies.fail_all(BrokerTimeout("lost"), BrokerUnavailable("lost"))
    assert isinstance(third.exception(), BrokerTimeout)
    assert replies.acks_outstanding == 0
