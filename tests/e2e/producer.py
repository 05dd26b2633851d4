"""A producer as a process of its own, for tests that kill it: `python -m tests.e2e.producer URL NAME FLAG FOLDER`.

It opens a session, starts a program in it and one on its own, each of which says that it runs by a file in FOLDER, writes
their ids there, and waits for ever. FLAG "1": what is open ends with it.
"""

import asyncio
import sys
from pathlib import Path

import tangram


async def main(url: str, name: str, flag: str, folder: Path) -> None:
    async with tangram.Client(url, task="test", name=name, cancel_on_disconnect=flag == "1") as client:
        box = await client.open_session(memory="64MiB")
        inside = await box.start(f"touch {folder}/inside; sleep 600", units=0.1, env={"MARKER": name})
        alone = await client.start(f"touch {folder}/alone; sleep 3; echo done by {name}", units=0.1, key="the answer")
        (folder / "ids.new").write_text("\n".join([box.opened.id, inside.id, alone.id]))
        (folder / "ids.new").rename(folder / "ids")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
