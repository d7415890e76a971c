"""Batches that are loaded ahead of the steps in which they are taken."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from gradserve_protocol.argument import Argument

T = TypeVar("T")
LoadedT = TypeVar("LoadedT")
_LOAD = Argument("load")


class Prefetched(Generic[T, LoadedT]):
    """The batches of one worker as a loader returns them, which may be ahead of the steps. Made by `Batches.prefetch`.

    `for loaded in prefetched` is as `for batch in batches`: it ends with the epoch, and gives what comes next at this
    moment, also if a worker has come or died since it was loaded. The loader is asked for what is expected: that all
    workers of the last round are in the next ones, too. What it has loaded for nothing is dropped.
    """

    def __init__(
        self,
        load: Callable[[Iterable[list[T]]], Iterable[LoadedT]],
        places: Callable[[], Iterator[range]],
        expected: Callable[[], Iterator[range]],
        batch: Callable[[range], list[T]],
    ) -> None:
        """Begins with nothing loaded.

        Args:
            load: See `Batches.prefetch`.
            places: Takes batches, and yields their places in the sequence of all epochs, until the epoch ends.
            expected: Yields the places of the batch that was taken last, and of those that are expected after it.
            batch: Returns the batch at some places.
        """
        self._load = load
        self._places = places
        self._expected = expected
        self._batch = batch
        self._loader: Iterator[LoadedT] | None = None
        self._asked: deque[int] = deque()
        """The first place of each batch that the loader has been given and has not returned."""
        self._loaded: dict[int, LoadedT] = {}
        """The batches that it has returned, by first place."""
        self._unread: Iterator[range] = iter(())
        self._ahead: list[range] = []
        """The batches that are expected, from the present one on, as far as they were looked at."""

    def __iter__(self) -> Iterator[LoadedT]:
        return map(self._take, self._places())

    def _take(self, places: range) -> LoadedT:
        self._unread, self._ahead = self._expected(), []
        num_held = len(self._asked) + len(self._loaded)
        useful = {each.start for each in islice(self._coming(), num_held + 1)}
        self._loaded = {place: each for place, each in self._loaded.items() if place in useful}
        while places.start not in self._loaded:
            self._receive()
        return self._loaded[places.start]  # kept until it has counted: it comes again if the step fails

    def _receive(self) -> None:
        """Waits for what the loader returns next; begins with a new one if it fails."""
        if self._loader is None:
            self._asked.clear()
            opened = self._load(self._asks())
            if not isinstance(opened, Iterable):
                raise _LOAD.error("a function that returns an iterable", opened)
            self._loader = iter(opened)
        loader, self._loader = self._loader, None
        try:
            loaded = next(loader)
        except StopIteration:
            raise _LOAD.error_saying("a function whose items end only with the lists", "one whose items end") from None
        if not self._asked:
            raise _LOAD.error_saying("a function that returns one item for each list", "one that returns more")
        self._loader = loader
        self._loaded[self._asked.popleft()] = loaded

    def _asks(self) -> Iterator[list[T]]:
        """Yields the first batch that is expected, and neither loaded nor asked for, whenever the loader has room."""
        while True:
            held = {*self._asked, *self._loaded}
            places = next(each for each in self._coming() if each.start not in held)
            self._asked.append(places.start)
            yield self._batch(places)

    def _coming(self) -> Iterator[range]:
        yield from self._ahead
        for each in self._unread:
            self._ahead.append(each)
            yield each
