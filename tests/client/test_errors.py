"""Errors: what they are, and how they come of statuses."""

import copy
import inspect
import pickle

import grpc
import pytest

import gradserve
import gradserve.aio
from gradserve.transport.status import ERRORS, error_from_status
from gradserve_protocol import errors

ERROR_TYPES = sorted(
    (each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, gradserve.GradserveError)),
    key=lambda each: each.__name__,
)


@pytest.mark.parametrize("error_type", ERROR_TYPES, ids=lambda each: each.__name__)
def test_errors_can_be_read_pickled_and_copied(error_type: type[gradserve.GradserveError]) -> None:
    error = error_type("what was wrong", field="gradient[0]")
    error.request_id = 7
    assert str(error) == f"what was wrong [{error_type.code}]"
    assert repr(error) == f"{error_type.__name__}('what was wrong')"
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):  # noqa: S301
        assert type(other) is error_type
        assert (str(other), other.message) == (str(error), "what was wrong")
        assert (other.field, other.request_id, other.code) == ("gradient[0]", 7, error_type.code)


@pytest.mark.parametrize(
    ("error_type", "builtin"),
    [
        (gradserve.InvalidArgumentError, ValueError),
        (gradserve.NotFoundError, KeyError),
        (gradserve.OutOfRangeError, IndexError),
        (gradserve.DeadlineExceededError, TimeoutError),
        (gradserve.UnavailableError, ConnectionError),
        (gradserve.UnauthenticatedError, PermissionError),
        (gradserve.PermissionDeniedError, PermissionError),
        (gradserve.ForkedClientError, RuntimeError),
    ],
)
def test_errors_are_what_python_calls_them(error_type: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error_type, builtin)
    assert issubclass(error_type, gradserve.GradserveError)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_is_an_error(code: grpc.StatusCode) -> None:
    assert code in ERRORS
    error = error_from_status(code, "", None)
    assert type(error) is ERRORS[code]
    assert code.name in str(error)


def test_malformed_details_are_passed_over() -> None:
    error = error_from_status(grpc.StatusCode.NOT_FOUND, "no", (("grpc-status-details-bin", b"\xff\xff"), ("a", "b")))
    assert (error.message, error.field, error.code) == ("no", None, "GS_NOT_FOUND")
