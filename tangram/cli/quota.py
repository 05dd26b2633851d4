"""`tangram quota`: what is limited outside and how much of it is in use; and its limits, changed while all goes on."""

import argparse
import json
import re
from typing import TYPE_CHECKING, Any

from tangram import messages as m
from tangram import roles, subjects
from tangram.cli import common
from tangram.errors import ConfigError
from tangram.rules import HOST_RESOURCES

if TYPE_CHECKING:
    from tangram.broker import Broker
    from tangram.scheduler.state import State

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

CONTROL_S = 10.0


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("quota", help="show quotas, or change them at once")
    common.add_nats(command)
    command.add_argument(
        "changes",
        nargs="*",
        metavar="NAME=RULES",
        help=f"{common.QUOTA_RULES}; NAME=none: no limit. Without any, they are shown",
    )
    command.add_argument("--json", action="store_true")
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    return roles.run_loop(_run(given, parsed(given.changes)))


def parsed(texts: list[str]) -> m.Control:
    """Raises ConfigError."""
    quotas: dict[str, m.Quota] = {}
    without: list[str] = []
    for text in texts:
        name, is_there, rules = text.partition("=")
        if not is_there or re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) is None or name in HOST_RESOURCES:
            raise ConfigError(f"{text}: must be NAME=RULES, of a quota")
        if name in quotas or name in without:
            raise ConfigError(f"{text}: {name} stands there twice")
        if rules == "none":
            without.append(name)
        else:
            quotas[name] = common.quota(text, rules)
    return m.Control(quotas=quotas, without=without)


async def _run(given: argparse.Namespace, control: m.Control) -> int:
    from tangram.broker import Broker
    from tangram.cli.status import read_state
    from tangram.config import broker_url

    broker = await Broker.connect(broker_url(given.nats), name="tangram quota")
    try:
        if control.quotas or control.without:
            await change(broker, control)
        found = summary(await read_state(broker))
    finally:
        await broker.close()
    print(json.dumps({"quotas": found}) if given.json else text_of(found))
    return 0


async def change(broker: "Broker", control: m.Control) -> None:
    """Returns when it is in the log. Raises ConfigError if it cannot be, BrokerError if nobody answers."""
    data = await broker.request(subjects.CONTROL, m.encode(control), timeout_s=CONTROL_S)
    if error := m.decode_controlled(data).error:
        raise ConfigError(error)


def summary(state: "State") -> dict[str, dict[str, Any]]:
    """By name: the limits, what is in use, and the share of the limits that refusals have left."""
    return {
        name: {
            "concurrency": pool.limit.concurrency,
            "requests": pool.limit.requests,
            "burst": pool.limit.burst,
            "tokens": pool.limit.tokens,
            "interval_s": pool.limit.interval_ms / 1e3,
            "in_use": pool.in_use,
            "requests_out": len(pool.taken),
            "tokens_out": pool.out,
            "share": pool.share_at(state.now_ns) / 1e6,
        }
        for name, pool in sorted(state.quotas.items())
    }


def text_of(found: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, each in found.items():
        interval = f"in {each['interval_s']:g} s"
        rules = [f"{each['in_use']} of {each['concurrency']} at a time" if each["concurrency"] else f"{each['in_use']} in use"]
        if each["burst"]:
            rules.append(f"{each['requests']} requests {interval}, from a bucket of {each['burst']}")
        elif each["requests"]:
            rules.append(f"{each['requests_out']} of {each['requests']} requests {interval}")
        if each["tokens"]:
            rules.append(f"{each['tokens_out']} of {each['tokens']} tokens {interval}")
        if not each["concurrency"] and not each["requests"] and not each["tokens"]:
            rules.append("no limit")
        if each["share"] < 1:
            rules.append(f"{each['share']:.0%} of that, since it was refused")
        lines.append(f"{name}: {'; '.join(rules)}")
    return "\n".join(lines) or "there is no quota"
