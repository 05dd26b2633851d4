"""Services as they are declared: in a TOML file, or by installed packages as entry points of the group `tangram.services`."""

import importlib.metadata
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from tangram import limits
from tangram.errors import ConfigError
from tangram.messages.fields import Name
from tangram.rules import GPU_CHUNKS

ENTRY_POINTS: Final = "tangram.services"
_UNITS_RULE: Final = "must be some of 1, 2, 4 and 8, rising"


class Service(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that is served. factory: `package.module:function`, called without arguments in a worker process of its own for
    each GPU, on the CPU; what it returns has `score(batch) -> as many numbers`, and the torch modules that it is or has as
    attributes are what comes and goes. units: degrees of parallelism, so many workers that share a batch. idle_value: of a copy
    that nobody uses, beside those of other services: who has less makes room first. strict: weights are checked by a sum at each
    restore. engine, urls: a vLLM or SGLang server for each GPU instead of a factory; weights_mib: what it holds there.
    model: the name that a server knows it by."""

    factory: str = ""
    units: tuple[int, ...] = (1,)
    idle_value: Annotated[float, Meta(ge=0, le=1_000)] = 1.0
    strict: bool = False
    engine: Literal["torch", "vllm", "sglang"] = "torch"
    urls: tuple[str, ...] = ()
    weights_mib: Annotated[int, Meta(ge=0, le=limits.AMOUNT_MAX)] = 0
    model: str = ""

    def objection(self) -> str:
        """The first rule that it breaks, as "field: rule", or ""."""
        if not self.units or any(size not in GPU_CHUNKS for size in self.units) or list(self.units) != sorted(set(self.units)):
            return f"units: {_UNITS_RULE}"
        if self.engine == "torch":
            module, _, function = self.factory.partition(":")
            if not (module and function):
                return "factory: must be package.module:function"
            return "urls: are for the engines vllm and sglang" if self.urls else ""
        if self.factory:
            return f"factory: is for the engine torch, not {self.engine}"
        if not self.urls:
            return f"urls: the engine {self.engine} needs one for each GPU"
        if not self.weights_mib:
            return f"weights_mib: must be given for the engine {self.engine}"
        if self.units != (1,):
            return f"units: the engine {self.engine} serves on one GPU"
        return ""


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    services: Annotated[dict[Name, Service], Meta(min_length=1, max_length=limits.SERVICES_MAX)]


def load(path: Path) -> dict[str, Service]:
    """By name, from a file with a table [services.NAME] for each. Raises ConfigError, which names the file and the field."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=_File).services
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        rule, _, at = str(error).partition(" - at `$.")
        raise ConfigError(f"{path}: {at.rstrip('`')}: {rule}" if at else f"{path}: {rule}") from None
    for name, service in found.items():
        if broken := service.objection():
            raise ConfigError(f"{path}: services.{name}.{broken}")
    return found


def installed() -> dict[str, Service]:
    """Those of installed packages: each entry point names a factory, on one GPU."""
    return {each.name: Service(factory=each.value) for each in importlib.metadata.entry_points(group=ENTRY_POINTS)}
