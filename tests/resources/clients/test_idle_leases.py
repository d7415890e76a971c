"""What clients share, and nobody uses, ends with its idle lease."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from tests.resources.clients.aging_server import AgingServer, num_private, pass_time
from tests.servers.polling import PATIENCE_SECONDS, eventually

GRAD = np.ones(2, np.float32)


def test_what_nobody_uses(server: AgingServer) -> None:
    with gradserve.connect(server.address) as client, gradserve.connect(server.address) as other:
        make: list[Callable[[], Any]] = [
            lambda: client.conditional_accumulator("float32", shared_name="a", idle_lease=30),
            lambda: client.sparse_conditional_accumulator("float32", shared_name="b", idle_lease=30.0),
            lambda: client.gradient_accumulator({"w": GRAD}, shared_name="c", idle_lease=np.float32(30)),  # type: ignore[arg-type]  # a NumPy number
            lambda: client.batch_norm(scope="d", idle_lease=30),
        ]
        made = [each() for each in make]
        infos = [*(each.info() for each in made[:3]), made[3].describe()]
        assert [(info.is_private, info.idle_lease) for info in infos] == [(False, 30.0)] * 4
        assert other.list_accumulators()[0].idle_lease == other.list_batch_norm_layers()[0].idle_lease == 30.0
        same = other.conditional_accumulator("float32", shared_name="a", idle_lease=30)
        pass_time(server, 20)
        same.apply_grad(1.0)
        other.list_accumulators()
        pass_time(server, 20)
        assert [each.name for each in other.list_accumulators()] == ["a"]
        assert other.list_batch_norm_layers() == []
        with pytest.raises(
            gradserve.NotFoundError, match="'default/d' any more: nobody used it for 30 s, its idle_lease"
        ):
            made[3].get_variables()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(made[0].take_grad, 2)
            eventually(lambda: same.info().num_waiting == 1)
            pass_time(server, 1000)
            same.apply_grad(3.0)
            assert waiting.result(PATIENCE_SECONDS) == 2
        pass_time(server, 29)
        assert num_private(server) == 1
        pass_time(server, 2)
        assert num_private(server) == 0


def test_all_who_use_a_name_say_the_same(server: AgingServer) -> None:
    with gradserve.connect(server.address) as client:
        client.conditional_accumulator("float32", shared_name="a", idle_lease=30)
        client.batch_norm(scope="a", idle_lease=30)
        for create in (
            lambda: client.conditional_accumulator("float32", shared_name="a"),
            lambda: client.batch_norm(scope="a", reuse=True),
        ):
            with pytest.raises(gradserve.AlreadyExistsError, match="another lifetime: idle_lease is 30 s, not None"):
                create()


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), 1e12, "long", [1, 2]])
def test_an_idle_lease_that_cannot_be(server: AgingServer, bad: Any) -> None:
    with gradserve.connect(server.address) as client:
        for create in (client.conditional_accumulator, client.sparse_conditional_accumulator):
            with pytest.raises(gradserve.InvalidArgumentError) as error:
                create("float32", idle_lease=bad)
            assert error.value.field == "idle_lease"
        with pytest.raises(gradserve.InvalidArgumentError) as error:
            client.batch_norm(idle_lease=bad)
        assert error.value.field == "idle_lease"
        assert len(client._calls._lease) == 0
