"""Names of accumulators that training runs make for themselves, beside those of their users."""

import re

_BESIDE_A_RUN = re.compile(r"(.+)/[0-9a-f]{40}/.+", re.DOTALL)
"""NAME/INCARNATION/PURPOSE: initial parameters, and requests for a state and answers (`gradserve.training`)."""


def run_of(name: str) -> str | None:
    """Returns the name of the training run that an accumulator is an internal part of; None for any other one."""
    found = _BESIDE_A_RUN.fullmatch(name)
    return None if found is None else found[1]
