"""`python -m tangram.bench.worker URL RATE BURST CALLERS SECONDS`: a worker of a framework, whose callers share a limiter of
their process: what other workers send it does not know."""

import asyncio
import sys
import time

import httpx

from tangram import roles
from tangram.demo.limits import Bucket


async def _main(url: str, rate: str, burst: str, callers: str, seconds: str) -> int:
    limiter = Bucket(float(rate), int(burst))
    end_s = time.monotonic() + float(seconds)
    lock = asyncio.Lock()
    roles.say_ready()
    async with httpx.AsyncClient(timeout=None, trust_env=False) as http:

        async def caller() -> None:
            while True:
                async with lock:  # those who came first go first
                    await asyncio.sleep(limiter.wait_s(time.monotonic()))
                    limiter.takes(time.monotonic())
                if time.monotonic() >= end_s:
                    return
                response = await http.get(f"{url}/search")
                if response.status_code == 429:
                    await asyncio.sleep(float(response.headers.get("retry-after", "1")))

        await asyncio.gather(*(caller() for _ in range(int(callers))))
    return 0


if __name__ == "__main__":
    roles.end_with_parent()
    sys.exit(roles.run_loop(_main(*sys.argv[1:])))
