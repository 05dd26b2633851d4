"""Types of fields, with their bounds: what a decoder checks."""

from typing import Annotated

from msgspec import Meta

from tangram import limits

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
Kind = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_.-]{0,63}\Z")]
Text = Annotated[str, Meta(max_length=limits.DETAIL_LENGTH_MAX)]
Count = Annotated[int, Meta(ge=0, le=limits.NUMBER_MAX)]
Number = Annotated[int, Meta(ge=1, le=limits.NUMBER_MAX)]
Amount = Annotated[int, Meta(ge=0, le=limits.AMOUNT_MAX)]
CoreId = Annotated[int, Meta(ge=0, le=limits.CORE_ID_MAX)]
GpuId = Annotated[int, Meta(ge=0, le=limits.GPU_ID_MAX)]
Setting = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Ids = Annotated[list[Count], Meta(max_length=limits.ENVELOPE_ITEMS_MAX)]
Items = Annotated[list[bytes], Meta(max_length=limits.ENVELOPE_ITEMS_MAX)]
Nonce = Annotated[bytes, Meta(min_length=limits.NONCE_BYTES, max_length=limits.NONCE_BYTES)]
Path = Annotated[str, Meta(min_length=1, max_length=limits.PATH_BYTES_MAX, pattern=r"^[^\x00]+\Z")]
Argument = Annotated[str, Meta(max_length=limits.ARGUMENT_BYTES_MAX, pattern=r"^[^\x00]*\Z")]
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z")]
