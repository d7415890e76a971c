"""Tries an installed gradserve: the command, a round over each way and encrypted, an op. Prints what ran.

Usage: python deploy/release/smoke.py
"""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import gradserve
from gradserve.testing import ServerProcess

WAYS = ("grpc", "bulk", "shared_memory")


def average(client: gradserve.Client) -> None:
    """Averages two gradients."""
    accumulator = client.gradient_accumulator({"w": np.zeros((300, 1000), np.float32)})
    for value in (1, 2):
        accumulator.apply_grad({"w": np.full((300, 1000), value, np.float32)})
    assert (accumulator.take_grad(2)["w"] == 1.5).all()


def normalize(client: gradserve.Client) -> None:
    """Computes an op."""
    x = np.random.default_rng(0).normal(size=(2, 3, 3, 4)).astype(np.float32)
    outputs = client.raw_ops.FusedBatchNormV3(
        x=x, scale=np.ones(4, np.float32), offset=np.zeros(4, np.float32), mean=[], variance=[]
    )
    assert abs(np.asarray(outputs.y).mean()) < 1e-6


def main() -> None:
    """Tries everything."""
    with tempfile.TemporaryDirectory() as folder:
        with ServerProcess(folder, "--device", "cpu", listen=("127.0.0.1:0", f"unix:{folder}/socket")) as server:
            for way in WAYS:
                settings: dict[str, Any] = {"transport": way}
                with gradserve.connect(server.address, timeout=60, **settings) as client:
                    average(client)
                    used = client.server_info().transport.way
                    assert used == way, f"expected {way}, got {used}"
            with gradserve.connect(server.address, timeout=60) as client:
                normalize(client)

        command = (Path(sys.executable).with_name("gradserve"), "certificates", folder, "--host", "127.0.0.1")
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        flags = ("--tls-certificate", f"{folder}/server.pem", "--tls-key", f"{folder}/server.key")
        with (
            ServerProcess(folder, *flags) as server,
            gradserve.connect(server.address, timeout=60, tls=gradserve.TLS(ca=f"{folder}/ca.pem")) as client,
        ):
            average(client)
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "grpcio", "protobuf", "numba"))
    print(f"gradserve {gradserve.__version__} on Python {sys.version.split()[0]} with {', '.join(versions)}: works")


if __name__ == "__main__":
    main()
