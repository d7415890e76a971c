"""Timeouts that cannot be."""

import math

import pytest

import gradserve
import gradserve.aio

BAD = [-1.0, math.inf, math.nan, 1e12]


@pytest.mark.parametrize("timeout", BAD)
def test_of_a_wait(client: gradserve.Client, timeout: float) -> None:
    acc = client.conditional_accumulator("float32")
    for wait in (lambda: acc.take_grad(1, timeout), lambda: acc.read_average(1, timeout)):
        with pytest.raises(gradserve.InvalidArgumentError, match="expected a finite timeout of at least 0 s, got"):
            wait()


@pytest.mark.parametrize("timeout", BAD)
async def test_of_a_client(timeout: float) -> None:
    for connect in (gradserve.connect, gradserve.aio.connect):
        with pytest.raises(gradserve.InvalidArgumentError, match="expected a finite timeout"):
            connect("localhost:1", timeout=timeout)
