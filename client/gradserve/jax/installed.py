"""Checks on import that JAX and Optax are installed, so that an error says how to install them."""

import importlib.util

for _name, _title in (("jax", "JAX"), ("optax", "Optax")):
    if importlib.util.find_spec(_name) is None:
        raise ModuleNotFoundError(
            f"gradserve.jax needs {_title}, which is not installed; in a checkout of gradserve: pip install '.[jax]'",
            name=_name,
        )
