"""Filters gRPC's log."""

import logging
import traceback

import grpc


class ClientFaults(logging.Filter):
    """Turns gRPC's error logs with tracebacks that any client can cause, as often as it likes, into debug lines.

    They come from a client that leaves during its answer, and from metadata or method names that are not UTF-8.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns True if a record is to be logged."""
        error = (record.exc_info and record.exc_info[1]) or record.msg
        if not isinstance(error, grpc.aio.InternalError | UnicodeDecodeError) or not _is_raised_in_grpc(error):
            return True
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        record.exc_info = record.exc_text = None
        return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


_CLIENT_FAULTS = ClientFaults()
_LOGGERS = ("grpc._cython.cygrpc", "asyncio")
"""gRPC's own logger, and the one to which asyncio reports failures of gRPC's tasks."""


def quiet_client_faults() -> None:
    """Adds the filter to gRPC's loggers. Can be called again without effect."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_CLIENT_FAULTS)


def _is_raised_in_grpc(error: Exception) -> bool:
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(files) and "_cygrpc" in files[-1]
