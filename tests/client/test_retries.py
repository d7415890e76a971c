"""What the client does while a server is unavailable: it tries again, within its time, and keeps the first reason."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.calls.exchange import (
    Allocate,
    Background,
    CleanUp,
    DescribeTransport,
    Download,
    Exchange,
    Introduce,
    Operation,
    Pause,
    Repeat,
    TimeLimits,
    Together,
    Track,
    Unary,
    Upload,
    Whole,
    Work,
)
from gradserve.calls.retries import Contact, RetryPolicy, Step, with_retries
from gradserve.transport.status import may_pass
from gradserve.workers import with_all_patience
from gradserve_protocol.errors import (
    AbortedError,
    CallCancelledError,
    DeadlineExceededError,
    GradserveError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from gradserve_protocol.v1 import accumulator_messages_pb2, server_messages_pb2, tensor_messages_pb2, tensor_pb2

UNARY = Unary("ServerService", "GetServerInfo", server_messages_pb2.GetServerInfoRequest())
WAITING = Unary("AccumulatorService", "TakeGradient", server_messages_pb2.GetServerInfoRequest(), wait=50)
UPLOAD = Upload(tensor_messages_pb2.PutTensorsHeader(), (np.zeros(1000),))
DOWNLOAD = Download(tensor_messages_pb2.GetTensorsRequest(), 8000)
LAST_DOWNLOAD = Download(tensor_messages_pb2.GetTensorsRequest(release=True), 8000)
LAST_READ = Whole(UNARY, repeat=Repeat.UNTIL_SENT)
TIMEOUT_SECONDS = 60.0
POLICY = RetryPolicy()
ATTEMPTS = len(POLICY.pauses) + 1


def one(exchange: Exchange) -> Operation[Any]:
    return (yield exchange)


class Server:
    """Answers attempts as it was told, and remembers them.

    Attributes:
        answers: What the next attempts meet: an error, or an answer.
        takes: How many seconds an attempt takes.
        timeouts: Of the attempts so far.
        pauses: So far.
        introductions: How many there were so far.
    """

    def __init__(self, *answers: Any, takes: float = 0.0) -> None:
        self.answers = list(answers)
        self.takes = takes
        self.timeouts: list[float | None] = []
        self.pauses: list[float] = []
        self.introductions = 0
        self.contact = Contact()
        self._now = 1000.0

    def drive(self, operation: Operation[Any], timeout: float = TIMEOUT_SECONDS) -> Any:
        attempts = with_retries(operation, TimeLimits(timeout), POLICY, lambda: self._now, self.contact)
        try:
            step = next(attempts)
            while True:
                answer = self._meet(step)
                step = attempts.throw(answer) if isinstance(answer, GradserveError) else attempts.send(answer)
        except StopIteration as stop:
            return stop.value

    def _meet(self, step: Step) -> Any:
        assert not isinstance(step, Background | Together | DescribeTransport | Allocate | Track | CleanUp | Work)
        if isinstance(step, Pause):
            self.pauses.append(step.seconds)
            self._now += step.seconds
            return None
        if isinstance(step.exchange, Introduce):
            self.introductions += 1
            return self.answers.pop(0)
        self.timeouts.append(step.timeout)
        self._now += self.takes
        return self.answers.pop(0)


def unavailable(*messages: str, may_pass: bool = False, was_sent: bool = True) -> Iterator[UnavailableError]:
    for message in messages:
        error = UnavailableError(message, was_sent=was_sent)
        error.may_pass = may_pass
        yield error


@pytest.mark.parametrize("exchange", [UNARY, UPLOAD, DOWNLOAD], ids=["unary", "upload", "download"])
@pytest.mark.parametrize("failures", range(ATTEMPTS))
def test_an_attempt_that_succeeds_is_the_answer(exchange: Exchange, failures: int) -> None:
    server = Server(*unavailable(*["no"] * failures), "answer")
    assert server.drive(one(exchange)) == "answer"
    assert len(server.pauses) == failures
    for pause, usual in zip(server.pauses, POLICY.pauses, strict=False):
        assert pause == pytest.approx(usual, rel=0.21)


@pytest.mark.parametrize("exchange", [UNARY, UPLOAD], ids=["unary", "upload"])
def test_five_attempts_are_enough(exchange: Exchange) -> None:
    server = Server(*unavailable(*["no"] * ATTEMPTS))
    with pytest.raises(UnavailableError) as raised:
        server.drive(one(exchange))
    assert raised.value.message == "no"
    assert server.answers == []


def test_a_server_that_has_answered_may_be_starting_again() -> None:
    def two() -> Operation[Any]:
        yield UNARY
        return (yield UNARY)

    num_pauses = 4 + 34
    server = Server("answer", *unavailable(*["no"] * num_pauses), "again")
    assert server.drive(two()) == "again"
    assert len(server.pauses) == num_pauses
    assert 12 < sum(server.pauses) < 18


def test_a_server_that_never_answered_may_be_starting() -> None:
    """A worker that begins during a restart, or with the server."""
    num_pauses = 4 + 34
    server = Server(*unavailable(*["refused"] * num_pauses, may_pass=True), "at last")
    assert server.drive(one(UNARY)) == "at last"
    assert 12 < sum(server.pauses) < 18
    server = Server(*unavailable(*["refused"] * (num_pauses + 1), may_pass=True))
    with pytest.raises(UnavailableError, match="refused"):
        server.drive(one(UNARY))
    assert server.answers == []


def test_a_reason_that_does_not_pass_ends_the_patience() -> None:
    server = Server(*unavailable(*["refused"] * 10, may_pass=True), *unavailable("no such host"))
    with pytest.raises(UnavailableError, match="refused .11 attempts; the last one failed with: no such host"):
        server.drive(one(UNARY))


def test_a_short_time_limit_ends_the_patience() -> None:
    server = Server(*unavailable(*["refused"] * 40, may_pass=True))
    with pytest.raises(UnavailableError, match="refused"):
        server.drive(one(UNARY), timeout=5.0)
    assert 3.5 < sum(server.pauses) < 5


@pytest.mark.parametrize(
    ("message", "passes"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:5: Connection refused", True),
        ("failed to connect to all addresses; last error: unix:/x connect failed: No such file or directory", True),
        ("the server is shutting down", True),
        ("Socket closed", True),
        (None, True),
        ("errors resolving a:1: [field:hostname lookup error: Domain name not found]", False),
        ("DNS resolution failed for a:1", False),
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:5: CERTIFICATE_VERIFY_FAILED", False),
    ],
)
def test_what_may_pass(message: str | None, passes: bool) -> None:
    assert may_pass(message) is passes


@pytest.mark.parametrize(("text", "seconds"), [(None, 15.0), ("", 15.0), ("0", 0.0), ("120", 120.0), ("2.5", 2.5)])
def test_the_patience_of_the_environment(text: str | None, seconds: float) -> None:
    environment = {} if text is None else {"GRADSERVE_RESTART_PATIENCE": text}
    assert RetryPolicy.wanted(environment).restart_patience == seconds


def test_a_call_with_all_patience_has_its_own_time_limit() -> None:
    """However long the server is away, and whatever other calls of the client wait for."""
    with with_all_patience():
        server = Server("answer", *unavailable(*["no"] * 500), "again")
        assert server.drive(one(UNARY), timeout=math.inf) == "answer"
        assert server.drive(one(UNARY), timeout=math.inf) == "again"
        server = Server("answer", *unavailable(*["no"] * 500))
        server.drive(one(UNARY))
        with pytest.raises(UnavailableError) as raised:
            server.drive(one(UNARY), timeout=100.0)
        assert 99 < sum(server.pauses) <= 100
        (note,) = raised.value.__notes__
        assert "until the time limit of the call was over, 100 s" in note
    assert RetryPolicy().patience == 15.0


def test_the_error_says_what_has_limited_the_patience() -> None:
    server = Server("answer", *unavailable(*["no"] * 100))
    server.drive(one(UNARY), timeout=1000.0)
    with pytest.raises(UnavailableError) as raised:
        server.drive(one(UNARY), timeout=1000.0)
    (note,) = raised.value.__notes__
    assert "tried again for 15 s" in note
    assert "GRADSERVE_RESTART_PATIENCE" in note


def test_patience_that_the_user_has_chosen_holds_in_any_case() -> None:
    with with_all_patience():
        assert RetryPolicy.wanted({"GRADSERVE_RESTART_PATIENCE": "3"}).patience == 3.0
        assert RetryPolicy.wanted({}).patience == math.inf


@pytest.mark.parametrize("text", ["-1", "soon", "inf", "nan"])
def test_patience_that_is_none(text: str) -> None:
    expected = f"expected a number of seconds for GRADSERVE_RESTART_PATIENCE, got '{text}'"
    with pytest.raises(InvalidArgumentError, match=expected):
        RetryPolicy.wanted({"GRADSERVE_RESTART_PATIENCE": text})


@pytest.mark.parametrize("exchange", [LAST_DOWNLOAD, LAST_READ], ids=["download", "call"])
class TestTheLastReadOfATensor:
    def test_is_sent_once(self, exchange: Exchange) -> None:
        server = Server(*unavailable("lost"))
        with pytest.raises(UnavailableError, match="lost") as raised:
            server.drive(one(exchange))
        assert server.pauses == []
        assert not hasattr(raised.value, "__notes__")

    def test_is_tried_again_as_long_as_there_is_no_connection(self, exchange: Exchange) -> None:
        server = Server(*unavailable("refused", "refused", was_sent=False), "answer")
        assert server.drive(one(exchange)) == "answer"
        assert len(server.pauses) == 2

    def test_is_sent_once_also_after_that(self, exchange: Exchange) -> None:
        server = Server(*unavailable("refused", was_sent=False), *unavailable("lost"))
        with pytest.raises(UnavailableError, match="refused .2 attempts; the last one failed with: lost"):
            server.drive(one(exchange))
        assert len(server.pauses) == 1


def test_what_is_never_made_again() -> None:
    """A client that closes does not wait to clean up at a server that is away."""
    server = Server(*unavailable("refused", may_pass=True, was_sent=False))
    with pytest.raises(UnavailableError, match="refused"):
        server.drive(one(Whole(UNARY, repeat=Repeat.NEVER)))
    assert server.pauses == []


def test_the_first_reason_is_kept() -> None:
    server = Server(*unavailable("the server is shutting down", "b", "c", "d", "connection refused"))
    with pytest.raises(UnavailableError) as raised:
        server.drive(one(UNARY))
    assert raised.value.message == (
        "the server is shutting down (5 attempts; the last one failed with: connection refused)"
    )
    assert raised.value.__cause__ is None


def test_the_same_reason_is_given_once() -> None:
    server = Server(*unavailable("a", "b", "c", "d", "no connection (by IPv6)"))
    server.answers[0] = UnavailableError("no connection (by IPv4)")
    with pytest.raises(UnavailableError) as raised:
        server.drive(one(UNARY))
    assert raised.value.message == "no connection (by IPv4)"


def test_another_error_ends_the_attempts_and_names_the_first_reason() -> None:
    server = Server(*unavailable("the server is shutting down"), NotFoundError("no accumulator"))
    with pytest.raises(NotFoundError) as raised:
        server.drive(one(UNARY))
    assert raised.value.message == "no accumulator"
    assert raised.value.__notes__ == ["an earlier attempt failed: the server is shutting down [GS_UNAVAILABLE]"]


@pytest.mark.parametrize("error", [NotFoundError("no"), gradserve.CallCancelledError("closed")])
def test_other_errors_are_not_tried_again(error: GradserveError) -> None:
    with pytest.raises(type(error)) as raised:
        Server(error).drive(one(UNARY))
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("exchange", [UNARY, UPLOAD, DOWNLOAD], ids=["unary", "upload", "download"])
def test_a_caller_who_is_not_known_is_introduced(exchange: Exchange) -> None:
    server = Server(UnauthenticatedError("who?"), None, "answer")
    assert server.drive(one(exchange)) == "answer"
    assert server.introductions == 1


def test_a_caller_who_is_introduced_anew_after_a_restart() -> None:
    server = Server(
        UnauthenticatedError("who?"), None, UnavailableError("gone"), UnauthenticatedError("who?"), None, "answer"
    )
    assert server.drive(one(UNARY)) == "answer"
    assert server.introductions == 2


def test_an_introduction_that_meets_no_server_is_made_again() -> None:
    server = Server(
        UnauthenticatedError("who?"), UnavailableError("gone"), UnauthenticatedError("who?"), None, "answer"
    )
    assert server.drive(one(UNARY)) == "answer"
    assert (server.introductions, len(server.pauses)) == (2, 1)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([""], "who?"),
        (
            ["no socket"],
            "who?; without a token, users are known only where they share memory with the server (no socket)",
        ),
        ([None, UnauthenticatedError("never heard of you")], "never heard of you"),
    ],
)
def test_a_caller_who_stays_unknown(answers: list[Any], message: str) -> None:
    server = Server(UnavailableError("gone"), UnauthenticatedError("who?"), *answers)
    with pytest.raises(UnauthenticatedError) as raised:
        server.drive(one(UNARY))
    assert raised.value.message == message
    assert raised.value.__notes__ == ["an earlier attempt failed: gone [GS_UNAVAILABLE]"]
    assert server.introductions == 1


@pytest.mark.parametrize(
    ("exchange", "limit"),
    [(UNARY, TIMEOUT_SECONDS), (WAITING, 55.0), (UPLOAD, TIMEOUT_SECONDS + 0.008)],
    ids=["unary", "waiting", "upload"],
)
def test_all_attempts_share_the_time(exchange: Exchange, limit: float) -> None:
    server = Server(*unavailable("no", "no"), "answer", takes=10)
    assert server.drive(one(exchange)) == "answer"
    first, second, third = (timeout for timeout in server.timeouts if timeout is not None)
    assert first == pytest.approx(limit)
    assert second == pytest.approx(limit - 10 - server.pauses[0])
    assert third == pytest.approx(limit - 20 - sum(server.pauses))


def test_when_the_time_is_over_it_is_over() -> None:
    server = Server(*unavailable("no", "no"), takes=TIMEOUT_SECONDS / 2)
    with pytest.raises(UnavailableError, match=r"^no \[\w+\]\nThe client tried again until .* was over, 60 s"):
        server.drive(one(UNARY))
    assert len(server.pauses) == 1


def test_endless_time() -> None:
    server = Server(*unavailable("no"), "answer", takes=1e9)
    assert server.drive(one(UNARY), timeout=math.inf) == "answer"
    assert server.timeouts == [None, None]


def test_each_exchange_of_an_operation_has_attempts_and_time_of_its_own() -> None:
    def two() -> Operation[list[Any]]:
        first = yield UNARY
        yield Pause(7)
        second = yield UPLOAD
        return [first, second]

    server = Server(*unavailable(*["no"] * 4), 1, *unavailable(*["no"] * 4), 2, takes=1)
    assert server.drive(two()) == [1, 2]
    assert server.timeouts[5] == pytest.approx(TIMEOUT_SECONDS + 0.008)
    assert server.pauses[4] == 7


def test_an_operation_can_go_on_after_an_error() -> None:
    def careful() -> Operation[Any]:
        try:
            yield UNARY
        except UnavailableError:
            return (yield UNARY)

    server = Server(*unavailable(*["no"] * ATTEMPTS), "answer")
    assert server.drive(careful()) == "answer"


def test_closing_closes_the_operation() -> None:
    ended: list[str] = []

    def operation() -> Operation[Any]:
        try:
            yield UNARY
        finally:
            ended.append("closed")

    attempts = with_retries(operation(), TimeLimits(TIMEOUT_SECONDS), POLICY, lambda: 0.0, Contact())
    next(attempts)
    attempts.close()
    assert ended == ["closed"]


ANOTHER_RUN = AbortedError("the server was started again", field="accumulator.server_incarnation")


@pytest.mark.parametrize(
    "before",
    [(), (UnavailableError("gone"),), (ANOTHER_RUN, "renewed", UnavailableError("gone"))],
    ids=["at once", "after a failure", "twice"],
)
def test_an_exchange_for_an_earlier_run_is_renewed_within_its_time(before: tuple[Any, ...]) -> None:
    renewed: list[str] = []

    def renew() -> Operation[None]:
        renewed.append((yield UNARY))

    server = Server(*before, ANOTHER_RUN, "renewed", "answer", takes=1.0)
    assert server.drive(one(WAITING._replace(renewal=renew))) == "answer"
    assert set(renewed) == {"renewed"}
    last = server.timeouts[-1]
    assert last is not None
    assert last <= 50 + 5 - (len(server.timeouts) - 1), "repeated exchanges have no more time"


def test_an_exchange_that_cannot_be_renewed_fails() -> None:
    with pytest.raises(AbortedError):
        Server(ANOTHER_RUN).drive(one(UNARY))


class TestLimits:
    def test_a_refused_call_is_made_again_after_the_time_that_the_server_named(self) -> None:
        server = Server(*[ResourceExhaustedError("too many", retry_after=3.0)] * 4, "answer")
        assert server.drive(one(UNARY)) == "answer"
        assert len(server.pauses) == 4
        assert all(3.0 <= pause <= 3.0 * (1 + POLICY.jitter) for pause in server.pauses)

    def test_but_not_beyond_its_time_limit(self) -> None:
        error = ResourceExhaustedError("too many", retry_after=TIMEOUT_SECONDS)
        server = Server(error)
        with pytest.raises(ResourceExhaustedError) as raised:
            server.drive(one(UNARY))
        assert raised.value is error
        assert server.pauses == []

    @pytest.mark.parametrize(
        ("exchange", "retry_after"), [(UNARY, None), (LAST_DOWNLOAD, 1.0)], ids=["no time", "download"]
    )
    def test_others_are_not(self, exchange: Exchange, retry_after: float | None) -> None:
        server = Server(ResourceExhaustedError("too many", retry_after=retry_after))
        with pytest.raises(ResourceExhaustedError):
            server.drive(one(exchange))
        assert server.pauses == []

    def test_whatever_comes_in_between(self) -> None:
        limited, unavailable = ResourceExhaustedError("too many", retry_after=1.0), UnavailableError("gone")
        server = Server(unavailable, limited, unavailable, limited, "answer")
        assert server.drive(one(UNARY)) == "answer"
        assert len(server.pauses) == 4


LOST = {
    "it is interrupted": GeneratorExit(),
    "its client is closed": CallCancelledError("closed"),
    "the server has failed": InternalError("no"),
}


@pytest.mark.parametrize("case", LOST)
def test_the_receipt_of_an_attempt_without_a_reply_is_lost(case: str) -> None:
    lost: list[tuple[int, bytes]] = []
    placement = tensor_pb2.Placement(receipt=b"first")
    call = Unary("A", "T", accumulator_messages_pb2.TakeGradientRequest(placement=placement), target=3)
    contact = Contact(lambda target, receipt: lost.append((target, receipt)))
    attempts = with_retries(one(call), TimeLimits(TIMEOUT_SECONDS), POLICY, lambda: 0.0, contact)
    next(attempts)
    with pytest.raises(type(LOST[case])):
        attempts.throw(LOST[case])
    assert lost == [(3, b"first")]


@pytest.mark.parametrize(("seconds", "is_lost"), [(TIMEOUT_SECONDS / 2, False), (TIMEOUT_SECONDS, True)])
def test_the_servers_own_end_of_a_wait_is_a_reply(seconds: float, is_lost: bool) -> None:
    lost: list[bytes] = []
    now = [0.0]
    request = tensor_messages_pb2.StoreTensorsRequest(receipt=b"first")
    contact = Contact(lambda _, receipt: lost.append(receipt))
    attempts = with_retries(one(Unary("A", "T", request)), TimeLimits(TIMEOUT_SECONDS), POLICY, lambda: now[0], contact)
    next(attempts)
    now[0] = seconds
    with pytest.raises(DeadlineExceededError):
        attempts.throw(DeadlineExceededError("too late"))
    assert lost == [b"first"] * is_lost
