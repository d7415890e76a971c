"""Processes of workers, quick to start."""

import multiprocessing

from tests.accumulators import busy_worker, doomed_worker

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([busy_worker.__name__, doomed_worker.__name__])
