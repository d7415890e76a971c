"""What the workers of a run have to be started with alike, beside what the server compares itself."""

from collections.abc import Mapping

from gradserve.client import Client
from gradserve.errors import AlreadyExistsError, InvalidArgumentError
from gradserve.training.first import of_first_worker
from gradserve.training.state import TEXT, as_text, of_text

_KEPT_SECONDS = 30 * 24 * 3600.0
"""How long after the last worker began they are kept: a worker may join after weeks, and they are small."""
_SHOWN = 5


def agree_on_settings(
    client: Client, name: str, container: str, worker_id: str, settings: Mapping[str, Mapping[str, str]]
) -> None:
    """Compares the settings of this worker with those of the first worker that came.

    They are the average of the first round of accumulator NAME/settings-KIND, which has one gradient.

    Args:
        client: The client.
        name: The name of the training run, with what distinguishes it from earlier runs of the same name.
        container: The namespace of the name.
        worker_id: The id of this worker.
        settings: Texts by name, by kind of worker: workers of other kinds have other settings. Only the settings that
            both workers have are compared.

    Raises:
        AlreadyExistsError: The first worker has other settings; the message has both values of each.
    """
    for kind, own in settings.items():
        theirs = _first(client, f"{name}/settings-{kind}", container, worker_id, own)
        different = [each for each in own if theirs.get(each, own[each]) != own[each]]
        if different:
            shown = "; ".join(f"{each} is {theirs[each]} there and {own[each]} here" for each in different[:_SHOWN])
            more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise AlreadyExistsError(
                f"worker {worker_id!r} has other settings than the worker that began this training run: {shown}{more}. "
                "All workers need the same ones, as their weights would differ otherwise; give another run another name"
            )


def checked_settings(settings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Returns a copy of settings.

    Raises:
        InvalidArgumentError: They are not texts by name, by kind of worker.
    """
    copied = {kind: dict(each) for kind, each in settings.items()}
    for kind, own in copied.items():
        for name, text in own.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise InvalidArgumentError(
                    f"expected texts by name for settings[{kind!r}], got {text!r} for {name!r}", field="settings"
                )
    return copied


def _first(client: Client, name: str, container: str, worker_id: str, own: Mapping[str, str]) -> Mapping[str, str]:
    sent = of_first_worker(
        client,
        name,
        container,
        worker_id,
        {"text": TEXT},
        lambda: {"text": as_text(dict(own))},
        idle_lease=_KEPT_SECONDS,
    )
    found: Mapping[str, str] = own if sent is None else of_text(sent["text"])
    return found
