"""Which ids of a client were seen, so that what is sent twice runs once. Called by the fold of submissions and cancels."""

from tangram import limits
from tangram import messages as m
from tangram.scheduler.state import Client, State


def client_of(state: State, task: str, message: m.ActionsSubmitted | m.CancelsRequested) -> Client | None:
    """The client's entry, made if it is new; None if it is so old that its ids may have been forgotten.

    The first message of a process that connected later than the one that used the name till now takes the name over.
    """
    key = (task, message.client)
    client = state.clients.get(key)
    if client is None:
        if message.born < state.client_horizon_seq:
            return None
        client = state.clients[key] = Client(born=message.born)
        state.tasks[task] = state.tasks.get(task, 0) + 1
    if message.instance > client.instance:
        client.instance, client.others_below = message.instance, next_n(client)
        state.story.append(f"instance {task}/{message.client} {message.instance}")
    if message.done_below > client.done_below and not is_replaced(client, message):
        _has_read(client, message.done_below)
        client.done_below = message.done_below
        client.cancelled_early = {n for n in client.cancelled_early if n >= message.done_below}
        if message.done_below > client.contiguous:
            client.contiguous = message.done_below
            client.sparse = {n for n in client.sparse if n >= message.done_below}
            _close_gap(client)
    if not client.open:
        state.timers.set(("client", key), state.now_ns + limits.CLIENT_TTL_NS)
    return client


def is_replaced(client: Client, message: m.ActionsSubmitted | m.CancelsRequested) -> bool:
    """Whether this is of a process whose name another uses by now: what it says of its numbers is not about theirs."""
    return 0 < message.instance < client.instance


def forget(state: State, key: tuple[str, str]) -> None:
    """A client without open actions has said nothing for long."""
    forgotten = state.clients.pop(key)
    state.tasks[key[0]] -= 1
    if not state.tasks[key[0]]:
        del state.tasks[key[0]]
    state.client_horizon_seq = max(state.client_horizon_seq, forgotten.born + 1)
    for own in forgotten.keys:
        state.timers.cancel(("key", (*key, own)))


def _has_read(client: Client, below: int) -> None:
    """The present process asks for no lower id of its own any more, so it has their outcomes."""
    first = max(client.done_below, client.others_below)
    if below - first <= len(client.ended):
        for n in range(first, below):
            client.ended.pop(n, None)
    else:
        client.ended = {n: seq for n, seq in client.ended.items() if not first <= n < below}


def see(client: Client, n: int) -> None:
    if n == client.contiguous:
        client.contiguous += 1
        _close_gap(client)
    else:
        client.sparse.add(n)


def _close_gap(client: Client) -> None:
    while client.contiguous in client.sparse:
        client.sparse.remove(client.contiguous)
        client.contiguous += 1


def has_seen(client: Client, n: int) -> bool:
    return n < client.contiguous or n in client.sparse


def next_n(client: Client) -> int:
    """The lowest number above all that were seen: where a producer that comes back under its name goes on."""
    return max(client.contiguous, client.done_below, max(client.sparse, default=-1) + 1)
