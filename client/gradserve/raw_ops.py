"""Gradient ops and accumulator ops, called from ordinary code. `gradserve.aio` has the same with `await`."""

from typing import NoReturn

from gradserve.calls.raw_ops import RawOpsCalls, unknown_op
from gradserve.face import BlockingFace, blocking, with_operations


@with_operations(RawOpsCalls, blocking)
class RawOps(BlockingFace[RawOpsCalls]):
    """TensorFlow's ops under their TensorFlow names, carried out by the server.

    Arguments and defaults are TensorFlow's; all are keywords. An input is an array, something that NumPy converts to
    one, or the TensorHandle of a tensor on the server. Several outputs are a named tuple with TensorFlow's names.
    """

    def __getattr__(self, name: str) -> NoReturn:
        raise unknown_op(name)
