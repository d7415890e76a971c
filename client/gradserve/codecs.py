"""Codecs: packed forms in which updates and versions of parameters travel, with fewer bytes and some error.

parameters.push_pull(update, version, codec=gradserve.codecs.int4(), codec_down="bf16")

The name of a codec is as good as its value. `int8` and `bf16` are for updates and for versions. With codecs below 8
bits, `Parameters` keeps the error of each update, by component and worker, and adds it to the worker's next one, so
that it is only late.
"""

from dataclasses import dataclass
from typing import Any

from gradserve.public_names import publish as _publish
from gradserve_protocol.argument import Argument
from gradserve_protocol.codecs import CODECS
from gradserve_protocol.codecs import Codec as Packing

__all__ = ["Codec", "bf16", "e3m0", "int4", "int8", "topk"]


@dataclass(frozen=True)
class Codec:
    """A codec.

    Attributes:
        name: "bf16", "int8", "int4", "e3m0" or "topk".
        stochastic: Whether values are rounded up or down at random, so that their mean is kept: for "e3m0" only.
    """

    name: str
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.name not in CODECS:
            raise Argument("name").error(f"a codec out of {', '.join(CODECS)}", self.name)
        if not isinstance(self.stochastic, bool) or (self.stochastic and self.name != "e3m0"):
            raise Argument("stochastic").error("False, or a flag for e3m0", self.stochastic)


def bf16() -> Codec:
    """Returns 16 bits a value: rounded to bfloat16, to nearest even. Relative error: 0.2 %."""
    return Codec("bf16")


def int8() -> Codec:
    """Returns 8 bits a value, and a scale for 256 values. Relative error of normally distributed values: 0.7 %."""
    return Codec("int8")


def int4() -> Codec:
    """Returns 4 bits a value, and a scale for 32 values. Relative error of normally distributed values: 10 %."""
    return Codec("int4")


def e3m0(*, stochastic: bool = False) -> Codec:
    """Returns 4 bits a value, a sign and a power of two, and a scale for 256 values.

    Args:
        stochastic: Whether values are rounded up or down at random, so that their mean is kept. The same worker, step
            and component give the same bits.

    Returns:
        The codec. Relative error of normally distributed values: 19 %, or 28 % stochastically.
    """
    return Codec("e3m0", stochastic)


def topk() -> Codec:
    """Returns the 64 largest of 4096 values, with a sign each and one magnitude: 1/141 of float32. For updates only.

    Most of an update comes later, with the updates to which its error is added.
    """
    return Codec("topk")


def as_codec(codec: Any, argument: Argument, *, of_version: bool = False) -> Codec | None:
    """Returns the codec that an argument means; None for none.

    Args:
        codec: A codec, its name, or None.
        argument: The argument.
        of_version: Whether versions are to be packed, by the server.

    Raises:
        InvalidArgumentError: It is none of these, or not for versions.
    """
    if codec is None:
        return None
    if isinstance(codec, str) and codec in CODECS:
        codec = Codec(codec)
    if not isinstance(codec, Codec):
        raise argument.error(f"a codec of gradserve.codecs, its name out of {', '.join(CODECS)}, or None", codec)
    if of_version and (codec.stochastic or not packing_of(codec).packs_versions):
        known = ", ".join([each.name for each in CODECS.values() if each.packs_versions])
        raise argument.error(f"a codec for versions, {known}, that rounds to the nearest number", codec)
    return codec


def packing_of(codec: Codec) -> Packing:
    """Returns what packs arrays with a codec."""
    return CODECS[codec.name]


_publish(__name__, globals(), __all__)
