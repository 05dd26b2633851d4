"""The back end of this host: its devices, and a place for each service on each of them."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from tangram.errors import ConfigError
from tangram.executors.gpu import inventory
from tangram.executors.gpu.backend import GpuBackend, Offer
from tangram.executors.gpu.declared import Service
from tangram.executors.gpu.engines import Engine, Sglang, Vllm
from tangram.executors.gpu.places import Place
from tangram.executors.gpu.workers import Nursery, Worker
from tangram.executors.presence import Claim

MIB: Final = 1 << 20
WEIGHTS_PART: Final = 0.9
"""Of a GPU's memory; the rest is for contexts, workspaces and activations."""


class Device(NamedTuple):
    """uuid "": it is played on the CPU. memory_mib: for weights."""

    id: int
    uuid: str
    memory_mib: int


def played(count: int, memory_mib: int) -> list[Device]:
    """Devices on the CPU, each with so much memory."""
    return [Device(number, "", memory_mib) for number in range(count)]


def real(wanted: set[int] | None, memory_mib: int) -> list[Device]:
    """This host's GPUs, or those of them. memory_mib 0: WEIGHTS_PART of each. Raises NoGpus, BrokenGpus, ConfigError."""
    found = inventory.read()
    if wanted is not None and not wanted <= {gpu.id for gpu in found}:
        raise ConfigError(f"--gpus: this host has {', '.join(str(gpu.id) for gpu in found)}")
    return [
        Device(gpu.id, gpu.uuid, memory_mib or int(gpu.memory_mib * WEIGHTS_PART))
        for gpu in found
        if wanted is None or gpu.id in wanted
    ]


def make_backend(claim: Claim, services: Mapping[str, Service], devices: Sequence[Device]) -> GpuBackend:
    """Its workers carry the mark of this incarnation, so that a successor finds what a dead one has left."""
    claim.record("gpu")
    nursery = Nursery(claim.incarnation)
    places = {
        (name, device.id): _place(name, service, device, claim, nursery)
        for device in devices
        for name, service in services.items()
    }
    offers = {name: Offer(service.units, service.idle_value) for name, service in services.items()}
    return GpuBackend(offers, places, nursery)


def _place(name: str, service: Service, device: Device, claim: Claim, nursery: Nursery) -> Place:
    if service.engine != "torch":
        if device.id >= len(service.urls):
            raise ConfigError(f"services.{name}.urls: has none for GPU {device.id}")
        speaks = Vllm(service.model) if service.engine == "vllm" else Sglang(service.model)
        free = partial(inventory.free_bytes, device.uuid) if device.uuid else None
        return Engine(name, service.urls[device.id], speaks, service.weights_mib * MIB, free)
    plan = {"service": name, "factory": service.factory, "strict": service.strict, "uuid": device.uuid}
    if not device.uuid:
        plan |= {"ledger": str(Path(claim.folder, f"device-{device.id}")), "capacity_bytes": device.memory_mib * MIB}
    return Worker(nursery, plan)
