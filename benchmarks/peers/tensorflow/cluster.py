"""A TensorFlow cluster on loopback: a parameter server (`ps`) and the workers, each a process of its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from benchmarks.peers.driver import Setup

PARAMETER_SERVER = "/job:ps/task:0/device:CPU:0"


def reserve_addresses(count: int) -> list[str]:
    """Returns loopback addresses that were free a moment ago.

    Every member of a cluster must know the ports of all others before the first one starts, so the system cannot
    choose them.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


@contextlib.contextmanager
def serve_parameters(setup: Setup) -> Iterator[dict[str, Any]]:
    """Runs the parameter server."""
    ps, *workers = reserve_addresses(1 + setup.num_workers)
    cluster = {"ps": [ps], "worker": workers}
    tf.compat.v1.train.Server(cluster, job_name="ps", task_index=0)
    yield {"cluster": cluster}


def worker_device(setup: Setup) -> str:
    """Returns the device of this worker."""
    return f"/job:worker/task:{setup.rank}/device:CPU:0"


def start_session(setup: Setup) -> tf.compat.v1.Session:
    """Starts this worker's server, and returns a session in it with the graph built so far initialized.

    The session is in the server's process, so TensorFlow runs its master without a socket.
    """
    server = tf.compat.v1.train.Server(setup.server["cluster"], job_name="worker", task_index=setup.rank)
    config = tf.compat.v1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{setup.rank}"])
    session = tf.compat.v1.Session(server.target, config=config)
    session.run(tf.compat.v1.local_variables_initializer())
    return session


def local_gradient(setup: Setup, shape: tuple[int, ...], name: str) -> tf.Variable:
    """Returns a gradient in the worker's memory, as if just computed; every element is rank + 1.

    It is a variable because TensorFlow might move a constant to the parameter server permanently.
    """
    with tf.device(worker_device(setup)):
        return tf.compat.v1.get_variable(
            name,
            initializer=tf.fill(shape, float(setup.rank + 1)),
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            use_resource=True,
        )
