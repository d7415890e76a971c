"""A GPU whose memory does not suffice, where CuPy's pool cannot help: modules, cuBLAS, cuDNN."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradserve
from tests.devices.cuda.stand_in.installing import StandIn

FOREVER = 1 << 30


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def batch_norm(client: gradserve.Client) -> None:
    arguments = {"scale": ones(3), "offset": ones(3), "mean": ones(0), "variance": ones(0)}
    client.raw_ops.FusedBatchNormV3(x=ones(2, 2, 2, 3), **arguments)


def gru(client: gradserve.Client) -> None:
    client.raw_ops.GRUBlockCell(
        x=ones(2, 3), h_prev=ones(2, 4), w_ru=ones(7, 8), w_c=ones(7, 4), b_ru=ones(8), b_c=ones(4)
    )


def rnn(client: gradserve.Client) -> None:
    size = int(client.raw_ops.CudnnRNNParamsSize(num_layers=1, num_units=4, input_size=3, rnn_mode="gru")[0])
    client.raw_ops.CudnnRNN(
        input=ones(2, 2, 3), input_h=ones(1, 2, 4), input_c=ones(0), params=ones(size), rnn_mode="gru"
    )


CALLS: list[tuple[str, Callable[[gradserve.Client], None]]] = [
    ("malloc", batch_norm),
    ("module", batch_norm),
    ("cublas", gru),
    ("cudnn", rnn),
]


@pytest.mark.parametrize(("what", "call"), CALLS, ids=[what for what, _ in CALLS])
def test_a_request_that_fails_once_is_made_again(
    stand_in: StandIn, gpu_client: gradserve.Client, what: str, call: Callable[[gradserve.Client], None]
) -> None:
    stand_in.machine.fail_next(what)
    call(gpu_client)


@pytest.mark.parametrize(("what", "call"), CALLS, ids=[what for what, _ in CALLS])
def test_a_lasting_shortage_is_told_and_survived(
    stand_in: StandIn, gpu_client: gradserve.Client, what: str, call: Callable[[gradserve.Client], None]
) -> None:
    stand_in.machine.fail_next(what, FOREVER)
    with pytest.raises(gradserve.ResourceExhaustedError):
        call(gpu_client)
    stand_in.machine.fail_next(what, 0)
    call(gpu_client)
