"""The settings that a client takes from the environment: the server, its TLS, and the id of the worker."""

import multiprocessing.process
import threading
from collections.abc import Callable

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.transport.settings import wanted_server
from gradserve.workers import new_worker_id
from gradserve_testing import LocalServer

TLS = gradserve.TLS


@pytest.mark.parametrize(
    ("given", "variables", "expected"),
    [
        ((None, None), {}, ("localhost:50051", None)),
        ((None, None), {"ADDRESS": "a:1,b:1"}, ("a:1,b:1", None)),
        ((None, None), {"ADDRESS": "a:1", "TLS_CA": "ca.pem"}, ("a:1", TLS(ca="ca.pem"))),
        ((None, None), {"TLS": "1", "TLS_CLIENT_CERTIFICATE": "c", "TLS_CLIENT_KEY": "k"},
         ("localhost:50051", TLS(certificate="c", key="k"))),
        ((None, None), {"TLS": "off", "TLS_CA": ""}, ("localhost:50051", None)),
        ((None, None), {"TLS": "true"}, ("localhost:50051", TLS())),
        ((None, TLS("own.pem")), {"ADDRESS": "a:1", "TLS_CA": "ca.pem"}, ("a:1", TLS("own.pem"))),
        (("b:1", None), {"ADDRESS": "a:1", "TLS_CA": "ca.pem"}, ("b:1", None)),
    ],
)  # fmt: skip
def test_the_environment_names_the_server(
    given: tuple[str | None, TLS | None], variables: dict[str, str], expected: tuple[str, TLS | None]
) -> None:
    assert wanted_server(*given, {f"GRADSERVE_{name}": value for name, value in variables.items()}) == expected


def test_variables_that_say_nothing_sensible() -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="GRADSERVE_TLS"):
        wanted_server(None, None, {"GRADSERVE_TLS": "maybe"})


async def test_both_clients_connect_without_an_address(monkeypatch: pytest.MonkeyPatch, server: LocalServer) -> None:
    monkeypatch.setenv("GRADSERVE_ADDRESS", server.address)
    with gradserve.connect() as client:
        assert client.address == server.address
    async with gradserve.aio.connect() as client:
        assert client.address == server.address


def _in_thread(call: Callable[[], str]) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_the_worker_id_belongs_to_the_main_thread_of_the_process_that_was_given_it(
    monkeypatch: pytest.MonkeyPatch, server: LocalServer
) -> None:
    monkeypatch.setenv("GRADSERVE_WORKER_ID", "laptop-1")
    assert new_worker_id() == "laptop-1"
    assert _in_thread(new_worker_id) != "laptop-1"
    with monkeypatch.context() as below:
        below.setattr(multiprocessing.process, "parent_process", multiprocessing.current_process)
        assert new_worker_id() != "laptop-1"
    with gradserve.connect(server.address) as client:
        acc = client.conditional_accumulator("float32", (1,))
        acc.apply_grad(np.ones(1, np.float32), local_step=0)
        assert acc.info().worker_ids == ("laptop-1",)
    monkeypatch.setenv("GRADSERVE_WORKER_ID", "")
    assert new_worker_id() != new_worker_id()
