"""A session lives from open to close, and is missed when it is gone."""

import asyncio
import shutil

from tangram.executors.backend import ActionKey, Grant, SessionKey
from tangram.messages import SessionOpen
from tangram.outcomes import ErrorReason, Outcome, RejectReason
from tests.executors.conftest import PYTHON, Lab, eventually

UNKNOWN = SessionKey("task", "client", 999)


async def test_files_and_heredocs_stay_between_actions(lab: Lab) -> None:
    async with lab.session() as session:
        ended = await lab.sh("cat <<'EOF' > f\nhello $x\nEOF", session=session, timeout_ms=2_000)
        assert ended.outcome is Outcome.OK
        assert (await lab.sh("cat f", session=session)).output.stdout == b"hello $x\n"


async def test_sessions_do_not_share_their_folders(lab: Lab) -> None:
    async with lab.session() as first, lab.session() as second:
        await lab.sh("echo 1 >f; echo 1 >$TMPDIR/t", session=first)
        assert (await lab.sh("ls -A . $TMPDIR | grep -c '[ft]$'", session=second)).output.stdout == b"0\n"


async def test_a_single_actions_folder_goes_with_it(lab: Lab) -> None:
    ended = await lab.sh("mkdir -p a/b; echo x >a/b/c; chmod 0 a/b; pwd")
    assert ended.outcome is Outcome.OK
    assert list((lab.backend.folder / "single").iterdir()) == []
    assert lab.groups() == []


async def test_folders_that_are_hard_to_remove_are_removed(lab: Lab) -> None:
    deep = "import os\nfor _ in range(3000):\n  os.mkdir('d')\n  os.chdir('d')"
    assert (await lab.run(*PYTHON, deep)).outcome is Outcome.OK
    async with lab.session() as session:
        assert (await lab.run(*PYTHON, deep, session=session)).outcome is Outcome.OK
        await lab.sh("mkdir -p locked/in; chmod 0 locked/in locked", session=session)
    for kind in ("single", "sessions"):
        assert list((lab.backend.folder / kind).iterdir()) == []


async def test_an_unknown_session_is_lost(lab: Lab) -> None:
    for ended in (await lab.sh("true", session=UNKNOWN), await lab.read(UNKNOWN, "f"), await lab.write(UNKNOWN, "f", b"")):
        assert (ended.outcome, ended.session_lost, ended.exit_code) == (Outcome.ENVIRONMENT_LOST, True, None)


async def test_a_session_whose_folder_vanished_is_lost(lab: Lab) -> None:
    session = await lab.open()
    shutil.rmtree(lab.home(session))
    for ended in (await lab.sh("true", session=session), await lab.read(session, "f")):
        assert (ended.outcome, ended.session_lost) == (Outcome.ENVIRONMENT_LOST, True)
    assert (await lab.backend.close(session)).outcome is Outcome.OK


async def test_a_session_that_vanishes_under_its_action_is_lost(lab: Lab) -> None:
    session = await lab.open()
    ended = await lab.sh('rm -rf "$HOME"; exit 1', session=session)
    assert (ended.outcome, ended.session_lost) == (Outcome.ENVIRONMENT_LOST, True)
    assert (await lab.backend.close(session)).outcome is Outcome.OK


async def test_closing_is_complete_and_idempotent(lab: Lab) -> None:
    session = await lab.open()
    await lab.sh("setsid sleep 300 & mkdir d; touch d/f; chmod 500 d", session=session)
    for _ in range(2):
        assert (await lab.backend.close(session)).outcome is Outcome.OK
    assert (await lab.backend.close(UNKNOWN)).outcome is Outcome.OK
    assert lab.survivors() == []
    assert list((lab.backend.folder / "sessions").iterdir()) == []
    assert lab.groups() == []


async def test_closing_twice_at_once(lab: Lab) -> None:
    session = await lab.open()
    await lab.sh("sleep 300 &", session=session)
    closed = await asyncio.gather(*(lab.backend.close(session) for _ in range(3)))
    assert {ended.outcome for ended in closed} == {Outcome.OK}


async def test_closing_ends_what_runs_inside(lab: Lab) -> None:
    session = await lab.open()
    task = lab.sh("sleep 300", session=session)
    await eventually(lambda: lab.survivors() != [])
    assert (await lab.backend.close(session)).outcome is Outcome.OK
    ended = await task
    assert (ended.outcome, ended.session_lost) == (Outcome.ENVIRONMENT_LOST, True)


async def test_opening_again_is_refused_and_keeps_the_first(lab: Lab) -> None:
    session = await lab.open()
    await lab.write(session, "f", b"kept")
    again = await lab.backend.open(session, SessionOpen(), Grant())
    assert (again.outcome, again.reason) == (Outcome.ERROR, ErrorReason.INTERNAL)
    assert (await lab.read(session, "f")).output.data == b"kept"


async def test_an_image_is_refused_and_not_replaced_by_the_host(lab: Lab) -> None:
    ended = await lab.backend.open(UNKNOWN, SessionOpen(image="python:3.12"), Grant())
    assert (ended.outcome, ended.reason) == (Outcome.ERROR, ErrorReason.IMAGE)
    assert "--sandbox docker" in ended.detail


async def test_a_sessions_environment_is_checked(lab: Lab) -> None:
    ended = await lab.backend.open(UNKNOWN, SessionOpen(env={"LD_LIBRARY_PATH": "/"}), Grant())
    assert (ended.outcome, ended.reason) == (Outcome.REJECTED, RejectReason.INVALID)


async def test_names_of_tasks_and_clients_cannot_be_confused(lab: Lab) -> None:
    first, second = SessionKey("a", "b-1", 2), SessionKey("a-b", "1", 2)
    for key in (first, second):
        assert (await lab.backend.open(key, SessionOpen(), Grant())).outcome is Outcome.OK
    await lab.write(first, "f", b"")
    assert (await lab.read(second, "f")).outcome is Outcome.FAILED
    longest = ActionKey("t" * 64, "c" * 64, (1 << 62))
    assert (await lab.sh("true", key=longest)).outcome is Outcome.OK
