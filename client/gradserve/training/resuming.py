"""From which step a run goes on whose accumulator a restart of the server has lost."""

import time
import uuid

import numpy as np

from gradserve.accumulators import GradientAccumulator
from gradserve.client import Client
from gradserve.results import DenseSpec, Outcome

_NEVER_STALE = 1 << 62
_KEPT_SECONDS = 24 * 3600.0
_PROPOSALS_SECONDS = 1.0
"""How long steps are proposed: those who wait for a round notice a restart at once, others with their next call."""
_SETTING_SECONDS = 5.0
"""How long others wait until the one whose step was chosen has set it."""
_PAUSE_SECONDS = 0.05
GONE_ON = -1
"""In place of a step: workers that know nothing of the earlier steps have trained already."""


def resume(client: Client, run: str, container: str, accumulator: GradientAccumulator, step: int) -> int:
    """Chooses one step for all, the highest that is proposed within a second, and lets the new accumulator begin there.

    Two workers at different steps have not the same history of the next one: whoever is at another step than the one
    that was chosen, earlier or later, has to take the state of a worker that is at that.

    Proposals are the senders in accumulator NAME/steps; the choice is the average of the first round of NAME/resumed.

    Args:
        client: The client.
        run: The name of the training run, with what distinguishes the new accumulator from the one that was lost.
        container: The namespace of the name.
        accumulator: The new accumulator of the gradients.
        step: The step of this worker.

    Returns:
        The step, or GONE_ON. Takes a second for those who choose.
    """
    chosen = _accumulator(client, f"{run}/resumed", container, DenseSpec("float64", ()))
    if chosen.info().global_step:
        base = int(chosen.read_average(1)["step"])
        is_own = False
    else:
        candidate = _highest(client, run, container, step)
        if accumulator.info().global_step >= max(candidate, 1):
            candidate = GONE_ON
        result = chosen.push_pull({"step": np.float64(candidate)}, 1, worker_id=uuid.uuid4().hex, on_stale="return")
        base = int(result["step"])
        is_own = result.outcome is Outcome.ACCEPTED
    end = time.monotonic() + _SETTING_SECONDS
    while not is_own and accumulator.info().global_step < base and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
    if accumulator.info().global_step < base:
        accumulator.set_global_step(base)
    return base


def _highest(client: Client, run: str, container: str, step: int) -> int:
    proposals = _accumulator(client, f"{run}/steps", container, DenseSpec("float32", ()))
    proposals.apply_grad({"step": np.float32(0)}, local_step=_NEVER_STALE, worker_id=f"{step}/{uuid.uuid4().hex}")
    time.sleep(_PROPOSALS_SECONDS)
    return max(int(each.partition("/")[0]) for each in proposals.info().worker_ids)


def _accumulator(client: Client, name: str, container: str, spec: DenseSpec) -> GradientAccumulator:
    return client.gradient_accumulator(
        {"step": spec},
        shared_name=name,
        container=container,
        idle_lease=_KEPT_SECONDS,
        durability="none",
        device="cpu",
        sharded=False,
    )
