"""The errors that calls raise.

GradserveError
├── InvalidArgumentError (ValueError)       the request can never succeed as it is
├── NotFoundError (KeyError)                no such handle, accumulator or layer
├── AlreadyExistsError                      the name is taken by something else
├── AbortedError                            the state the call depended on is gone
├── LostError                               the server was started again, and has lost what is named
├── NotDurableError                         the client was closed before its gradients were durable
├── StaleGradientError                      the accumulator has moved on; carries the newest average
├── OutOfRangeError (IndexError)            the requested step is not available
├── DeadlineExceededError (TimeoutError)    the call reached its time limit
├── ResourceExhaustedError                  a limit of the server was reached
├── UnavailableError (ConnectionError)      no server at the address, or it is shutting down
├── UnauthenticatedError (PermissionError)  missing or wrong credentials
├── PermissionDeniedError (PermissionError) these credentials do not allow the call
├── UnimplementedError                      the server is older than this client
├── CallCancelledError                      the client was closed during the call
├── InternalError                           a fault of the server
└── ForkedClientError (RuntimeError)        the client was connected before a fork
"""

from gradserve_protocol.errors import (
    AbortedError,
    AlreadyExistsError,
    CallCancelledError,
    DeadlineExceededError,
    ForkedClientError,
    GradserveError,
    InternalError,
    InvalidArgumentError,
    LostError,
    NotDurableError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    StaleGradientError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "CallCancelledError",
    "DeadlineExceededError",
    "ForkedClientError",
    "GradserveError",
    "InternalError",
    "InvalidArgumentError",
    "LostError",
    "NotDurableError",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "StaleGradientError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
]
