"""Durable consumers: made and deleted by the leader (whoever may create one may also write: roles only pull from theirs)."""

from typing import Any, Final

from tangram.broker.connection import Broker
from tangram.broker.errors import ApiError

_CONSUMER_NOT_FOUND: Final = 10014


async def ensure_consumer(
    broker: Broker,
    stream: str,
    name: str,
    *,
    filter_subjects: list[str],
    start_seq: int,
    ack_wait_s: float = 2.0,
    max_ack_pending: int = 100_000,
    inactive_threshold_s: float,
) -> bool:
    """Makes the durable pull consumer `name` if there is none; True if it was made.

    An existing one keeps its place: its filters and times are brought up to date. One that starts after `start_seq`
    would miss messages and is made anew. Raises ApiError, BrokerUnavailable, BrokerTimeout.
    """
    config: dict[str, Any] = {
        "name": name,
        "durable_name": name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": start_seq,
        "ack_policy": "explicit",
        "ack_wait": int(ack_wait_s * 1e9),
        "max_ack_pending": max_ack_pending,
        "max_deliver": -1,
        "replay_policy": "instant",
        "inactive_threshold": int(inactive_threshold_s * 1e9),
        "filter_subjects": filter_subjects,
    }
    try:
        actual = (await broker.api(f"CONSUMER.INFO.{stream}.{name}"))["config"]
    except ApiError as error:
        if error.code != _CONSUMER_NOT_FOUND:
            raise
        actual = None
    if actual is not None:
        filters = actual.get("filter_subjects") or [actual.get("filter_subject", "")]
        compared = {key: value for key, value in config.items() if key not in ("filter_subjects", "opt_start_seq")}
        if actual.get("opt_start_seq", 1) > start_seq or actual.get("ack_policy") != "explicit":
            await delete_consumer(broker, stream, name)
        elif sorted(filters) == sorted(filter_subjects) and all(actual.get(key) == value for key, value in compared.items()):
            return False
        else:
            config["opt_start_seq"] = actual["opt_start_seq"]
            await broker.api(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config, "action": "update"})
            return False
    await broker.api(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config, "action": ""})
    return True


async def read_up_to(broker: Broker, stream: str, name: str, head_seq: int) -> int:
    """The sequence up to which the consumer's reader has acknowledged all that is for it; `head_seq` if nothing is left for it
    up to the stream's end, or if there is no such consumer. Raises ApiError, BrokerUnavailable, BrokerTimeout."""
    try:
        info = await broker.api(f"CONSUMER.INFO.{stream}.{name}")
    except ApiError as error:
        if error.code != _CONSUMER_NOT_FOUND:
            raise
        return head_seq
    if not info["num_pending"] and not info["num_ack_pending"]:
        return head_seq
    return int(info["ack_floor"]["stream_seq"])


async def delete_consumer(broker: Broker, stream: str, name: str) -> bool:
    """Deletes the consumer; False if there was none. Raises ApiError, BrokerUnavailable, BrokerTimeout."""
    try:
        await broker.api(f"CONSUMER.DELETE.{stream}.{name}")
    except ApiError as error:
        if error.code != _CONSUMER_NOT_FOUND:
            raise
        return False
    return True


async def consumer_exists(broker: Broker, stream: str, name: str, *, timeout_s: float = 1.0) -> bool:
    """Raises ApiError (no such stream), BrokerUnavailable (also while a cluster chooses who leads it), BrokerTimeout."""
    try:
        await broker.api(f"CONSUMER.INFO.{stream}.{name}", timeout_s=timeout_s)
    except ApiError as error:
        if error.code != _CONSUMER_NOT_FOUND:
            raise
        return False
    return True
