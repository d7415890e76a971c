"""Runs two workers of train.py in processes, as `gradserve run` does; run as a program, with what to import first.

Workers are forked from one process that has imported the frameworks, so that they are read from disk once. With
`--kill`, worker 1 is killed after its fifth step, and started again.
"""

import contextlib
import importlib
import io
import os
import runpy
import signal
import sys
import traceback
from typing import Any

NUM_WORKERS = 2


def kill_after_five_steps() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = []

    def count(*step: Any) -> None:
        steps.append(step)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)


def start(rank: int, *, dies: bool = False) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        names = {"RANK": rank, "NUM_WORKERS": NUM_WORKERS, "NUM_REQUIRED": NUM_WORKERS, "WORKER_ID": f"w-{rank}"}
        os.environ.update({f"GRADSERVE_{name}": str(value) for name, value in names.items()})
        if dies:
            kill_after_five_steps()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path("train.py", run_name="__main__")
        os.write(1, printed.getvalue().encode())  # at once, so that lines of workers do not mix
        code = 0
    except BaseException:  # whatever it is, the process must not go on as its parent
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def main(kills: bool, *packages: str) -> None:
    for package in packages:
        importlib.import_module(package)
    ranks = {start(rank, dies=kills and rank == 1): rank for rank in range(NUM_WORKERS)}
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        if os.WIFSIGNALED(status) and kills:
            sys.stderr.write(f"worker {rank} was killed\n")
            ranks[start(rank)] = rank
        elif status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"worker {rank} failed")


if __name__ == "__main__":
    given = sys.argv[1:]
    main("--kill" in given, *(each for each in given if each != "--kill"))
