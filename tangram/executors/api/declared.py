"""Endpoints as they are declared in a TOML file on the executor: the only places that can be called, by name, and their secrets.

Nothing of a call but its arguments and its body comes from whoever asks for it.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from tangram import limits
from tangram.errors import ConfigError
from tangram.messages.fields import Amount, Name
from tangram.rules import CALLS, HOST_RESOURCES

PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]{0,63})\}")
_SECRET: Final = re.compile(r"\$\{(env|file):([^}]*)\}")
_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "PUT", "DELETE"})
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
RESPONSE_BYTES: Final = 1 << 20
RESPONSE_BYTES_MAX: Final = 32 << 20
"""What one call may bring: it is in memory a few times over."""


class Endpoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place that can be called. url: {name} in its path and query is filled, percent-encoded, by the call's argument of that
    name; all other arguments go into the query of a GET, HEAD or DELETE, or of what has a body of its own, and else are the JSON
    body. headers: as they are sent. In both, ${env:NAME} and ${file:PATH} stand for a secret.
    takes: tokens by quota that every call takes, beside what it names itself. spent: by quota, where the answer says how many it
    really were: a dotted path into its JSON, or "header:NAME".
    idempotent: whether a call may be sent again after it may have arrived; without it by the method, or if there is an
    idempotency_header, which then carries a key that is the same at every attempt. response_bytes: the most that is read.
    retry_after_s: of a refusal that does not say."""

    url: str
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    headers: dict[str, str] = {}
    takes: Annotated[dict[Name, Amount], Meta(max_length=limits.RESOURCES_PER_ACTION_MAX - 2)] = {}
    spent: dict[Name, str] = {}
    idempotent: bool | None = None
    idempotency_header: str = ""
    response_bytes: Annotated[int, Meta(ge=1, le=RESPONSE_BYTES_MAX)] = RESPONSE_BYTES
    retry_after_s: Annotated[float, Meta(ge=0.05, le=limits.REFUSED_MS_MAX / 1e3)] = 1.0
    secrets: tuple[str, ...] = ()
    """Filled in when it is loaded: what must not be told."""

    @property
    def is_idempotent(self) -> bool:
        if self.idempotent is not None:
            return self.idempotent
        return self.method in _IDEMPOTENT or bool(self.idempotency_header)

    @property
    def has_json_body(self) -> bool:
        """Whether what does not stand in the URL is sent as one."""
        return self.method in ("POST", "PUT", "PATCH")

    @property
    def cost(self) -> dict[str, int]:
        return {**self.takes, CALLS: 1}

    def objection(self) -> str:
        """The first rule that it breaks, as "field: rule", or ""."""
        try:
            parts = urlsplit(self.url)
            origin, port = f"{parts.scheme}{parts.netloc}", parts.port
        except ValueError as error:
            return f"url: {error}"
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            return "url: must begin with http://HOST or https://HOST"
        if PLACEHOLDER.search(origin) or parts.fragment or parts.username is not None:
            return "url: takes arguments in its path and query only, and has neither a user nor a fragment"
        if any(ord(character) <= 32 or ord(character) == 127 for character in self.url):
            return "url: must not have spaces or control characters"
        for field, names in (("headers", self.headers), ("idempotency_header", (self.idempotency_header,))):
            if wrong := next((name for name in names if name and _HEADER.fullmatch(name) is None), ""):
                return f"{field}: {wrong!r} is no name of a header"
        if wrong := next((name for name, value in self.headers.items() if not value.isprintable() or not value.isascii()), ""):
            return f"headers.{wrong}: must be printable ASCII"
        if wrong := next((name for name in (*self.takes, *self.spent) if name in HOST_RESOURCES), ""):
            return f"takes.{wrong}: is no quota"
        if wrong := next((name for name in self.spent if name not in self.takes), ""):
            return f"spent.{wrong}: must be one of what it takes"
        return ""


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    endpoints: Annotated[dict[Name, Endpoint], Meta(min_length=1, max_length=limits.SERVICES_MAX)]


def load(path: Path) -> dict[str, Endpoint]:
    """By name, from a file with a table [endpoints.NAME] for each; secrets are read now. Raises ConfigError, which names the file
    and the field, and no secret."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=_File).endpoints
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        rule, _, at = str(error).partition(" - at `$.")
        raise ConfigError(f"{path}: {at.rstrip('`')}: {rule}" if at else f"{path}: {rule}") from None
    return {name: _with_secrets(endpoint, f"{path}: endpoints.{name}") for name, endpoint in found.items()}


def _with_secrets(endpoint: Endpoint, where: str) -> Endpoint:
    if endpoint.secrets:
        raise ConfigError(f"{where}.secrets: stand in its url and headers, as ${{env:NAME}} or ${{file:PATH}}")
    if broken := endpoint.objection():
        raise ConfigError(f"{where}.{broken}")
    secrets: list[str] = []

    def reads(field: str) -> Callable[[re.Match[str]], str]:
        def read(match: re.Match[str]) -> str:
            kind, name = match.groups()
            try:
                value = os.environ.get(name, "") if kind == "env" else Path(name).read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{where}.{field}: {name}: {getattr(error, 'strerror', 'is no text')}") from None
            if not value:
                raise ConfigError(f"{where}.{field}: {'$' if kind == 'env' else ''}{name} is not set, or empty")
            secrets.append(value)
            return value

        return read

    url = _SECRET.sub(reads("url"), endpoint.url)
    headers = {name: _SECRET.sub(reads(f"headers.{name}"), value) for name, value in endpoint.headers.items()}
    found = msgspec.structs.replace(endpoint, url=url, headers=headers, secrets=tuple(secrets))
    if broken := found.objection():
        raise ConfigError(f"{where}.{broken.partition(':')[0]}: a secret in it has what must not be there")
    return found
