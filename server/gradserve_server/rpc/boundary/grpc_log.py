"""What gRPC writes to the log."""

import logging
import traceback

import grpc


class ClientFaults(logging.Filter):
    """Makes a line for debugging of an error with a traceback that any client can make gRPC log, as often as it likes.

    These are a client that leaves while it is answered, and metadata or the name of a method that are not UTF-8.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Tells whether a record is logged."""
        error = (record.exc_info and record.exc_info[1]) or record.msg
        if not isinstance(error, grpc.aio.InternalError | UnicodeDecodeError) or not _is_raised_in_grpc(error):
            return True
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        record.exc_info = record.exc_text = None
        return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


_CLIENT_FAULTS = ClientFaults()
_LOGGERS = ("grpc._cython.cygrpc", "asyncio")
"""gRPC's own, and where asyncio tells what became of gRPC's tasks."""


def quiet_client_faults() -> None:
    """Puts the filter before the logs that gRPC writes to. Doing so twice has no further effect."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_CLIENT_FAULTS)


def _is_raised_in_grpc(error: Exception) -> bool:
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(files) and "_cygrpc" in files[-1]
