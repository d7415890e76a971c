"""Checks on import that PyTorch is installed, so that an error says how to install it."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        "gradserve.torch needs PyTorch, which is not installed; in a checkout of gradserve: pip install '.[torch]'",
        name="torch",
    )
