"""Gradient ops and accumulator ops, called with `await`."""

from gradserve.calls.raw_ops import RawOpsCalls
from gradserve.face import AsyncFace, awaiting, with_operations


@with_operations(RawOpsCalls, awaiting)
class RawOps(AsyncFace[RawOpsCalls]):
    """TensorFlow's ops by their names there, carried out by the server.

    Arguments and defaults are TensorFlow's, and all are keywords. An input is an array, something NumPy makes one
    of, or the TensorHandle of one on the server. Several outputs are a named tuple with TensorFlow's names.
    """
