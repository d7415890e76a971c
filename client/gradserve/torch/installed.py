"""Checks on import that PyTorch is installed, so that an error says how to install it."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        "gradserve.torch needs PyTorch, which is not installed: pip install 'gradserve[torch]'", name="torch"
    )
