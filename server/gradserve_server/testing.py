"""A real server for tests, on a free port of this machine. `gradserve_testing` has it, and more for tests."""

from gradserve_testing.server_thread import LocalServer

__all__ = ["LocalServer"]
