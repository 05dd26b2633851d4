"""See the package. Faults: early (200 before the memory is free), never-free, dies (200, then it is gone), gone-quiet (does it,
and never answers), hangs (does nothing, never answers), oom (500 at waking), refuses (500 at sleeping), nan, short.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

WEIGHTS = 1_000_000
QUIET_S = 3_600.0
EARLY_S = 0.3


class Device:
    def __init__(self, kind: str, flags: set[str]) -> None:
        self.kind, self.flags = kind, flags
        self.fault = ""
        self.free = 0
        self.asleep: set[str] = set()
        self.is_garbage = False
        self.lock = threading.Lock()
        self.calls: list[str] = []

    def move(self, tags: set[str], *, asleep: bool) -> None:
        if self.kind == "sglang" and (tags & self.asleep if asleep else tags - self.asleep):
            os._exit(1)  # it cannot be paused or resumed twice
        self.asleep = self.asleep | tags if asleep else self.asleep - tags
        if self.kind == "sglang" and "no-backup" in self.flags and asleep:
            self.is_garbage = True
        free = WEIGHTS if "weights" in self.asleep else 0
        if self.fault == "never-free":
            return
        if self.fault == "early":
            threading.Timer(EARLY_S, lambda: setattr(self, "free", free)).start()
        else:
            self.free = free


class Handler(BaseHTTPRequestHandler):
    device: Device

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def answer(self, code: int, body: Any = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:  # as the base class has it
        device = self.device
        match urlparse(self.path).path:
            case "/_free":
                self.answer(200, device.free)
            case "/_calls":
                self.answer(200, device.calls)
            case "/health":
                self.answer(200)
            case "/is_sleeping" if device.kind == "vllm" and "no-dev-mode" not in device.flags:
                self.answer(200, {"is_sleeping": bool(device.asleep)})
            case "/get_server_info" if device.kind == "sglang":
                backup = "no-backup" not in device.flags
                self.answer(200, {"enable_memory_saver": True, "enable_weights_cpu_backup": backup})
            case _:
                self.answer(404)

    def do_POST(self) -> None:  # as the base class has it
        device = self.device
        url = urlparse(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
        if url.path == "/_fault":
            device.fault = query.get("name", "")
            return self.answer(200)
        device.calls.append(f"{url.path}?{url.query}" if url.query else url.path)
        match device.kind, url.path:
            case "vllm", "/sleep":
                return self.sleep({"weights", "kv_cache"})
            case "vllm", "/wake_up":
                return self.wake({"weights", "kv_cache"})
            case "sglang", "/release_memory_occupation" if isinstance(body, dict):
                return self.sleep(set(body["tags"]))
            case "sglang", "/resume_memory_occupation" if isinstance(body, dict):
                return self.wake(set(body["tags"]))
            case "sglang", "/pause_generation" | "/flush_cache":
                return self.answer(200)
            case "vllm", "/pooling":
                scores = self.scores(body["input"])
                rows = [{"index": index, "data": [[score]]} for index, score in enumerate(scores)]
                return self.answer(200, {"data": rows[::-1]})  # in no order
            case "sglang", "/classify":
                return self.answer(200, [{"embedding": [score]} for score in self.scores(body["text"])])
        return self.answer(404)

    def scores(self, batch: list[Any]) -> list[Any]:
        device = self.device
        if device.asleep:
            os._exit(1)  # work for a sleeping engine ends it
        if device.fault == "hangs":
            time.sleep(QUIET_S)
        if device.fault == "nan":
            return [float("nan")] * len(batch)
        if device.fault == "short":
            return [0.0] * (len(batch) - 1)
        return [-1e9 if device.is_garbage else float(len(str(each))) for each in batch]

    def sleep(self, tags: set[str]) -> None:
        if self.device.fault == "refuses":
            return self.answer(500, {"error": "scheduler is busy"})
        return self.moved(tags, asleep=True)

    def wake(self, tags: set[str]) -> None:
        if self.device.fault == "oom":
            words = "Call to wake_up method failed: CUDA Error: out of memory at cumem.cpp:163"
            return self.answer(500, {"error": {"message": words, "type": "InternalServerError", "code": 500}})
        return self.moved(tags, asleep=False)

    def moved(self, tags: set[str], *, asleep: bool) -> None:
        device = self.device
        if device.fault == "hangs":
            time.sleep(QUIET_S)
        with device.lock:
            device.move(tags, asleep=asleep)
        if device.fault == "gone-quiet":
            time.sleep(QUIET_S)
        self.answer(200)
        if device.fault == "dies":
            self.wfile.flush()
            os._exit(1)


def main() -> None:
    kind, *flags = sys.argv[1:]
    Handler.device = Device(kind, set(flags))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
