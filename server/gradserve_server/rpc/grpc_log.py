"""What gRPC writes to the log."""

import logging

import grpc


class ClientFaults(logging.Filter):
    """Makes a line for debugging of an error with a traceback that any client can make gRPC log, as often as it likes.

    These are a client that leaves while it is answered, and metadata or the name of a method that are not UTF-8.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Tells whether a record is logged."""
        error = record.exc_info[1] if record.exc_info else record.msg
        if not isinstance(error, grpc.aio.InternalError | UnicodeDecodeError):
            return True
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        record.exc_info = record.exc_text = None
        return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


_CLIENT_FAULTS = ClientFaults()


def quiet_client_faults() -> None:
    """Puts the filter before gRPC's log. Doing so twice has no further effect."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_CLIENT_FAULTS)
