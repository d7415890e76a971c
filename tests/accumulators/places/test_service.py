"""Accumulators in the memory of a simulated GPU, on whole servers."""

import numpy as np

import gradserve
from gradserve_server.testing import LocalServer
from tests.devices.cuda.stand_in.installing import StandIn


def test_smoke(gpu_client: gradserve.Client, gpu_server: LocalServer, stand_in: StandIn) -> None:
    acc = gpu_client.conditional_accumulator("float32", (3,), device="cuda:0")
    acc.apply_grad(np.array([1, 2, 3], np.float32))
    acc.apply_grad(np.array([3, 2, 1], np.float32))
    assert acc.info().device == "cuda:0"
    assert acc.take_grad(2).tolist() == [2, 2, 2]
