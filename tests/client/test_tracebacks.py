"""A traceback of an error shows the line that made the call, and next to nothing of the client."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from tests.servers.connecting import transport_of

PACKAGE = Path(gradserve.__file__).parent


def own_frames(error: BaseException) -> list[str]:
    """Returns the frames of a traceback below the first, which is the test's, and checks that it is."""
    first, *others = traceback.extract_tb(error.__traceback__)
    assert first.filename == __file__
    return [f"{frame.filename}:{frame.name}" for frame in others if PACKAGE in Path(frame.filename).parents]


Call = Callable[[Any, Any, Any], Any]
CALLS: dict[str, Call] = {
    "refused by the client": lambda client, _acc, _layer: client.conditional_accumulator("float32", reduction_type="?"),
    "refused when the gradient is converted": lambda _client, acc, _layer: acc.apply_grad(["a", "b"]),
    "refused by the server": lambda _client, acc, _layer: acc.apply_grad([1.0, 2.0, 3.0]),
    "after a wait": lambda _client, acc, _layer: acc.take_grad(1, timeout=0.0),
    "of an op": lambda client, _acc, _layer: client.raw_ops.GRUBlockCell(
        x=np.zeros((2, 3)), h_prev=np.zeros((2, 3)), w_ru=[], w_c=[], b_ru=[], b_c=[]
    ),
    "of a stream": lambda client, _acc, _layer: client.get(gradserve.TensorHandle("?", np.dtype("float32"), (2,))),
    "of a layer": lambda _client, _acc, layer: layer.backward(np.zeros((2, 3))),
    "of a layer's call": lambda _client, _acc, layer: layer(np.zeros(3)),
}


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
def test_a_call(client: gradserve.Client, call: Call) -> None:
    accumulator, layer = client.conditional_accumulator("float32", (2,)), client.batch_norm()
    with pytest.raises(gradserve.GradserveError) as raised:
        call(client, accumulator, layer)
    assert own_frames(raised.value) == []


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
async def test_a_call_aio(server_address: str, call: Call) -> None:
    async with gradserve.aio.connect(server_address) as client:
        accumulator, layer = await client.conditional_accumulator("float32", (2,)), await client.batch_norm()
        with pytest.raises(gradserve.GradserveError) as raised:
            await call(client, accumulator, layer)
    assert own_frames(raised.value) == []


def test_connecting() -> None:
    for connect in (gradserve.connect, gradserve.aio.connect):
        with pytest.raises(gradserve.InvalidArgumentError) as raised:
            connect("localhost:50051", timeout=-1)
        assert len(own_frames(raised.value)) <= 1


def test_a_property(server_address: str) -> None:
    client = gradserve.connect(server_address)
    layer = client.batch_norm()
    client.close()
    with pytest.raises(gradserve.CallCancelledError) as raised:
        _ = layer.variables
    assert len(own_frames(raised.value)) <= 1


def test_the_whole_traceback_is_short(client: gradserve.Client) -> None:
    accumulator = client.conditional_accumulator("float32", (2,))
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        accumulator.apply_grad([1.0, 2.0, 3.0])
    lines = "".join(traceback.format_exception(raised.value)).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[2].strip() == "accumulator.apply_grad([1.0, 2.0, 3.0])"
    assert lines[-1] == f"gradserve.InvalidArgumentError: {raised.value.message} [GS_SHAPE_MISMATCH]"
    assert len(lines) <= 5


def test_what_the_caller_was_handling_is_told(client: gradserve.Client) -> None:
    """As for any exception: "During handling of the above exception, another exception occurred"."""
    gone = client.put([1.0])
    client.delete(gone)

    def recompute() -> None:
        try:
            Path("no such checkpoint").read_bytes()
        except FileNotFoundError:
            client.get(gone)

    with pytest.raises(gradserve.NotFoundError) as raised:
        recompute()
    assert type(raised.value.__context__) is FileNotFoundError
    assert not raised.value.__suppress_context__
    with pytest.raises(gradserve.NotFoundError) as raised:
        client.get(gone)
    assert raised.value.__context__ is None


def test_a_fault_of_the_client_keeps_its_frames(client: gradserve.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(transport_of(client), "run", lambda _operation: fail())
    with pytest.raises(ZeroDivisionError) as raised:
        client.server_info()
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][1:] == [
        "method",
        "<lambda>",
        "fail",
    ]


def test_an_error_keeps_its_cause(client: gradserve.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_operation: object) -> None:
        raise gradserve.InternalError("refused") from ValueError("the reason")

    monkeypatch.setattr(transport_of(client), "run", fail)
    with pytest.raises(gradserve.InternalError) as raised:
        client.server_info()
    assert str(raised.value.__cause__) == "the reason"
    assert raised.value.__suppress_context__
