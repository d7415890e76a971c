"""The types of settings, and the words for messages about them."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_BYTES = (1 << 63) - 1
_MAX_COUNT = (1 << 31) - 1
MAX_SECONDS = 1e9


@dataclass(frozen=True)
class Expected:
    """The words in which messages say what a setting can be."""

    words: str


def _no_boolean(value: object) -> object:
    """Refuses booleans, which Python takes for 0 and 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("boolean", "it is a boolean")
    return value


NUMBER = BeforeValidator(_no_boolean)
Bytes = Annotated[ByteSize, NUMBER, Field(gt=0, le=MAX_BYTES), Expected("a size such as 4GiB or 512MiB")]
Count = Annotated[int, NUMBER, Field(gt=0, le=_MAX_COUNT), Expected(f"a whole number from 1 to {_MAX_COUNT}")]
Seconds = Annotated[
    float,
    NUMBER,
    Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False),
    Expected("a number of seconds greater than 0, such as 0.5 or 600"),
]


class Concern(BaseModel):
    """Settings that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid")
