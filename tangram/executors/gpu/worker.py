"""A worker: one service on one device, in a process of its own, so that a fault of the device costs it alone. It answers one
request after the other (`frames`)."""

import importlib
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import torch

from tangram.errors import TangramError
from tangram.executors.gpu import frames
from tangram.executors.gpu.device import CpuDevice, CudaDevice, Device
from tangram.executors.gpu.errors import Evicted, WeightsError
from tangram.executors.gpu.ledger import DeviceFull, Ledger
from tangram.executors.gpu.places import Failed
from tangram.executors.gpu.weights import Weights

WORDS_LENGTH_MAX: Final = 2_000


class Scorer(Protocol):
    """What a factory returns. Its weights are the tensors that hang on it (`layout`); what `score` makes must not stay there."""

    def score(self, batch: list[Any]) -> Any:
        """As many numbers as items; a tensor or an array of them will do."""


class Plan(msgspec.Struct, kw_only=True):
    """ledger: the folder of a device that is played on the CPU, with its capacity; otherwise uuid names a GPU."""

    service: str
    factory: str
    strict: bool = False
    uuid: str = ""
    ledger: str = ""
    capacity_bytes: int = 0
    threads: int = 1


def serve(plan: dict[str, Any], own: socket.socket) -> None:
    """Until the other side closes its end."""
    found = msgspec.convert(plan, Plan)
    if found.uuid:
        os.environ["CUDA_VISIBLE_DEVICES"] = found.uuid  # before the factory's code, with which CUDA may begin
    _Worker(found).serve(own)


class _Worker:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._scorer: Scorer | None = None
        self._weights: Weights | None = None
        self._verbs: dict[str, Callable[[Any], Any]] = {
            "pid": lambda _: os.getpid(),
            "load": self._load,
            "restore": self._restore,
            "evict": self._evict,
            "score": self._score,
        }

    def serve(self, own: socket.socket) -> None:
        while (request := frames.read(own)) is not None:
            verb, argument = request
            try:
                answer = [True, self._verbs[verb](argument)]
            except Failed as failed:
                answer = [False, failed.kind, str(failed)[:WORDS_LENGTH_MAX]]
            except (DeviceFull, torch.OutOfMemoryError) as error:
                answer = [False, "memory", f"{self._plan.service}: {error}"[:WORDS_LENGTH_MAX]]
            except WeightsError as error:
                answer = [False, "broken", str(error)[:WORDS_LENGTH_MAX]]
            frames.write(own, answer)

    def _load(self, _: Any) -> int:
        plan = self._plan
        torch.set_num_threads(plan.threads)
        module, _, function = plan.factory.partition(":")
        try:
            with torch.no_grad():
                made = getattr(importlib.import_module(module), function)()
        except Exception as error:
            raise Failed("load", f"factory {plan.factory}: {type(error).__name__}: {error}") from error
        if not callable(getattr(made, "score", None)):
            raise Failed("load", f"factory {plan.factory}: what it returned has no score(batch)")
        self._scorer = made
        try:
            self._weights = Weights(plan.service, [made], self._device(), strict=plan.strict)
        except (TangramError, MemoryError) as error:
            raise Failed("load", f"factory {plan.factory}: {error}") from error
        return self._weights.size

    def _device(self) -> Device:
        plan = self._plan
        if plan.ledger:
            return CpuDevice(Ledger(Path(plan.ledger), plan.capacity_bytes, f"{plan.service}-{os.getpid()}"))
        return CudaDevice()

    def _restore(self, _: Any) -> list[float]:
        assert self._weights is not None
        return list(self._weights.restore())

    def _evict(self, _: Any) -> list[float]:
        assert self._weights is not None
        return list(self._weights.evict())

    def _score(self, batch: list[Any]) -> list[float]:
        assert self._weights is not None
        assert self._scorer is not None
        with self._weights.lease(), torch.inference_mode():
            try:
                found = self._scorer.score(batch)
                scores = [float(each) for each in (found.tolist() if hasattr(found, "tolist") else found)]
            except (DeviceFull, torch.OutOfMemoryError, Evicted):
                raise
            except Exception as error:
                raise Failed("score", f"{self._plan.service}: {type(error).__name__}: {error}") from error
        if len(scores) != len(batch):
            raise Failed("answer", f"{self._plan.service}: {len(scores)} scores for {len(batch)} items")
        for index, score in enumerate(scores):
            if not math.isfinite(score):
                raise Failed("answer", f"{self._plan.service}: the score of item {index} is {score}")
        return scores
