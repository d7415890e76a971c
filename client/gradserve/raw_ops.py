"""Gradient ops and accumulator ops, called from ordinary code. `gradserve.aio` has the same with `await`."""

from gradserve.calls.raw_ops import RawOpsCalls
from gradserve.face import BlockingFace, blocking, with_operations


@with_operations(RawOpsCalls, blocking)
class RawOps(BlockingFace[RawOpsCalls]):
    """TensorFlow's ops by their names there, carried out by the server.

    Arguments and defaults are TensorFlow's, and all are keywords. An input is an array, something NumPy makes one
    of, or the TensorHandle of one on the server. Several outputs are a named tuple with TensorFlow's names.
    """
