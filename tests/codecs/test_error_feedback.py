"""The errors of packed updates: added to the next one of the worker, once the server has accepted the update."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import codecs
from gradserve.testing import Faults
from gradserve.testing.fixtures import gradserve_client, gradserve_faults, gradserve_server
from gradserve_protocol.codecs import CODECS
from gradserve_testing import LocalServer
from tests.servers.polling import eventually_async

__all__ = ["gradserve_client", "gradserve_faults", "gradserve_server"]  # fixtures

UPDATE = np.random.default_rng(4).normal(size=300).astype(np.float32)
KEPT = ["int4", "e3m0", "topk"]
by_kept = pytest.mark.parametrize("codec", KEPT)


class Sender:
    """Sends what a codec with feedback should, as it is told.

    Attributes:
        error: The error of the updates that were accepted.
    """

    def __init__(self, codec: str) -> None:
        self._codec = CODECS[codec]
        self.error = np.zeros(UPDATE.size, np.float32)

    def sent(self, update: Any, *, accepted: bool = True) -> Any:
        whole = update + self.error
        decoded = self._codec.decode(self._codec.encode(whole), update.size)
        if accepted:
            self.error = whole - decoded
        return decoded


def made_by(client: gradserve.Client, name: str, **properties: Any) -> gradserve.Parameters:
    return client.parameters({"w": np.zeros(UPDATE.size, np.float32)}, shared_name=name, **properties)


@by_kept
def test_errors_come_later(client: gradserve.Client, name: str, codec: str) -> None:
    made, sender = made_by(client, name), Sender(codec)
    expected = np.zeros(UPDATE.size, np.float32)
    for step in range(20):
        expected = expected + sender.sent(UPDATE)
        made.push({"w": UPDATE}, step, codec=codec)
        assert np.array_equal(made.read()["w"], expected)
    lost = np.linalg.norm(expected - 20 * UPDATE) / np.linalg.norm(UPDATE)
    assert lost < {"int4": 0.3, "e3m0": 0.5, "topk": 4}[codec]  # not 20 times as much as of one update


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_others_forget_them(client: gradserve.Client, name: str, codec: str) -> None:
    made = made_by(client, name)
    for step in range(2):
        made.push({"w": UPDATE}, step, codec=codec)
    decoded = CODECS[codec].decode(CODECS[codec].encode(UPDATE), UPDATE.size)
    assert np.array_equal(made.read()["w"], decoded + decoded)


@by_kept
def test_each_worker_has_its_own(client: gradserve.Client, name: str, codec: str) -> None:
    made, senders = made_by(client, name, num_required=2), {"a": Sender(codec), "b": Sender(codec)}
    for step in range(3):
        before = made.read()["w"]
        total = np.zeros(UPDATE.size, np.float32)
        for index, (worker, sender) in enumerate(senders.items()):
            update = UPDATE * np.float32(1 + index + step)
            made.push({"w": update}, step, worker_id=worker, codec=codec)
            total = total + sender.sent(update)
        assert np.array_equal(made.read()["w"], before + total / np.float32(2))


@by_kept
def test_what_does_not_count_leaves_them(client: gradserve.Client, name: str, codec: str) -> None:
    made, sender = made_by(client, name, num_required=2), Sender(codec)
    made.push({"w": UPDATE}, 0, worker_id="a", codec=codec)
    again = made.push({"w": UPDATE * 3}, 0, worker_id="a", codec=codec)
    assert again.outcome is gradserve.Outcome.ALREADY_COUNTED
    first = sender.sent(UPDATE)
    made.push({"w": np.zeros_like(UPDATE)}, 0, worker_id="b")
    assert made.push({"w": UPDATE * 5}, 0, worker_id="a", codec=codec).outcome is gradserve.STALE
    with pytest.raises(gradserve.InvalidArgumentError, match="local_step"):
        made.push({"w": UPDATE * 7}, 9, worker_id="a", codec=codec)
    with pytest.raises(gradserve.InvalidArgumentError):
        made.push({"w": UPDATE * np.inf}, 1, worker_id="a", codec=codec)
    made.push({"w": UPDATE}, 1, worker_id="a", codec=codec)
    made.push({"w": np.zeros_like(UPDATE)}, 1, worker_id="b")
    half = np.float32(2)
    assert np.array_equal(made.read()["w"], first / half + sender.sent(UPDATE) / half)


@by_kept
def test_a_call_that_is_made_again_sends_the_same_bytes(client: gradserve.Client, name: str, codec: str) -> None:
    """Also if it is given another update; the server would notice other bytes."""
    made, sender = made_by(client, name, num_required=2), Sender(codec)
    with pytest.raises(gradserve.DeadlineExceededError) as caught:
        made.push_pull({"w": UPDATE}, 0, worker_id="a", codec=codec, timeout=0.1)
    with ThreadPoolExecutor(1) as beside:
        again = beside.submit(
            made.push_pull, {"w": UPDATE * 2}, 0, worker_id="a", codec=codec, request_id=caught.value.request_id
        )
        made.push({"w": np.zeros_like(UPDATE)}, 0, worker_id="b")
        result = again.result()
    assert (result.outcome, result.duplicate) == (gradserve.ACCEPTED, True)
    first = sender.sent(UPDATE) / np.float32(2)
    assert np.array_equal(result.version["w"], first)
    late = made.push_pull({"w": UPDATE}, 0, worker_id="a", codec=codec, request_id=caught.value.request_id)
    assert late.duplicate
    made.push({"w": UPDATE}, 1, worker_id="a", codec=codec)
    made.push({"w": np.zeros_like(UPDATE)}, 1, worker_id="b")
    assert np.array_equal(made.read()["w"], first + sender.sent(UPDATE) / np.float32(2))


@by_kept
async def test_an_interrupted_call_sends_the_same_bytes_again(
    client: gradserve.Client, server: LocalServer, name: str, codec: str
) -> None:
    made, sender = made_by(client, name, num_required=2), Sender(codec)
    async with gradserve.aio.connect(server.address) as other:
        parameters = await other.parameters({"w": np.zeros(UPDATE.size, np.float32)}, shared_name=name)
        how: dict[str, Any] = {"worker_id": "a", "codec": codec, "request_id": await other.new_request_id()}
        call = asyncio.create_task(parameters.push_pull({"w": UPDATE}, 0, **how))
        await eventually_async(parameters.info, lambda info: info.num_updates == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        made.push({"w": np.zeros_like(UPDATE)}, 0, worker_id="b")
        again = await parameters.push_pull({"w": UPDATE * 2}, 0, **how)
    assert (again.outcome, again.duplicate) == (gradserve.ACCEPTED, True)
    assert np.array_equal(again.version["w"], sender.sent(UPDATE) / np.float32(2))


@by_kept
def test_a_call_in_vain_whose_update_counts(client: gradserve.Client, name: str, codec: str) -> None:
    """The next call of the worker in the round learns that it does."""
    made, sender = made_by(client, name, num_required=2), Sender(codec)
    with pytest.raises(gradserve.DeadlineExceededError):
        made.push_pull({"w": UPDATE}, 0, worker_id="a", codec=codec, timeout=0.1)
    again = made.push({"w": UPDATE}, 0, worker_id="a", codec=codec)
    assert again.outcome is gradserve.Outcome.ALREADY_COUNTED
    made.push({"w": np.zeros_like(UPDATE)}, 0, worker_id="b")
    first = sender.sent(UPDATE) / np.float32(2)
    made.push({"w": UPDATE}, 1, worker_id="a", codec=codec)
    made.push({"w": np.zeros_like(UPDATE)}, 1, worker_id="b")
    assert np.array_equal(made.read()["w"], first + sender.sent(UPDATE) / np.float32(2))


@by_kept
def test_what_is_lost_or_repeated_counts_once(
    gradserve_faults: Faults, gradserve_client: gradserve.Client, name: str, codec: str
) -> None:
    """Replies are lost, and requests come twice; the bytes of a call are the same each time."""
    lost, repeated = gradserve_faults.drop_reply("Push", times=2), gradserve_faults.duplicate("Push", times=2)
    made, sender = made_by(gradserve_client, name), Sender(codec)
    expected = np.zeros(UPDATE.size, np.float32)
    for step in range(10):
        assert made.push({"w": UPDATE}, step, codec=codec).outcome is gradserve.ACCEPTED
        expected = expected + sender.sent(UPDATE)
    assert np.array_equal(made.read()["w"], expected)
    assert len(lost.happened) == len(repeated.happened) == 2
    assert made.info().weights.applied == 10


def test_absent_components_keep_theirs(client: gradserve.Client, name: str) -> None:
    zeros = np.zeros(UPDATE.size, np.float32)
    made, sender = client.parameters({"v": zeros, "w": zeros}, shared_name=name), Sender("int4")
    made.push({"w": UPDATE}, 0, codec="int4")
    made.push({"v": UPDATE}, 1, codec="int4")
    made.push({"w": UPDATE}, 2, codec="int4")
    assert np.array_equal(made.read()["w"], sender.sent(UPDATE) + sender.sent(UPDATE))


def test_stochastic_rounding_is_that_of_the_worker_and_the_step(client: gradserve.Client, name: str) -> None:
    codec = codecs.e3m0(stochastic=True)
    digests = []
    for worker in ("a", "a", "b"):
        made = made_by(client, name)
        made.push({"w": UPDATE}, 0, worker_id=worker, codec=codec)
        made.push({"w": UPDATE}, 1, worker_id=worker, codec=codec)
        digests.append(made.read().digest)
        made.delete()
    assert digests[0] == digests[1] != digests[2]
