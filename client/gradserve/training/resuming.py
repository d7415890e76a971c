"""From which step a run goes on whose accumulator a restart of the server has lost."""

import functools
import time
import uuid

import numpy as np

from gradserve.accumulators import GradientAccumulator
from gradserve.client import Client
from gradserve.results import DenseSpec
from gradserve.training.first import DAY_SECONDS, of_first_worker

_NEVER_STALE = 1 << 62
_CHOICE = DenseSpec("float64", ())
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

    @functools.cache
    def own() -> dict[str, np.float64]:
        candidate = _highest(client, run, container, step)
        has_gone_on = accumulator.info().global_step >= max(candidate, 1)
        return {"step": np.float64(GONE_ON if has_gone_on else candidate)}

    chosen = of_first_worker(
        client, f"{run}/resumed", container, uuid.uuid4().hex, {"step": _CHOICE}, own, durability="none"
    )
    base = int((own() if chosen is None else chosen)["step"])
    end = time.monotonic() + _SETTING_SECONDS
    while chosen is not None and accumulator.info().global_step < base and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
    if accumulator.info().global_step < base:
        accumulator.set_global_step(base)
    return base


def _highest(client: Client, run: str, container: str, step: int) -> int:
    proposals = client.gradient_accumulator(
        {"step": DenseSpec("float32", ())},
        shared_name=f"{run}/steps",
        container=container,
        idle_lease=DAY_SECONDS,
        durability="none",
        device="cpu",
        sharded=False,
    )
    proposals.apply_grad({"step": np.float32(0)}, local_step=_NEVER_STALE, worker_id=f"{step}/{uuid.uuid4().hex}")
    time.sleep(_PROPOSALS_SECONDS)
    return max(int(each.partition("/")[0]) for each in proposals.info().worker_ids)
