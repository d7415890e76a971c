"""Arrays that lie on several devices, which a process has only if it says so before JAX begins."""

import os
import subprocess
import sys

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
import gradserve
from gradserve.jax import functions
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.jax.functions import mathematics

sharded = NamedSharding(Mesh(jax.devices(), "d"), PartitionSpec("d"))
x, scale, offset = jnp.arange(12.0).reshape(4, 3) ** 2, jnp.ones(3), jnp.ones(3)
spread = jax.device_put(x, sharded)
with gradserve.connect(sys.argv[1]) as client:
    def served(x):
        return functions.layer_norm(client, x, scale, offset)

    for y in (served(spread), jax.jit(served)(spread), jax.jit(served, in_shardings=sharded, out_shardings=sharded)(x)):
        np.testing.assert_allclose(y, mathematics.layer_norm(x, scale, offset), rtol=2e-5, atol=2e-6)
print(len(jax.devices()), "devices")
"""


def test_a_call_has_the_whole_arrays(server_address: str) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, server_address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.stdout == "2 devices\n", done.stderr
