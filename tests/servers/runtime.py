"""How servers of tests run."""

from gradserve_server.config import RuntimeConfig

NOT_WARMED_UP = RuntimeConfig(warm_up=False)
"""For servers that compute no ops: the kernels that they would load at the start cost a second of a core."""
