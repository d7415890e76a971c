"""Parameters that the server holds, called with `await`."""

from gradserve.calls.parameters.operations import ParametersCalls
from gradserve.face import AsyncFace, awaiting, awaiting_another
from gradserve.public_names import shown


class Parameters(AsyncFace[ParametersCalls]):
    """A model's parameters on the server: workers push updates, and an optimizer there makes the next version.

    Made by `Client.parameters`.
    """

    @property
    def name(self) -> str:
        """The name of the parameters on the server."""
        return self._calls.name

    def __repr__(self) -> str:
        return shown(self, self._calls.description)

    read = awaiting(ParametersCalls.read)
    push = awaiting(ParametersCalls.push)
    push_pull = awaiting(ParametersCalls.push_pull)
    wait = awaiting(ParametersCalls.wait)
    info = awaiting(ParametersCalls.info)
    rounds = awaiting(ParametersCalls.rounds)
    change = awaiting(ParametersCalls.change)
    save = awaiting(ParametersCalls.save)
    load = awaiting(ParametersCalls.load)
    fork = awaiting_another(ParametersCalls.fork, lambda: Parameters)
    delete = awaiting(ParametersCalls.delete)
