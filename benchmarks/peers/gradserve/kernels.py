"""Waits for a server's kernels."""

from __future__ import annotations

import time

import gradserve

_PREPARE_SECONDS = 300.0


def wait_for_kernels(client: gradserve.Client) -> None:
    """Returns when the server's kernels are loaded or compiled; before that, calls are slower.

    Raises:
        TimeoutError: The kernels are not ready after minutes.
    """
    deadline = time.monotonic() + _PREPARE_SECONDS
    while not client.server_info().ops_prepared:
        if time.monotonic() > deadline:
            raise TimeoutError("the server's kernels are not prepared")
        time.sleep(0.1)
