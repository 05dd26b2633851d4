"""From a call's arguments to the request that is sent: pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlencode, urlsplit, urlunsplit

import msgspec

from tangram.executors.api.declared import PLACEHOLDER, Endpoint
from tangram.messages import MALFORMED, Call


class BadCall(ValueError):
    """What a call asks for cannot be sent; the message names the field and the rule."""


class Prepared(NamedTuple):
    url: str
    headers: dict[str, str]
    body: bytes


def prepare(endpoint: Endpoint, call: Call, key: str) -> Prepared:
    """key: the same at each attempt of one action. Raises BadCall."""
    try:
        arguments = msgspec.msgpack.decode(call.arguments, type=dict[str, Any])
    except MALFORMED as error:
        raise BadCall(f"arguments: {error}") from None
    left = dict(arguments)

    def fill(part: str, *, is_path: bool) -> str:
        def value(name: str) -> str:
            if name not in arguments:
                raise BadCall(f"arguments.{name}: the endpoint's URL needs it")
            left.pop(name, None)
            return _quoted(_text(name, arguments[name]), is_path=is_path)

        return PLACEHOLDER.sub(lambda match: value(match[1]), part)

    scheme, netloc, path, query, _ = urlsplit(endpoint.url)
    path, query = fill(path, is_path=True), fill(query, is_path=False)
    if any(segment in (".", "..") for segment in unquote(path).split("/")):
        raise BadCall("arguments: must not make a . or .. in the URL's path")
    headers = dict(endpoint.headers)
    body = call.body
    if endpoint.has_json_body and not body and not call.content_type:
        try:
            body = msgspec.json.encode(left)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadCall(f"arguments: cannot be JSON: {error}") from None
        headers.setdefault("content-type", "application/json")
    else:
        if body and not endpoint.has_json_body:
            raise BadCall(f"body: a {endpoint.method} has none")
        if call.content_type:
            headers["content-type"] = call.content_type
        query = "&".join(each for each in (query, urlencode(_pairs(left), quote_via=quote)) if each)
    if endpoint.idempotency_header:
        headers[endpoint.idempotency_header] = key
    return Prepared(urlunsplit((scheme, netloc, path, query, "")), headers, body)


def _quoted(text: str, *, is_path: bool) -> str:
    try:
        return quote(text, safe="" if is_path else "~")
    except UnicodeEncodeError as error:
        raise BadCall(f"arguments: must be text that UTF-8 can hold: {error.reason}") from None


def _pairs(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A list stands for its name several times, None for nothing."""
    found = []
    for name, value in arguments.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                found.append((name, _text(name, each)))
    return found


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise BadCall(f"arguments.{name}: must be a text or a number where it goes into the URL")
