"""Parameters that the server holds, called from blocking code. `gradserve.aio` has the same with `await`."""

from gradserve.calls.parameters.operations import ParametersCalls
from gradserve.face import BlockingFace, blocking, blocking_another
from gradserve.public_names import shown


class Parameters(BlockingFace[ParametersCalls]):
    """A model's parameters on the server: workers push updates, and an optimizer there makes the next version.

    Made by `Client.parameters`.
    """

    @property
    def name(self) -> str:
        """The name of the parameters on the server."""
        return self._calls.name

    def __repr__(self) -> str:
        return shown(self, self._calls.description)

    read = blocking(ParametersCalls.read)
    push = blocking(ParametersCalls.push)
    push_pull = blocking(ParametersCalls.push_pull)
    wait = blocking(ParametersCalls.wait)
    info = blocking(ParametersCalls.info)
    rounds = blocking(ParametersCalls.rounds)
    report = blocking(ParametersCalls.report)
    evaluations = blocking(ParametersCalls.evaluations)
    evaluate = blocking(ParametersCalls.evaluate)
    change = blocking(ParametersCalls.change)
    save = blocking(ParametersCalls.save)
    load = blocking(ParametersCalls.load)
    fork = blocking_another(ParametersCalls.fork, lambda: Parameters)
    delete = blocking(ParametersCalls.delete)
