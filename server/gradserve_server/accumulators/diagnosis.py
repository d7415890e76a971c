"""Explains to a call why its wait failed."""

from gradserve_server.accumulators.rounds import Rounds


def diagnose(rounds: Rounds, num_waiting: int) -> str:
    """Returns a sentence on the current round: the gradients in it, and the missing workers."""
    present = ", ".join(rounds.current.worker_ids) or "none named"
    missing = ", ".join(rounds.missing_workers())
    if not rounds.all_workers_known:
        missing = f"{missing}, others unknown" if missing else "unknown"
    count = rounds.num_accumulated
    return (
        f"{count} {'gradient is' if count == 1 else 'gradients are'} in (workers: {present}; "
        f"missing from the previous round: {missing or 'none'}), "
        f"global_step is {rounds.global_step}, {num_waiting} wait"
    )
