"""What users run into when they push_pull: a server that is ahead, a wait that ends, workers without names."""

import asyncio
import os
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.calls.identity import CallId, OpenCalls, RequestIds
from gradserve_protocol.v1 import accumulator_pb2
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async
from tests.servers.runtime import NOT_WARMED_UP

ZEROS = {"w": np.zeros(2)}


@pytest.fixture
def model(client: gradserve.Client, name: str) -> gradserve.GradientAccumulator:
    return client.gradient_accumulator(ZEROS, shared_name=name)


def grads(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(2, value)}


class TestStale:
    def test_a_second_run_cannot_miss_it(self, model: gradserve.GradientAccumulator) -> None:
        for step in range(3):
            model.push_pull(grads(step), 1, local_step=step)
        with pytest.raises(gradserve.StaleGradientError) as stale:
            model.push_pull(grads(9), 1, local_step=0)
        error = stale.value
        assert "computed at step 0" in str(error)
        assert f"accumulator {model.name!r} is at step 3" in str(error)
        assert error.result is not None
        assert (error.global_step, error.result.step, error.result["w"].tolist()) == (3, 3, [2, 2])
        assert error.field == "local_step"

    def test_a_straggler_catches_up_with_what_the_error_carries(self, model: gradserve.GradientAccumulator) -> None:
        model.push_pull(grads(1), 1)
        try:
            model.push_pull(grads(2), 1, local_step=0)
        except gradserve.StaleGradientError as stale:
            result = model.push_pull(grads(3), 1, local_step=stale.global_step)
        assert (result.outcome, result.step) == (gradserve.ACCEPTED, 2)

    def test_before_any_average(self, model: gradserve.GradientAccumulator) -> None:
        model.set_global_step(5)
        with pytest.raises(gradserve.StaleGradientError) as stale:
            model.push_pull(grads(1), 1)
        assert stale.value.result is not None
        assert (stale.value.global_step, len(stale.value.result)) == (5, 0)

    def test_returned_on_request(self, model: gradserve.GradientAccumulator) -> None:
        model.push_pull(grads(1), 1)
        result = model.push_pull(grads(2), 1, local_step=0, on_stale="return")
        assert (result.outcome, result.global_step, result["w"].tolist()) == (gradserve.STALE, 1, [1, 1])

    def test_sent_again_it_is_stale_again(self, model: gradserve.GradientAccumulator) -> None:
        model.set_global_step(5)
        for _ in range(2):
            with pytest.raises(gradserve.StaleGradientError):
                model.push_pull(grads(1), 1, request_id=77)

    def test_other_words_for_on_stale_are_refused(self, model: gradserve.GradientAccumulator) -> None:
        with pytest.raises(
            gradserve.InvalidArgumentError, match="expected 'raise' or 'return' for on_stale, got 'skip'"
        ):
            model.push_pull(grads(1), 1, on_stale="skip")  # type: ignore[arg-type]
        assert model.num_accumulated() == 0

    def test_the_error_crosses_processes(self, model: gradserve.GradientAccumulator) -> None:
        model.set_global_step(5)
        with pytest.raises(gradserve.StaleGradientError) as stale:
            model.push_pull(grads(1), 1)
        copy = pickle.loads(pickle.dumps(stale.value))  # noqa: S301
        assert (str(copy), copy.global_step) == (str(stale.value), 5)

    async def test_asyncio(self, server_address: str, name: str) -> None:
        async with gradserve.aio.connect(server_address) as client:
            model = await client.gradient_accumulator(ZEROS, shared_name=name)
            await model.push_pull(grads(1), 1)
            with pytest.raises(gradserve.StaleGradientError):
                await model.push_pull(grads(1), 1)


class TestWaitThatEnds:
    def test_a_worker_that_tries_again_is_no_quorum(self, model: gradserve.GradientAccumulator) -> None:
        for _ in range(4):
            with pytest.raises(gradserve.DeadlineExceededError, match=r"1 gradient is in \(workers: w0;"):
                model.push_pull(grads(1), 3, worker_id="w0", timeout=0.05)
        assert model.num_accumulated() == 1

    def test_nor_is_one_without_a_name(self, model: gradserve.GradientAccumulator) -> None:
        for _ in range(4):
            with pytest.raises(gradserve.DeadlineExceededError):
                model.push_pull(grads(1), 3, timeout=0.05)
        assert model.num_accumulated() == 1

    def test_it_is_told_and_gets_the_average(self, model: gradserve.GradientAccumulator) -> None:
        with pytest.raises(gradserve.DeadlineExceededError):
            model.push_pull(grads(1), 2, worker_id="w0", timeout=0.05)
        with ThreadPoolExecutor(1) as threads:
            again = threads.submit(model.push_pull, grads(100), 2, worker_id="w0")
            eventually(lambda: model.info().num_waiting == 1)
            other = model.push_pull(grads(3), 2, worker_id="w1")
        assert again.result().outcome is gradserve.Outcome.ALREADY_COUNTED
        assert other.outcome is gradserve.ACCEPTED
        assert again.result()["w"].tolist() == other["w"].tolist() == [2, 2]

    def test_switched_off(self, model: gradserve.GradientAccumulator) -> None:
        for _ in range(2):
            with pytest.raises(gradserve.DeadlineExceededError):
                model.push_pull(grads(1), 3, worker_id="w0", timeout=0.05, one_per_worker=False)
        assert model.num_accumulated() == 2

    def test_the_error_says_how_to_wait_on(self, model: gradserve.GradientAccumulator) -> None:
        with pytest.raises(gradserve.DeadlineExceededError) as failure:
            model.push_pull(grads(1), 2, worker_id="w0", timeout=0.05)
        number = failure.value.request_id
        assert f"to wait on, make the same call again with request_id={number}" in str(failure.value)
        # The round ends, and others after it, before the worker comes back.
        model.push_pull(grads(3), 2, worker_id="w1")
        for step in (1, 2):
            model.push_pull(grads(9), 1, local_step=step, worker_id="w1")
        result = model.push_pull(grads(1), 2, worker_id="w0", request_id=number)
        assert (result.step, result["w"].tolist(), result.duplicate) == (1, [2, 2], True)

    def test_so_does_that_of_a_take(self, client: gradserve.Client) -> None:
        acc = client.conditional_accumulator("float32")
        with pytest.raises(gradserve.DeadlineExceededError, match=r"with request_id=\d+ \[GS_\w+\]$") as failure:
            acc.take_grad(1, timeout=0.05)
        acc.apply_grad(4)
        assert acc.take_grad(1, request_id=failure.value.request_id) == 4


class TestWorkerIds:
    def test_default_names_host_and_process(self, model: gradserve.GradientAccumulator) -> None:
        model.apply_grad(grads(1))
        (worker_id,) = model.info().worker_ids
        assert worker_id.startswith(f"{socket.gethostname()}-{os.getpid()}-")

    def test_defaults_of_processes_that_look_alike_differ(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: "node")
        monkeypatch.setattr(os, "getpid", lambda: 1)  # as in every container
        assert len({RequestIds("a").worker_id() for _ in range(100)}) == 100

    def test_two_clients_at_once(self, server_address: str, name: str) -> None:
        with gradserve.connect(server_address) as one, gradserve.connect(server_address) as other:
            models = [each.gradient_accumulator(ZEROS, shared_name=name) for each in (one, other)]
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(models[0].push_pull, grads(1), 2, worker_id="w0")
                eventually(lambda: models[1].info().num_waiting == 1)
                with pytest.raises(
                    gradserve.InvalidArgumentError, match="two clients use worker_id 'w0' at once"
                ) as two:
                    models[1].push_pull(grads(3), 2, worker_id="w0")
                assert two.value.field == "worker_id"
                models[1].push_pull(grads(3), 2, worker_id="w1")
            assert waiting.result()["w"].tolist() == [2, 2]

    def test_one_that_is_numbered_by_its_user_is_the_same_client(self, model: gradserve.GradientAccumulator) -> None:
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(model.push_pull, grads(1), 2, worker_id="w0", request_id=7)]
            eventually(lambda: model.info().num_waiting == 1)
            calls.append(threads.submit(model.push_pull, grads(1), 2, worker_id="w0"))
            eventually(lambda: model.info().num_waiting == 2)
            model.push_pull(grads(3), 2, worker_id="w1")
        assert [each.result().outcome.name for each in calls] == ["ACCEPTED", "ALREADY_COUNTED"]

    def test_a_worker_that_comes_back(self, server_address: str, name: str) -> None:
        first = gradserve.connect(server_address)
        with gradserve.connect(server_address) as second, ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(
                first.gradient_accumulator(ZEROS, shared_name=name).push_pull, grads(1), 2, worker_id="w0"
            )
            model = second.gradient_accumulator(ZEROS, shared_name=name)
            eventually(lambda: model.info().num_waiting == 1)
            first.close()
            assert isinstance(waiting.exception(), gradserve.CallCancelledError)
            eventually(lambda: model.info().num_waiting == 0)
            again = threads.submit(model.push_pull, grads(1), 2, worker_id="w0")
            eventually(lambda: model.info().num_waiting == 1)
            model.push_pull(grads(3), 2, worker_id="w1")
            assert again.result().outcome is gradserve.Outcome.ALREADY_COUNTED

    def test_clients_of_one_process_are_workers_of_their_own(self, server_address: str, name: str) -> None:
        with gradserve.connect(server_address) as one, gradserve.connect(server_address) as other:
            for client in (one, other):
                client.gradient_accumulator(ZEROS, shared_name=name).apply_grad(grads(1))
            info = one.gradient_accumulator(ZEROS, shared_name=name).info()
        assert len(info.worker_ids) == 2

    def test_threads_that_share_a_client_are_workers_of_their_own(self, model: gradserve.GradientAccumulator) -> None:
        barrier = threading.Barrier(4)

        def work(value: int) -> gradserve.PushPullResult:
            barrier.wait()
            return model.push_pull(grads(value), 4)

        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(work, range(4)))
        assert [result["w"].tolist() for result in results] == [[1.5, 1.5]] * 4
        assert len(results[0].worker_ids) == 4

    async def test_coroutines_that_share_a_client_are_told_to_name_themselves(
        self, server_address: str, name: str
    ) -> None:
        async with gradserve.aio.connect(server_address) as client:
            model = await client.gradient_accumulator(ZEROS, shared_name=name)
            first = asyncio.create_task(model.push_pull(grads(1), 2))
            await eventually_async(model.info, lambda info: info.num_waiting == 1)
            with pytest.raises(
                gradserve.InvalidArgumentError, match="another push_pull to accumulator .* is under way"
            ):
                await model.push_pull(grads(2), 2)
            named = await model.push_pull(grads(3), 2, worker_id="other")
            assert (await first)["w"].tolist() == named["w"].tolist() == [2, 2]
            # Now that it is over, the next may come.
            await model.push_pull(grads(1), 1, local_step=1)

    def test_order_of_workers_is_never_left_to_default_names(self, client: gradserve.Client, name: str) -> None:
        model = client.gradient_accumulator(ZEROS, shared_name=name, deterministic=True)
        with pytest.raises(gradserve.InvalidArgumentError, match="expected a worker_id for deterministic accumulator"):
            model.push_pull(grads(1), 1)
        model.push_pull(grads(1), 1, worker_id="w0")

    def test_an_empty_name_is_nobodys(self, model: gradserve.GradientAccumulator) -> None:
        model.apply_grad(grads(1), worker_id="")
        assert (model.info().worker_ids, model.num_accumulated()) == ((), 1)


class TestOnePerWorkerAccumulator:
    def test_apply_counts_once(self, client: gradserve.Client) -> None:
        acc = client.conditional_accumulator("float32", one_per_worker=True)
        outcomes = [
            acc.apply_grad(value, worker_id=worker).outcome.name for value, worker in ((1, "a"), (9, "a"), (3, "b"))
        ]
        assert outcomes == ["ACCEPTED", "ALREADY_COUNTED", "ACCEPTED"]
        assert acc.take_grad(2) == 2

    def test_without_it_every_gradient_counts(self, client: gradserve.Client) -> None:
        acc = client.conditional_accumulator("float32")
        assert [acc.apply_grad(1, worker_id="a").outcome for _ in range(2)] == [gradserve.ACCEPTED] * 2

    def test_it_is_part_of_what_an_accumulator_is(self, client: gradserve.Client, name: str) -> None:
        client.conditional_accumulator("float32", shared_name=name, one_per_worker=True)
        with pytest.raises(gradserve.AlreadyExistsError, match="one_per_worker is True, not False"):
            client.conditional_accumulator("float32", shared_name=name)


def call(number: int, kind: str = "automatic") -> CallId:
    return CallId(kind, number)


KEY = ("default", "net")


def opened(calls: OpenCalls, new: CallId) -> AbstractContextManager[CallId]:
    return calls.opened(KEY, lambda: new)


class TestManyWaitingCalls:
    @pytest.mark.parametrize("way", ["grpc", "shared_memory"])
    async def test_of_one_client_wait_on_a_server_with_its_usual_limits(self, way: Any) -> None:
        with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
            async with gradserve.aio.connect(server.address, timeout=PATIENCE_SECONDS, transport=way) as client:
                acc = await client.conditional_accumulator("float32", ())
                takes = [asyncio.create_task(acc.take_grad(1)) for _ in range(1040)]
                await eventually_async(acc.info, lambda info: info.num_waiting == len(takes))
                for value in range(3):
                    await acc.apply_grad(value, local_step=value)

                async def num_done() -> int:
                    return sum(each.done() for each in takes)

                await eventually_async(num_done, (3).__eq__)
                assert (await acc.info()).num_waiting == len(takes) - 3
                for each in takes:
                    each.cancel()
                outcomes = await asyncio.gather(*takes, return_exceptions=True)
                taken = [each for each in outcomes if not isinstance(each, asyncio.CancelledError)]
                assert sorted(map(float, taken)) == [0.0, 1.0, 2.0]  # type: ignore[arg-type]

    def test_what_a_request_says_of_them(self) -> None:
        ids, accumulator = RequestIds("a"), ("default", "net")
        for limit in (1024, 1025):
            while len(ids.open_calls.before(accumulator, CallId(ids.calls_id, 1 << 40))) < limit:
                ids.open_calls.begin(accumulator, ids.new_call())
            message = accumulator_pb2.RequestId()
            ids.write(message, ids.new_call(), accumulator)
            listed = list(message.unanswered)
            if limit == 1024:
                assert listed == list(range(1, 1025))
                assert not message.HasField("unanswered_since")
            else:
                assert (listed, message.unanswered_since) == ([], 1)


class TestOpenCalls:
    def test_open_while_the_answer_is_awaited(self) -> None:
        calls = OpenCalls()
        with opened(calls, call(3)), opened(calls, call(5)):
            assert calls.before(KEY, call(6)) == [3, 5]
            assert calls.before(KEY, call(5)) == [3]
            assert calls.before(("default", "other"), call(6)) == []
        assert calls.before(KEY, call(6)) == []

    def test_numbers_of_another_kind_are_others(self) -> None:
        calls = OpenCalls()
        with opened(calls, call(3)), opened(calls, call(4, "chosen")):
            assert calls.before(KEY, call(6)) == [3]
            assert calls.before(KEY, call(6, "chosen")) == [4]

    @pytest.mark.parametrize(
        ("error", "stays_open"),
        [
            (gradserve.UnavailableError, True),
            (gradserve.DeadlineExceededError, True),
            (gradserve.InvalidArgumentError, False),
            (gradserve.AbortedError, False),
            (KeyboardInterrupt, False),
        ],
    )
    def test_a_failed_call_may_come_again(self, error: type[BaseException], stays_open: bool) -> None:
        calls = OpenCalls()
        with pytest.raises(error), opened(calls, call(3)):
            raise error("no")
        assert calls.before(KEY, call(6)) == ([3] if stays_open else [])
        with opened(calls, call(3)):
            pass
        assert calls.before(KEY, call(6)) == []

    def test_failed_calls_do_not_pile_up(self) -> None:
        calls = OpenCalls()
        for number in range(100):
            with pytest.raises(gradserve.UnavailableError), opened(calls, call(number)):
                raise gradserve.UnavailableError("no")
        assert calls.before(KEY, call(100)) == list(range(84, 100))

    def test_a_call_is_listed_before_a_later_one_has_its_number(self) -> None:
        """The later one may arrive whenever it likes: it must not acknowledge the average of the other."""
        ids = RequestIds("client")
        calls = ids.open_calls

        def new_call() -> CallId:
            with ThreadPoolExecutor(1) as threads:
                assert not threads.submit(calls.numbering.acquire, blocking=False).result(), "another has to wait"
            return ids.new_call()

        with calls.opened(KEY, new_call) as first:
            assert calls.before(KEY, ids.new_call()) == [first.sequence]

    def test_all_numbers_are_given_under_one_lock(self) -> None:
        ids = RequestIds("client")
        with patch.object(ids.open_calls, "numbering", MagicMock()) as numbering:
            assert [ids.new_call().sequence, ids.new_call().sequence] == [1, 2]
        assert numbering.__enter__.call_count == 2
