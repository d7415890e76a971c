"""Arrays that lie on several devices, which a process has only if it says so before JAX begins."""

import os
import subprocess
import sys

from tests.servers.polling import PATIENCE_SECONDS

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
import gradserve, gradserve.jax
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

    with gradserve.jax.average_by(client, num_required=1, name=sys.argv[2]) as averaging:
        optimizer = optax.chain(averaging, optax.sgd(1.0))
        params, opt_state = averaging.begin({"x": spread}, optimizer.init({"x": spread}))
        updates, opt_state = jax.jit(optimizer.update)(params, opt_state)
        np.testing.assert_array_equal(updates["x"], -x)
        print("step", averaging.step, params["x"].sharding == sharded)

        each = jax.shard_map(
            lambda x: averaging.update({"x": x}, opt_state[0])[0]["x"],
            mesh=sharded.mesh, in_specs=sharded.spec, out_specs=sharded.spec,
        )
        try:
            jax.block_until_ready(jax.jit(each)(spread))
        except jax.errors.JaxRuntimeError as error:
            print("refused", "InvalidArgumentError" in str(error))
print(len(jax.devices()), "devices")
"""


def test_a_call_has_the_whole_arrays_and_a_step_is_one_worker(server_address: str, name: str) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, server_address, name],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        env=environment,
    )
    assert done.stdout == "step 1 True\nrefused True\n2 devices\n", done.stderr
