"""What a scheduler has learnt: shown, taken along in a file, and used by the scheduler of another log."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tangram
from tangram import limits, subjects
from tangram import messages as m
from tangram.broker import Broker, EmbeddedServer, apply, last_for, stream_state
from tangram.cli.models import read_models
from tangram.local import LocalStack, ProcessFailed
from tangram.scheduler.elasticity import Curve, Model, learn
from tangram.scheduler.exporter import Exporter
from tangram.scheduler.state import State
from tests.e2e.conftest import fold, whole_log
from tests.e2e.test_cli import tangram as command

SEED = {
    "task": "test",
    "kind": "compile",
    "count": 40,
    "serial_us": 700_000,
    "spread_ppm": 50_000,
    "sizes": [{"units": units, "duration_us": 700_000, "weight_ppm": 9_000_000, "times": 10} for units in (1, 2)],
}


def seed_file(path: Path, *models: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"format": 1, "models": models}))
    return path


async def shown(url: str, *kinds: str) -> dict[str, Any]:
    """What `tangram models --json` says, once it has all of these kinds."""
    async with asyncio.timeout(30):
        while True:
            done = await command("models", "--json", url=url)
            assert done.returncode == 0, done.stderr
            found = {each["kind"]: each for each in json.loads(done.stdout)}
            if set(kinds) <= set(found):
                return found


async def test_what_was_learnt_is_shown_and_decides_in_another_log(tmp_path: Path) -> None:
    async with LocalStack(tmp_path / "first") as stack:
        async with tangram.Client(stack.url, task="test") as client:
            for _ in range(4):
                assert (await client.run("sleep 0.1", kind="unit.test", units=1)).ok
        found = await shown(stack.url, "unit.test")
        learnt = found["unit.test"]
        assert (learnt["task"], learnt["fastest_units"]) == ("test", 1)
        assert learnt["count"] >= 1
        assert 0.1 <= learnt["sizes"][0]["seconds"] < 1
        assert 0.05 < learnt["serial_s"] + learnt["parallel_s"] + learnt["overhead_s"] < 2
        assert 0 < learnt["spread"] < 2
        text = (await command("models", url=stack.url)).stdout.decode()
        assert text.splitlines()[1].split()[:2] == ["test", "unit.test"]
        file = tmp_path / "models.json"
        assert (await command("models", "export", str(file), url=stack.url)).returncode == 0
    async with LocalStack(tmp_path / "second", scheduler_arguments=["--seed-models", str(file)]) as stack:
        found = await shown(stack.url, "unit.test")
        assert found["unit.test"] == learnt, "the same, exported again by another scheduler"
        fold(await whole_log(stack.url))


async def test_a_seed_decides_the_first_action_and_never_replaces_what_was_learnt(tmp_path: Path) -> None:
    arguments = ["--seed-models", str(seed_file(tmp_path / "seed.json", SEED))]
    async with LocalStack(tmp_path / "stack", scheduler_arguments=arguments) as stack:
        async with tangram.Client(stack.url, task="test") as client:
            assert (await client.run("true", kind="compile", units=1)).ok
            (first,) = [start.predicted_us for start in await starts(stack.url)]
            assert first == 700_000
            for _ in range(15):
                assert (await client.run("true", kind="compile", units=1)).ok
        before = fold(await whole_log(stack.url)).models[("test", "compile")]
        assert stack.scheduler is not None
        await stack.scheduler.stop()
        await stack.start_scheduler()  # with the same file
        log = await whole_log(stack.url)
        seeded = [message for message in log if message.subject == subjects.CLOCK and b"ModelsSeeded" in message.data]
        after = fold(log).models[("test", "compile")]
        assert len(seeded) == 1
        assert (after.count, after.curve) == (before.count, before.curve)
        assert after.count == 40 + 16


async def starts(url: str) -> list[m.Start]:
    found: list[m.Start] = []
    for message in await whole_log(url):
        _, decoded = m.decode(message.subject, message.data)
        if isinstance(decoded, m.DecisionsMade):
            found += [item for item in decoded.items if isinstance(item, m.Start)]
    return found


async def test_a_scheduler_that_stops_leaves_the_last_word_in_the_bucket(tmp_path: Path) -> None:
    async with LocalStack(tmp_path) as stack:
        async with tangram.Client(stack.url, task="test") as client:
            await shown(stack.url)
            for _ in range(3):
                assert (await client.run("true", kind="unit.test", units=1)).ok
        assert stack.scheduler is not None
        await stack.scheduler.stop()
        broker = await Broker.connect(stack.url, name="test reader")
        try:
            stored = await last_for(broker, subjects.MODELS, subjects.model("test", "unit.test"))
        finally:
            await broker.close()
        assert stored is not None
        assert json.loads(stored.data)["count"] == 3


async def test_an_export_writes_what_has_changed_and_of_much_only_a_part(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server:
        broker = await Broker.connect(server.url, name="test exporter")
        try:
            await apply(broker)
            exporter, state = Exporter(broker), State()
            for index in range(limits.MODELS_EXPORTED_MAX + 1):
                model = state.models[("t", f"k{index}")] = Model()
                learn(model, 1, 1_000, Curve(1.0, 0.0))
            for changed, entries in ((True, limits.MODELS_EXPORTED_MAX), (True, len(state.models)), (False, len(state.models))):
                assert await exporter.write(state) is changed
                assert (await stream_state(broker, subjects.MODELS)).messages == entries
            learn(state.models[("t", "k7")], 1, 1_000, Curve(1.0, 0.0))
            last_seq = (await stream_state(broker, subjects.MODELS)).last_seq
            assert await exporter.write(state)
            assert (await stream_state(broker, subjects.MODELS)).last_seq == last_seq + 1
            assert {model.kind: model.count for model in await read_models(broker)}["k7"] == 2
        finally:
            await broker.close()


async def test_without_the_bucket_everything_works_but_the_command(tmp_path: Path) -> None:
    async with LocalStack(tmp_path) as stack:
        broker = await Broker.connect(stack.url, name="test deletes")
        try:
            await broker.api(f"STREAM.DELETE.{subjects.MODELS}")
        finally:
            await broker.close()
        async with tangram.Client(stack.url, task="test") as client:
            for _ in range(3):
                assert (await client.run("true", units=1)).ok
        done = await command("models", url=stack.url)
        assert (done.returncode, b"Traceback" in done.stderr) == (3, False), done.stderr
        assert subjects.MODELS.encode() in done.stderr
        assert stack.scheduler is not None
        await stack.scheduler.stop()
        assert stack.scheduler.process.returncode == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", b"models.json"),
        ("{}", b"format"),
        ('{"format": 2, "models": []}', b"this version reads 1"),
        (json.dumps({"format": 1, "models": [{**SEED, "count": -1}]}), b"$.models[0].count"),
        (json.dumps({"format": 1, "models": [{**SEED, "kind": "Not A Kind"}]}), b"$.models[0].kind"),
        (json.dumps({"format": 1, "models": [{**SEED, "sizes": []}]}), b"$.models[0].sizes"),
    ],
    ids=["empty", "no-format", "newer", "negative", "kind", "no-sizes"],
)
async def test_a_file_that_is_none_is_exit_code_2_and_names_the_field(tmp_path: Path, text: str, says: bytes) -> None:
    file = tmp_path / "models.json"
    file.write_text(text)
    for role in (["scheduler"], ["up", "--data", str(tmp_path / "home")]):
        done = await command(*role, "--seed-models", str(file), url="nats://127.0.0.1:1")
        assert done.returncode == 2, done.stderr
        assert says in done.stderr
        assert str(file).encode() in done.stderr


async def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    done: subprocess.CompletedProcess[bytes] = await command(
        "scheduler", "--seed-models", str(tmp_path / "no.json"), url="nats://127.0.0.1:1"
    )
    assert (done.returncode, b"no.json" in done.stderr) == (2, True)
    with pytest.raises(ProcessFailed, match=r"no\.json"):
        async with LocalStack(tmp_path / "stack", scheduler_arguments=["--seed-models", str(tmp_path / "no.json")]):
            pass
