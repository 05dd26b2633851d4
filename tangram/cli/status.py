"""`tangram status`: what the log says now, by the scheduler's own fold, and whether a scheduler answers."""

import argparse
import json
from typing import TYPE_CHECKING

from tangram import messages as m
from tangram import roles, subjects
from tangram.cli import common, quota

if TYPE_CHECKING:
    from tangram.broker import Broker
    from tangram.scheduler.state import State

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: "Commands") -> None:
    command = commands.add_parser("status", help="hosts, executors, queue; exit code 1 if no scheduler answers")
    common.add_nats(command)
    command.add_argument("--json", action="store_true")
    command.set_defaults(handler=handle)


def handle(given: argparse.Namespace) -> int:
    return roles.run_loop(_run(given))


async def _run(given: argparse.Namespace) -> int:
    from tangram.broker import Broker
    from tangram.config import broker_url

    broker = await Broker.connect(broker_url(given.nats), name="tangram status")
    try:
        answers = await _scheduler_answers(broker)
        found = summary(await read_state(broker), answers)
    finally:
        await broker.close()
    print(json.dumps(found) if given.json else _text(found))
    return 0 if answers else 1


async def _scheduler_answers(broker: "Broker") -> bool:
    from tangram.broker import BrokerTimeout, BrokerUnavailable

    try:
        await broker.request(subjects.ask("status", "status"), m.encode(m.Ask()), timeout_s=2.0)
    except (BrokerTimeout, BrokerUnavailable):
        return False
    return True


async def read_state(broker: "Broker") -> "State":
    """The state after the last message that is stored now. Raises ApiError if there is no log."""
    from tangram.broker import stream_state
    from tangram.replay.sources import stored_records
    from tangram.scheduler.checkpoints import restore
    from tangram.scheduler.fold import step
    from tangram.scheduler.state import State

    restored = await restore(broker)
    state = State() if restored is None else restored.state
    last_seq = (await stream_state(broker, subjects.STREAM)).last_seq
    async for records in stored_records(broker, state.seq, last_seq):
        for record in records:
            step(state, record)
    return state


def summary(state: "State", answers: bool) -> dict[str, object]:
    phases: dict[str, int] = {}
    for action in state.actions.values():
        name = action.phase.name.lower()
        phases[name] = phases.get(name, 0) + 1
    hosts = [
        {
            "host": host.key.name,
            "cores": host.pool.all.bit_count(),
            "cores_used": host.pool.used.bit_count() + len(host.pool.shared),
            "memory_mib": host.capacity.get("memory", 0),
            "memory_used_mib": host.used.get("memory", 0),
            "sessions": host.sessions,
            "executors": [holder.executor + (" (draining)" if holder.draining else "") for holder in host.live],
        }
        for host in state.hosts.values()
    ]
    lost = [
        {"incarnation": holder.id, "executor": holder.executor, "held": len(holder.grants)}
        for holder in state.incarnations.values()
        if not holder.live
    ]
    return {
        "scheduler_answers": answers,
        "epoch": state.epoch,
        "policy": state.policy,
        "log_seq": state.seq,
        "windows": state.window,
        "actions_finished": state.finished,
        "actions_open": phases,
        "sessions": len(state.sessions),
        "admission_closed": state.admission_closed,
        "hosts": hosts,
        "lost_incarnations": lost,
        "quotas": quota.summary(state),
        "skipped_messages": state.skipped,
    }


def _text(found: dict[str, object]) -> str:
    answers = "answers" if found["scheduler_answers"] else "DOES NOT ANSWER"
    lines = [
        f"scheduler  {answers}; policy {found['policy']}, leading since sequence {found['epoch']}, window {found['windows']}",
        f"log        {found['log_seq']} messages, {found['skipped_messages']} skipped",
        f"finished   {found['actions_finished']} actions",
        f"open       {found['actions_open'] or 'nothing'}; {found['sessions']} sessions",
    ]
    if found["admission_closed"]:
        lines.append("admission  CLOSED: the log is nearly full, new actions are refused")
    hosts = found["hosts"]
    assert isinstance(hosts, list)
    for host in hosts:
        lines.append(
            f"host       {host['host']}: {host['cores_used']}/{host['cores']} cores, "
            f"{host['memory_used_mib']}/{host['memory_mib']} MiB held, {host['sessions']} sessions; "
            f"executors: {', '.join(host['executors']) or 'none'}"
        )
    if not hosts:
        lines.append("host       none: start one with `tangram executor cpu`")
    lost = found["lost_incarnations"]
    assert isinstance(lost, list)
    for each in lost:
        lines.append(f"lost       {each['executor']} ({each['incarnation']}) may still use the units of {each['held']} attempts")
    quotas = found["quotas"]
    assert isinstance(quotas, dict)
    lines += [f"quota      {line}" for line in quota.text_of(quotas).splitlines() if quotas]
    return "\n".join(lines)
