"""The state directory of a server, and all that it restores from there."""

from collections.abc import Callable
from pathlib import Path

from gradserve_server.accumulators.durable.records import FileRecords
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.config import StateConfig
from gradserve_server.layers.batch_norm.durable.records import FileLayerRecords
from gradserve_server.state.durability import Durability
from gradserve_server.state.files.directory import StateDirectory
from gradserve_server.state.files.errors import StateError
from gradserve_server.state.files.store import StateStore
from gradserve_server.state.files.values import Allocate
from gradserve_server.system_errors import reason_of


def open_state(config: StateConfig) -> "ServerState | None":
    """Opens the state directory of a configuration, None if it has none.

    Raises:
        StateError: It cannot be made, opened or used.
    """
    if config.state_dir is None:
        return None
    try:
        store = StateStore(StateDirectory(Path(config.state_dir)))
    except OSError as error:
        raise StateError(f"cannot use the state directory {config.state_dir}: {reason_of(error)}") from error
    return ServerState(store, Durability[config.durability.upper()])


class ServerState:
    """An open state directory.

    Attributes:
        accumulators: The journals of the accumulators.
        layers: The journals of the layers.
    """

    def __init__(self, store: StateStore, default: Durability) -> None:
        """Takes the directory, and the durability of what asks for none."""
        self._store = store
        self.accumulators = FileRecords(store, default)
        self.layers = FileLayerRecords(store, default)

    @property
    def path(self) -> Path:
        """The directory."""
        return self._store.path

    async def restore(self, registry: AccumulatorRegistry, allocate: Allocate) -> int:
        """Makes the accumulators again that are there; see `FileRecords.restore`."""
        return await self.accumulators.restore(registry, allocate)

    def start(self, on_failure: Callable[[str], object]) -> None:
        """Begins to write; see `StateStore.start`."""
        self._store.start(on_failure)

    def close(self) -> None:
        """Writes what has not been written, and closes the files."""
        self._store.close()
