"""The end of a Ray for this machine alone."""

import subprocess

import psutil
import pytest

from gradserve_ray.directory import LocalRay
from gradserve_ray.local_ray import stop_local_ray


def test_a_process_that_ends_just_before_it_would_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(processes: list[psutil.Process], _timeout: float) -> tuple[list[psutil.Process], list[psutil.Process]]:
        for each in processes:
            each.wait()
        return [], processes

    monkeypatch.setattr(psutil, "wait_procs", too_late)
    with subprocess.Popen(["sleep", "60"]) as running:
        stop_local_ray(LocalRay(running.pid, psutil.Process(running.pid).create_time(), 1))
        assert not psutil.pid_exists(running.pid)
