"""`python -m tangram.demo.search RATE BURST FOLDER`: a search provider over a small corpus, which takes so many requests a second
and no more. It writes where it listens into FOLDER/url, and tells at /stats how many it has answered and refused."""

import asyncio
import json
import math
import re
import sys
import time
from collections import Counter
from pathlib import Path

from tangram import roles
from tangram.demo.corpus import PAGES
from tangram.demo.limits import Bucket
from tangram.loopback import Answer, LoopbackServer, Request

_WORD = re.compile(r"[a-z]{3,}")


def words(text: str) -> Counter[str]:
    return Counter(_WORD.findall(text.lower()))


class Index:
    """Pages by how well they match: the words in common, each by how rare it is."""

    def __init__(self) -> None:
        self._pages = {title: words(f"{title} {text}") for title, text in PAGES.items()}
        seen = Counter(word for page in self._pages.values() for word in page)
        self._weight = {word: math.log(1 + len(PAGES) / count) for word, count in seen.items()}

    def best(self, query: str, skip: str = "") -> str:
        """The title of the page; ties go by title."""
        wanted = words(query)

        def score(title: str) -> float:
            page = self._pages[title]
            return sum(self._weight[word] * min(count, page[word]) for word, count in wanted.items() if word in page)

        return max(sorted(title for title in self._pages if title not in skip), key=score, default="")


class Provider:
    def __init__(self, rate: float, burst: int) -> None:
        self._limit = Bucket(rate, burst)
        self._index = Index()
        self._answered = self._refused = 0

    async def handle(self, request: Request) -> Answer:
        if request.path == "/stats":
            return Answer(body=json.dumps({"answered": self._answered, "refused": self._refused}).encode())
        if not self._limit.takes(time.monotonic()):
            self._refused += 1
            return Answer(429, headers={"retry-after": "1"})
        self._answered += 1
        title = self._index.best(request.query.get("q", ""), request.query.get("skip", ""))
        return Answer(body=json.dumps({"title": title, "text": PAGES.get(title, "")}).encode())


async def _main(rate: str, burst: str, folder: str) -> int:
    async with LoopbackServer(Provider(float(rate), int(burst)).handle) as server:
        (Path(folder) / "url").write_text(server.url)
        roles.say_ready()
        await asyncio.Event().wait()
    return 0


if __name__ == "__main__":
    roles.end_with_parent()
    sys.exit(roles.run_loop(_main(*sys.argv[1:])))
