"""Plans the redistribution of sharded accumulators when their cluster gets another number of servers."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from gradserve_protocol.placement import Plan, dense_bytes, plan_of
from gradserve_ray.states.member_state import Contents, MoveError, Sharded
from gradserve_ray.states.movable import Key
from gradserve_ray.states.shards import Division, Planned
from gradserve_server.accumulators.journal import PartKey, Staged
from gradserve_server.accumulators.records import spec_of

_BATCH_BYTES = 256 << 20
"""The most bytes of gradients that travel together."""


@dataclass(frozen=True)
class Resharding:
    """A change of the servers over which an accumulator is sharded.

    Attributes:
        key: Its container and name.
        source: Its home before.
        target: Its home after.
        spec: Its specification after, as JSON.
        before: Which server has what before.
        after: Which server has what after.
        parts: The gradients that are held, with their local steps.
        num_bytes: The size of the dense components of one.
    """

    key: Key
    source: int
    target: int
    spec: str
    before: Division
    after: Division
    parts: Mapping[PartKey, Staged]
    num_bytes: int

    def batches(self) -> Iterator[dict[PartKey, Staged]]:
        """Yields the gradients in groups of up to 256 MiB, or one at a time if they are larger."""
        left = list(self.parts.items())
        count = max(1, _BATCH_BYTES // max(1, self.num_bytes))
        for start in range(0, len(left), count):
            yield dict(left[start : start + count])

    @cached_property
    def servers(self) -> frozenset[int]:
        """The servers that have something of it afterwards."""
        return frozenset({self.target, *self.after.rows})

    @cached_property
    def cuts(self) -> dict[str, set[int]]:
        """The rows at which components are divided before or after, by component."""
        return self.before.cuts_with(self.after)


def reshardings(contents: Mapping[int, Contents], before: int, after: int) -> list[Resharding]:
    """Returns what becomes of all sharded accumulators.

    Args:
        contents: What each server has.
        before: The number of servers.
        after: The number that there are to be.

    Raises:
        MoveError: A gradient that an accumulator needs is not on all servers that have to have it.
    """
    keys = sorted({key for found in contents.values() for key in found.sharded})
    return [
        _resharding(key, at_home, contents, before, after)
        for key in keys
        # Without a home it is what an interrupted deletion has left: nobody can name its gradients.
        if (at_home := contents[key.home(before)].sharded.get(key)) is not None
    ]


def _resharding(key: Key, at_home: Sharded, contents: Mapping[int, Contents], before: int, after: int) -> Resharding:
    spec = spec_of(json.loads(at_home.spec))
    if spec.num_shards != before:
        raise MoveError(f"{key} is sharded over {spec.num_shards} servers, not {before}")
    target = key.home(after)
    components = [Planned(each.name, each.dtype, each.shape.dims, each.is_sparse) for each in spec.components]
    planned = _planned(at_home.spec, plan_of(components, target, after), after)
    division = Division(spec)
    held = {server: contents[server].held_for(key, at_home.incarnation) for server in division.rows}
    _check_needed(key, at_home, held)
    first, *others = held.values()
    return Resharding(
        key,
        key.home(before),
        target,
        planned,
        division,
        Division(spec_of(json.loads(planned))),
        {part: step for part, step in first.items() if all(other.get(part) == step for other in others)},
        sum(dense_bytes(each) for each in components if not each.is_sparse),
    )


def _planned(spec: str, plan: Plan, servers: int) -> str:
    """Returns a specification with the plan for another number of servers."""
    record = json.loads(spec)
    record["num_shards"] = servers
    for component in record["components"]:
        component["pieces"] = [list(piece) for piece in plan[component["name"]]]
    return json.dumps(record)


def _check_needed(key: Key, at_home: Sharded, held: Mapping[int, Mapping[PartKey, Staged]]) -> None:
    """Checks that each server with pieces has the gradients of the rounds that the home still needs."""
    for number, ids in sorted(at_home.needed.items()):
        for server, parts in sorted(held.items()):
            if missing := ids - _ids(parts):
                raise MoveError(
                    f"server {server} lacks {len(missing)} of the {len(ids)} gradients of round {number + 1} of "
                    f"{key}, whose average is kept: end rounds until it is not, or delete the "
                    "accumulator"
                )


def _ids(parts: Iterable[PartKey]) -> set[str]:
    return {each.id for each in parts}
