"""The whole service on a simulated GPU."""

import numpy as np

import gradserve
from gradserve.testing import ServerProcess
from tests.devices.cuda.stand_in.installing import StandIn


def _batch_norm(client: gradserve.Client) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 3, 4)).astype(np.float32)
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    outputs = client.raw_ops.FusedBatchNormV3(
        x=client.put(x), scale=ones, offset=zeros, mean=ones[:0], variance=ones[:0], is_training=True
    )
    np.testing.assert_allclose(outputs.y.mean(axis=(0, 1, 2)), zeros, atol=1e-6)


def test_ops_run_on_a_simulated_gpu(gpu_client: gradserve.Client, stand_in: StandIn) -> None:
    _batch_norm(gpu_client)
    assert stand_in.machine.contexts == {0}


def test_a_server_process_runs_ops_on_a_simulated_gpu(gpu_process: ServerProcess) -> None:
    with gradserve.connect(gpu_process.address) as client:
        _batch_norm(client)
