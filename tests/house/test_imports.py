"""Who may import whom, read from the sources: what is pure stays pure, and the parts meet only in the messages.

Importing a module runs its packages' `__init__` first, so those count. Imports inside functions and under
`if TYPE_CHECKING` do not run with the import, so they do not; only the broker's own library is banned there as well.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "tangram"

USE_INSTEAD = {
    "time": "log time (`state.now_ns`), or a time that the caller passes in",
    "datetime": "integer nanoseconds of log time",
    "asyncio": "a plain function; the shell (`service.py`) awaits",
    "threading": "a plain function; the shell owns what runs beside it",
    "socket": "tangram.broker, from a shell",
    "random": "a tie that ends in (sequence, index) or a name",
    "secrets": "a nonce that the caller passes in",
    "logging": "a return value, or a line in `state.story`, that the shell logs",
    "os": "a value that the shell passes in",
    "nats": "tangram.broker, from a shell",
    "docker": "an instruction that the executor's back end performs",
    "torch": "integers, `math`, or the stored model that is part of the state",
    "subprocess": "an instruction that the executor's back end performs",
    "uvloop": "a plain function; tangram.roles starts the loop",
}
IMPURE_SCHEDULER = {
    f"tangram.scheduler.{name}"
    for name in ("service", "answers", "payloads", "checkpoints", "keeper", "recall", "exporter", "questions")
}
PURE = {
    "tangram.messages", "tangram.subjects", "tangram.outcomes", "tangram.limits", "tangram.errors", "tangram.rules",
    "tangram.producers.request", "tangram.producers.pending", "tangram.producers.result",
    "tangram.executors.core", "tangram.executors.backend",
    "tangram.replay.facts", "tangram.replay.reasons", "tangram.replay.collector", "tangram.replay.timeline",
    "tangram.replay.redact", "tangram.replay.planned", "tangram.replay.told", "tangram.replay.verify", "tangram.replay.verdict",
    "tangram.replay.left", "tangram.replay.why", "tangram.replay.recording", "tangram.replay.otherwise",
    "tangram.replay.perfetto", "tangram.replay.taskreport", "tangram.replay.walk",
}  # fmt: skip
PEERS = ("tangram.producers", "tangram.scheduler", "tangram.executors")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
PURE |= {name for name in FILES if name.startswith("tangram.scheduler.") and name not in IMPURE_SCHEDULER}
PURE |= {name for name in FILES if name.startswith("tangram.simulation.")} - {"tangram.simulation.workloads"}  # draws from a seed


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def import_nodes(nodes: list[ast.stmt], *, all_of_them: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements that run when the module is imported, or all that there are."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and is_type_checking(node.test) and not all_of_them:
            yield from import_nodes(node.orelse)
        elif all_of_them or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from import_nodes(getattr(node, field, []), all_of_them=all_of_them)
            for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
                yield from import_nodes(part.body, all_of_them=all_of_them)


def imported(name: str, source: str, *, all_of_them: bool = False) -> set[str]:
    """Full names of the modules that a module imports."""
    is_package = name in FILES and FILES[name].name == "__init__.py"
    found: set[str] = set()
    for node in import_nodes(ast.parse(source).body, all_of_them=all_of_them):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        base = node.module or ""
        if node.level:
            parents = name.split(".")[: len(name.split(".")) - node.level + is_package]
            base = ".".join([*parents, base] if base else parents)
        found.add(base)
        found |= {f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in FILES}
    return found


def with_packages(names: set[str]) -> set[str]:
    """And the packages that are imported before each."""
    parts = [name.split(".") for name in names]
    return {".".join(part[:length]) for part in parts for length in range(1, len(part) + 1)}


GRAPH = {name: with_packages(imported(name, path.read_text(encoding="utf-8")) | {name}) - {name} for name, path in FILES.items()}


def chains(start: str) -> dict[str, list[str]]:
    """Every module that importing `start` imports, with the shortest way there; other libraries by their first name."""
    found = {start: [start]}
    queue = [start]
    for name in queue:
        for target in sorted(GRAPH.get(name, ())):
            known = target if target in GRAPH else target.split(".")[0]
            if known not in found:
                found[known] = [*found[name], known]
                if known in GRAPH:
                    queue.append(known)
    return found


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_pure_module_imports_nothing_impure(name: str) -> None:
    assert name in FILES, f"{name} is gone: change the list here"
    found = chains(name)
    wrong = [f"{name} imports {bad}: {' -> '.join(found[bad])}. Use {USE_INSTEAD[bad]}." for bad in USE_INSTEAD if bad in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith(PEERS)])
def test_producers_scheduler_and_executors_meet_only_in_the_messages(name: str) -> None:
    own = next(peer for peer in PEERS if name.startswith(peer))
    wrong = [
        f"{name} imports {target}: {' -> '.join(chain)}. Use tangram.messages, or a module that all of them may know."
        for target, chain in chains(name).items()
        if target.startswith(PEERS) and not (target == own or target.startswith(own + "."))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name in FILES if not (name + ".").startswith("tangram.broker.")])
def test_only_the_broker_layer_knows_nats(name: str) -> None:
    everything = imported(name, FILES[name].read_text(encoding="utf-8"), all_of_them=True)
    wrong = [target for target in everything if target.split(".")[0] == "nats"]
    assert not wrong, f"{name} imports {', '.join(wrong)}. Use tangram.broker."


def test_the_broker_layer_knows_nobody_above_it() -> None:
    above = (*PEERS, "tangram.cli", "tangram.demo", "tangram.local", "tangram.messages")
    wrong = [
        f"{name} imports {target}: {' -> '.join(chain)}. Pass it in."
        for name in FILES
        if name.startswith("tangram.broker")
        for target, chain in chains(name).items()
        if target.startswith(above)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_import_inside_the_package_exists() -> None:
    wrong = [
        f"{name}: {target}"
        for name, targets in GRAPH.items()
        for target in targets
        if target.startswith("tangram.") and target not in FILES
    ]
    assert not wrong


# --- the rules' own reading of sources -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time", {"time"}),
        ("import os.path as p", {"os.path"}),
        ("from os import path", {"os"}),
        ("from tangram import messages as m", {"tangram", "tangram.messages"}),
        ("from tangram.limits import TICK_NS", {"tangram.limits"}),
        ("from . import cores", {"tangram.scheduler", "tangram.scheduler.cores"}),
        ("from .cores import MILLI", {"tangram.scheduler.cores"}),
        ("from ..subjects import parse", {"tangram.subjects"}),
        ("try:\n import a\nexcept ImportError:\n import b\nelse:\n import c\nfinally:\n import d", {"a", "b", "c", "d"}),
        ("if x:\n import a\nelif y:\n import b\nelse:\n import c", {"a", "b", "c"}),
        ("class A:\n import a\n def f(self):\n  import b", {"a"}),
        ("with x:\n import a\nfor y in z:\n import b\nmatch x:\n case 1:\n  import c", {"a", "b", "c"}),
        ("def f():\n import a\nasync def g():\n import b", set()),
        ("if TYPE_CHECKING:\n import a\nelse:\n import b", {"b"}),
        ("import typing as t\nif t.TYPE_CHECKING:\n import a", {"typing"}),
    ],
)
def test_imports_are_found(source: str, found: set[str]) -> None:
    assert imported("tangram.scheduler.window", source) == found


def test_all_imports_are_found() -> None:
    source = "def f():\n import a\nif TYPE_CHECKING:\n import b\nclass C:\n async def g():\n  with x:\n   import c"
    assert imported("tangram.scheduler.window", source, all_of_them=True) == {"a", "b", "c"}


def test_packages_are_imported_before_their_modules() -> None:
    assert with_packages({"a.b.c"}) == {"a", "a.b", "a.b.c"}
    assert chains("tangram.executors.core")["tangram.errors"] == ["tangram.executors.core", "tangram", "tangram.errors"]


def test_a_way_to_what_is_forbidden_is_found() -> None:
    """The rules can fail: the shells break every one of them."""
    assert chains("tangram.scheduler.service")["nats"][0] == "tangram.scheduler.service"
    assert {"asyncio", "logging", "time"} <= set(chains("tangram.scheduler.service"))
