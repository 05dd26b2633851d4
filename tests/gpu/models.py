"""Factories of small services, made from a seed."""

import os
import signal
import time
from typing import Any

import torch


class Linear:
    """score(item) = the sum of a linear layer's outputs for the item's numbers."""

    def __init__(self, seed: int, width: int = 64) -> None:
        torch.manual_seed(seed)
        self.layer = torch.nn.Linear(width, width)

    def score(self, batch: list[Any]) -> torch.Tensor:
        rows = torch.zeros(len(batch), self.layer.in_features)
        for row, numbers in zip(rows, batch, strict=True):
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float32)
        return self.layer(rows).sum(1)


class Wayward(Linear):
    """Does as its items say."""

    def score(self, batch: list[Any]) -> Any:
        match batch[0]:
            case ["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["sleep", seconds]:
                time.sleep(seconds)
            case ["raise"]:
                raise ValueError("as told")
            case ["nan"]:
                return [float("nan")] * len(batch)
            case ["short"]:
                return [0.0] * (len(batch) - 1)
            case ["rebind"]:
                self.layer.weight = torch.nn.Parameter(torch.zeros(64, 64))
            case ["pid"]:
                return [float(os.getpid())] * len(batch)
        return [0.0] * len(batch)


def one() -> Linear:
    return Linear(1)


def two() -> Linear:
    return Linear(2)


def large() -> Linear:
    """4 MiB."""
    return Linear(3, 1024)


def larger() -> Linear:
    """4 MiB."""
    return Linear(4, 1024)


def wayward() -> Wayward:
    return Wayward(5)


def frail() -> Wayward:
    """A signal replaces a parameter, whether it is on the device or not."""
    model = Wayward(6)

    def replace(*_: Any) -> None:
        model.layer.weight = torch.nn.Parameter(torch.zeros(64, 64))

    signal.signal(signal.SIGUSR1, replace)
    return model


def visible() -> Linear:
    raise RuntimeError(f"it sees {os.environ['CUDA_VISIBLE_DEVICES']}")


def broken() -> Linear:
    raise RuntimeError("no such checkpoint")
