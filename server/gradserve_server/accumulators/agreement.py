"""What all who create or find an accumulator must agree on: texts by name, which the server itself does not use."""

from collections.abc import Mapping
from sys import getsizeof

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_AGREEMENT, MAX_NAME_BYTES, check_count, check_length, quoted

_FIELD = "spec.agreement"
_SHOWN = 10
_OF_TRAINING_RUNS = "num_required"
"""What workers of `gradserve.training`, and of what stands on it, agree on, and other workers do not."""
_OTHER_WORKERS = (
    "workers of gradserve.torch, gradserve.jax and gradserve.training share a run with each other, not with workers "
    "that make the calls themselves: see docs/other_languages.md#which-workers-can-share-a-run"
)


def check_agreement(agreement: Mapping[str, str]) -> None:
    """Checks that an agreement is within the limits of the contract.

    Raises:
        InvalidArgumentError: It has too many entries, an empty name, or a name or value that is too long.
    """
    check_count(agreement, MAX_AGREEMENT, "entries", _FIELD)
    for name, value in agreement.items():
        if not name:
            raise InvalidArgumentError(
                f"expected a name for each entry, got an empty one with the value {quoted(value)}", field=_FIELD
            )
        check_length(name, MAX_NAME_BYTES, _FIELD)
        try:
            check_length(value, MAX_NAME_BYTES, _FIELD)
        except InvalidArgumentError as error:
            error.message = f"agreement[{quoted(name)}]: {error.message}"
            raise


def agreement_bytes(agreement: Mapping[str, str]) -> int:
    """Returns the memory that an agreement takes; 0 for none."""
    if not agreement:
        return 0
    return getsizeof(agreement) + sum([getsizeof(name) + getsizeof(value) for name, value in agreement.items()])


def agreement_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Returns the differences between two agreements, in words, by name; only some of many."""
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    found = [
        f"agreement[{quoted(name)}] is {_text(ours.get(name))}, not {_text(theirs.get(name))}"
        for name in different[:_SHOWN]
    ]
    if len(different) > _SHOWN:
        found.append("and more of the agreement")
    if (_OF_TRAINING_RUNS in ours) != (_OF_TRAINING_RUNS in theirs):
        found.append(_OTHER_WORKERS)
    return found


def _text(value: str | None) -> str:
    return "absent" if value is None else quoted(value)
