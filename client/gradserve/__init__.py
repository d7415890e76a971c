"""Average the gradients of many workers, and compute gradient ops, on a gradserve server.

import gradserve

with gradserve.connect("localhost:50051") as client:
    acc = client.conditional_accumulator("float32", shape=(3,), shared_name="w")
    acc.apply_grad([1.0, 2.0, 3.0], local_step=0)
    mean = acc.take_grad(1)
"""

import importlib as _importlib
import importlib.util as _util
import typing as _typing

if _typing.TYPE_CHECKING:
    from gradserve.api import *  # noqa: F403 - its __all__
    from gradserve.api import __all__ as __all__

__version__ = "0.1.0"


def __getattr__(name: str) -> _typing.Any:
    """Imports the client when one of its names is used for the first time: a server needs only parts of it."""
    if not name.startswith("_") and _util.find_spec(f"gradserve.{name}") is not None:
        return _importlib.import_module(f"gradserve.{name}")  # alone, as parts of the client import parts by name
    if not name.startswith("_") or name == "__all__":
        api = _importlib.import_module("gradserve.api")
        globals().update({each: getattr(api, each) for each in api.__all__}, __all__=api.__all__)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
