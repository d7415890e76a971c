"""Fixtures of pytest: `pytest_plugins = ["gradserve.testing.fixtures"]` in a conftest.py makes them available."""

from gradserve_testing.fixtures import (
    gradserve_client,
    gradserve_faults,
    gradserve_network,
    gradserve_process,
    gradserve_server,
)

__all__ = ["gradserve_client", "gradserve_faults", "gradserve_network", "gradserve_process", "gradserve_server"]
