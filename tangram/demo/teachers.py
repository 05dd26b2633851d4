"""Nine teachers that score what a student wrote: real torch modules of 64 MiB each, made from a seed. Needs `tangram[gpu]`.

An item is a list of token numbers; its score is what a two-layer network says of the bag of them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import torch

TEACHERS: Final = 9
TOKENS, WIDTH = 2_048, 4_096
"""Two layers of 2048 x 4096 32-bit numbers: 64 MiB and a little."""


class Teacher:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        first, second = torch.nn.Linear(TOKENS, WIDTH), torch.nn.Linear(WIDTH, TOKENS)
        self.layers = torch.nn.Sequential(first, torch.nn.ReLU(), second, torch.nn.ReLU(), torch.nn.Linear(TOKENS, 1))
        for parameter in self.layers.parameters():
            torch.nn.init.uniform_(parameter, -0.02, 0.02, generator=generator)

    def score(self, batch: list[Any]) -> torch.Tensor:
        device = next(self.layers.parameters()).device
        bags = torch.zeros(len(batch), TOKENS, device=device)
        for bag, tokens in zip(bags, batch, strict=True):
            bag.index_add_(0, torch.tensor(tokens, device=device) % TOKENS, torch.ones(len(tokens), device=device))
        return self.layers(bags).squeeze(1)  # type: ignore[no-any-return]


class Judge(Teacher):
    """Scores texts."""

    def score(self, batch: list[str]) -> torch.Tensor:
        return super().score([[crc32(word.encode()) for word in text.split()] for text in batch])


JUDGE: Final = "judge"


def name(number: int) -> str:
    return f"teacher-{number}"


def __getattr__(attribute: str) -> Callable[[], Teacher]:
    """`teacher_0` to `teacher_8`, and `judge`: a factory each."""
    if attribute == JUDGE:
        return partial(Judge, TEACHERS)
    prefix, _, number = attribute.rpartition("_")
    if prefix == "teacher" and number.isdigit() and int(number) < TEACHERS:
        return partial(Teacher, int(number))
    raise AttributeError(attribute)


def declare(path: Path, *, teachers: bool = True, judge: bool = False) -> None:
    """Writes their declaration for `tangram executor gpu --services`."""
    named = [(name(number), f"teacher_{number}", "[1, 2]") for number in range(TEACHERS if teachers else 0)]
    named += [(JUDGE, JUDGE, "[1]")] if judge else []
    lines = []
    for service, factory, units in named:
        lines += [f"[services.{service}]", f'factory = "{__name__}:{factory}"', f"units = {units}", ""]
    path.write_text("\n".join(lines))
