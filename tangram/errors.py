"""The exceptions a user of the package can meet. What an action's program did is never an exception: it is an Outcome."""

class TangramError(Exception):
    """Base of the errors below."""


class InvalidRequest(TangramError, ValueError):
    """A request that breaks a rule, found before anything was sent.

    Attributes: field (dotted name of the offending part), rule (what it must be), value (its repr, at most 100 characters).
    """

    def __init__(self, field: str, rule: str, value: object = None) -> None:
        self.field, self.rule, self.value = field, rule, repr(value)[:100]
        super().__init__(f"{field}: {rule}" + ("" if value is None else f" (got {self.value})"))


class ConfigError(TangramError, ValueError):
    """A configuration file or option that cannot be used; the message names the file and the field."""


class SessionError(TangramError):
    """A session could not be opened. Attribute: result, the Result of the opening action."""

    def __init__(self, result: object) -> None:
        self.result = result
        super().__init__(f"session could not be opened: {result}")


class ClientClosed(TangramError):
    """The client was closed while the action was open; the action itself goes on and can be read by its id."""
