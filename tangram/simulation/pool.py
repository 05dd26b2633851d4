"""Pools: which hosts there are."""

import re
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct

from tangram import limits
from tangram import messages as m
from tangram.errors import ConfigError
from tangram.messages.fields import Count, Name
from tangram.simulation.trace import Units, decode_file
from tangram.simulation.work import Model

_SHORT: Final = re.compile(r"(cpu|gpu)=(?:([1-9][0-9]{0,5})x)?([1-9][0-9]{0,5})")
_GPU_MEMORY_MIB: Final = 72 * 1024
"""Of a GPU with 80 GB, for weights; the rest is for what runs."""


class Machine(NamedTuple):
    """nodes: how many cores each NUMA node has. gpu_memory_mib: of each GPU, for weights. others: what else it has, by resource.
    kinds: its executors, each with whether it offers the cores; (): those of its cores and GPUs."""

    nodes: tuple[int, ...] = ()
    memory_mib: int = limits.AMOUNT_MAX
    gpus: int = 0
    gpu_memory_mib: int = _GPU_MEMORY_MIB
    others: tuple[tuple[str, int], ...] = ()
    kinds: tuple[tuple[str, bool], ...] = ()

    @property
    def cores(self) -> int:
        return sum(self.nodes)


class _Hosts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cores: Annotated[tuple[Units, ...], Meta(max_length=limits.NUMA_NODES_MAX)] = ()
    count: Annotated[int, Meta(ge=1, le=limits.SIMULATED_HOSTS_MAX)] = 1
    memory_mib: Annotated[int, Meta(ge=1, le=limits.AMOUNT_MAX)] = limits.AMOUNT_MAX
    gpus: Annotated[int, Meta(ge=0, le=limits.GPU_ID_MAX + 1)] = 0
    gpu_memory_mib: Annotated[int, Meta(ge=1, le=limits.AMOUNT_MAX)] = _GPU_MEMORY_MIB


class Offers(NamedTuple):
    """services: what all GPUs serve; quotas: what all hosts share."""

    services: dict[str, m.Service]
    quotas: dict[str, m.Quota]


class _Service(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weights_gib: Annotated[float, Meta(ge=0, le=limits.AMOUNT_MAX >> 10)]
    restore_gb_per_s: Annotated[float, Meta(gt=0)] = 25.0
    restore_fixed_s: Annotated[float, Meta(ge=0, le=limits.STARTUP_MS_MAX / 1_000)] = 0.1


class DeclaredQuota(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    concurrency: Count = 0
    requests: Count = 0
    burst: Count = 0
    tokens: Count = 0
    interval_s: Annotated[float, Meta(ge=0.001, le=limits.DEADLINE_MS_MAX / 1_000)] = 60.0

    @property
    def quota(self) -> m.Quota:
        return m.Quota(
            concurrency=self.concurrency,
            requests=self.requests,
            burst=self.burst,
            tokens=self.tokens,
            interval_ms=round(self.interval_s * 1_000),
        )


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hosts: Annotated[list[_Hosts], Meta(min_length=1)]
    services: Annotated[dict[Name, _Service], Meta(max_length=limits.SERVICES_MAX)] = {}
    quotas: Annotated[dict[Name, DeclaredQuota], Meta(max_length=limits.QUOTAS_MAX)] = {}


def parse(text: str) -> list[Machine]:
    """`cpu=N` is one host of N cores, `cpu=HxN` H hosts of N cores, `gpu=HxN` H hosts of N GPUs, with commas between them;
    anything else names a TOML file. Raises ConfigError."""
    if text.startswith(("cpu=", "gpu=")):
        machines = []
        for part in text.split(","):
            match = _SHORT.fullmatch(part)
            if match is None:
                raise ConfigError(
                    f"--pool {text}: must be cpu=CORES, cpu=HOSTSxCORES, gpu=HOSTSxGPUS (with commas) or a TOML file"
                )
            size = int(match[3])
            if match[1] == "gpu" and size > limits.GPU_ID_MAX + 1:
                raise ConfigError(f"--pool {text}: a host must have at most {limits.GPU_ID_MAX + 1} GPUs")
            machines += [Machine((size,)) if match[1] == "cpu" else Machine(gpus=size)] * int(match[2] or 1)
    else:
        found = _file(text)
        machines = [
            Machine(each.cores, each.memory_mib, each.gpus, each.gpu_memory_mib)
            for each in found.hosts
            for _ in range(each.count)
        ]
    largest = max(machine.cores for machine in machines)
    if largest > limits.CORE_ID_MAX + 1:
        raise ConfigError(f"--pool {text}: a host must have at most {limits.CORE_ID_MAX + 1} cores")
    if len(machines) > limits.SIMULATED_HOSTS_MAX:
        raise ConfigError(f"--pool {text}: must be at most {limits.SIMULATED_HOSTS_MAX} hosts")
    return machines


def offers(text: str) -> Offers:
    """What a TOML file says of services and quotas; the short forms say nothing. Raises ConfigError."""
    if text.startswith(("cpu=", "gpu=")):
        return Offers({}, {})
    found = _file(text)
    services = {
        name: Model(each.weights_gib, each.restore_gb_per_s, each.restore_fixed_s).service
        for name, each in found.services.items()
    }
    quotas = {name: each.quota for name, each in found.quotas.items()}
    return Offers(services, quotas)


def _file(text: str) -> _File:
    return decode_file(Path(text), lambda data: msgspec.toml.decode(data, type=_File))
