"""Replies with averages: one serialization for all calls that get the same."""

import gc

import numpy as np
import pytest

import gradserve
from gradserve_protocol.tensors import Contents, WithContents, encode_message
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from gradserve_server.accumulators.gradient import Average
from gradserve_server.rpc.accumulators.replies import ContentsOfAverage, ReplyEncoder

VALUES = np.random.default_rng(0).normal(size=100_000).astype(np.float32)


def average_of(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Average:
    return Average({"w": values}, 1, 0, 2, 2.0, ())


def reply_with(average: Average, *, duplicate: bool = False) -> WithContents:
    contents = ContentsOfAverage(average=average)
    (tensor,) = contents.tensors(average.arrays)
    component = accumulator_pb2.ComponentGradient(name="w", dense=tensor)
    message = accumulator_pb2.Average(components=[component], step=average.step)
    return WithContents(messages_pb2.PushPullResponse(average=message, duplicate=duplicate), contents)


def test_the_same_reply_is_serialized_once() -> None:
    encode, average = ReplyEncoder(), average_of(VALUES)
    first = encode(reply_with(average))
    assert first == encode_message(reply_with(average))
    assert encode(reply_with(average)) is first
    assert messages_pb2.PushPullResponse.FromString(first).average.components[0].dense.content == VALUES.tobytes()


@pytest.mark.parametrize("duplicate", [False, True])
def test_other_replies_are_serialized_anew(*, duplicate: bool) -> None:
    encode, average, other = ReplyEncoder(), average_of(VALUES), average_of(VALUES + 1)
    encode(reply_with(average))
    for reply in (reply_with(other, duplicate=duplicate), reply_with(average, duplicate=not duplicate)):
        assert encode(reply) == encode_message(reply)


def test_replies_without_an_average_or_without_contents() -> None:
    encode = ReplyEncoder()
    nothing = WithContents(messages_pb2.PushPullResponse(global_step=3), ContentsOfAverage())
    assert encode(nothing) == nothing.message.SerializeToString()
    small = reply_with(average_of(VALUES[:3]))
    assert encode(small) == encode_message(small)
    plain = WithContents(messages_pb2.PushPullResponse(duplicate=True), Contents())
    assert encode(plain) == plain.message.SerializeToString()


def test_nothing_is_kept_longer_than_its_average() -> None:
    encode, average = ReplyEncoder(), average_of(VALUES)
    encode(reply_with(average))
    assert encode._kept is not None
    del average
    gc.collect()
    assert encode._kept is None


def test_long_replies_are_not_kept() -> None:
    encode, average = ReplyEncoder(), average_of(np.zeros(2 << 20, np.float32))
    assert encode(reply_with(average)) is not encode(reply_with(average))


def test_every_reader_gets_the_average_of_its_round(server_address: str, name: str) -> None:
    with gradserve.connect(server_address, transport="grpc") as client:
        acc = client.gradient_accumulator(VALUES, name, keep_averages=2)
        for step in range(3):
            pulled = acc.push_pull(VALUES * step, 1, step)
            np.testing.assert_array_equal(pulled.gradients, VALUES * step)
            for _ in range(2):
                read = acc.read_average(step + 1)
                np.testing.assert_array_equal(read.gradients, VALUES * step)
        acc.delete()
