"""Tables of small cases in one test, where a test for each would cost more than what it checks."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def together(names: str, *columns: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes one test that calls a function for each case, where `pytest.mark.parametrize` makes a test of each.

    A test costs 4 ms of processor time in the processes of a test run, whatever it does. All cases are tried, and those
    that fail are reported together. Fixtures are the same for all of them.

    Args:
        names: The parameters of the function, separated by ", ".
        *columns: The values of each parameter: the first case has the first of all.
    """
    parameters = names.split(", ")
    cases = list(zip(*columns, strict=True))
    assert cases, names
    assert len(parameters) == len(columns), names

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def test(*args: Any, **fixtures: Any) -> None:
            errors: list[Exception] = []
            for case in cases:
                try:
                    function(*args, **fixtures, **dict(zip(parameters, case, strict=True)))
                except Exception as error:
                    error.add_note(f"in the case {', '.join(map(str, case))}")
                    errors.append(error)
            if errors:
                raise ExceptionGroup(f"{len(errors)} of {len(cases)} cases", errors)

        rest = [each for each in signature.parameters.values() if each.name not in parameters]
        test.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return test

    return decorate
