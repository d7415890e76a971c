"""Tests of `gradserve.jax` need JAX and Optax (`make install-frameworks`); without them they are not collected."""

from importlib.util import find_spec

if not all(map(find_spec, ("jax", "optax"))):
    collect_ignore_glob = ["*"]
