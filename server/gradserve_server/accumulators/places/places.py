"""The places in which a server can have accumulators."""

import logging
from dataclasses import dataclass

from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec
from gradserve_server.devices.selection import NoSuchDeviceError
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import quoted

AUTO = "auto"
"""The name of the device of the ops, whatever it is."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Places:
    """The places in which a server can have accumulators.

    Attributes:
        host: The host.
        device: The device of the ops, None if that is the host.
        default: The name of the place of accumulators that ask for none.

    Raises:
        NoSuchDeviceError: There is no place of the default name.
    """

    host: Place
    device: Place | None = None
    default: str = "cpu"

    def __post_init__(self) -> None:
        if self.find(self.default) is None:
            raise NoSuchDeviceError(
                f"expected a device of this server, {self._names}, got {self.default!r}", "accumulator_device"
            )

    @property
    def _names(self) -> str:
        return ", ".join([each.name for each in (self.host, self.device) if each is not None])

    def find(self, name: str) -> Place | None:
        """Returns the place of a name, None if there is none."""
        if name == AUTO:
            return self.device or self.host
        return next((each for each in (self.host, self.device) if each is not None and each.name == name), None)

    def named(self, spec: AccumulatorSpec) -> AccumulatorSpec:
        """Returns a spec with the name of a place, if it asks for the device of the ops, whatever that is."""
        if spec.device != AUTO:
            return spec
        is_anywhere = _sparse_component(spec) is None and not spec.num_shards
        return spec.on((self.device if self.device is not None and is_anywhere else self.host).name)

    def of_new(self, spec: AccumulatorSpec) -> Place:
        """Returns the place that a new accumulator asks for, or gets by default.

        Raises:
            InvalidArgumentError: It cannot be there.
        """
        place = self.find(spec.device or self.default)
        if place is None:
            raise InvalidArgumentError(
                f"expected a device of this server, {self._names} or {AUTO}, got {quoted(spec.device or '')}",
                field="spec.device",
            )
        sparse = _sparse_component(spec)
        if place is self.host or not (spec.num_shards or (sparse is not None and not place.has_sparse)):
            return place
        if spec.device is None:
            return self.host
        if spec.num_shards:
            raise InvalidArgumentError(
                f"expected {self.host.name} for a sharded accumulator, got {quoted(spec.device)}", field="spec.device"
            )
        such_as = f", such as {quoted(sparse.name)}" if sparse is not None and sparse.name else ""
        raise InvalidArgumentError(
            f"expected {self.host.name} for an accumulator with sparse components{such_as}, got {quoted(spec.device)}",
            field="spec.device",
        )

    def of_restored(self, spec: AccumulatorSpec, what: str) -> Place:
        """Returns the place of an accumulator that was there before: the host if its own is not there any more.

        Sums have the same bits there. A server that refused to start would take all the others away, too.
        """
        place = self.find(spec.device or self.host.name)
        if place is None:
            _log.warning("%s was on %s, which this server does not have: it is on the host now", what, spec.device)
        return place or self.host


def _sparse_component(spec: AccumulatorSpec) -> ComponentSpec | None:
    return next((each for each in spec.components if each.is_sparse), None)
