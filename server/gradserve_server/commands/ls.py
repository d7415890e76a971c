"""`gradserve ls`: lists what is on servers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.kinds import ACCUMULATORS, LAYERS, TENSORS, Kind
from gradserve_server.commands.servers import (
    Answer,
    ask_all,
    described_servers,
    keep_address_argument,
    server_options,
    tell_problems,
)
from gradserve_server.commands.wording import as_plain, echo_json, json_option, size, table, tell, tell_problem

if TYPE_CHECKING:
    import gradserve
    from gradserve_protocol.server_status import AccumulatorStatus, LayerStatus

_MOST_ACCUMULATORS = 1000


class _KindOrAddress(Kind):
    """A kind, or the address of a server, which then takes the place of ADDRESS."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the kind in the plural; accumulators if the word is an address."""
        if ctx is None or ":" not in value:
            return super().convert(value, param, ctx)
        keep_address_argument(ctx, value)
        return ACCUMULATORS


@click.command()
@click.argument("kind", type=_KindOrAddress(), default=ACCUMULATORS)
@click.option("--container", metavar="NAME", default="", help="only what is in this container")
@click.option("--name", metavar="TEXT", default="", help="only accumulators or layers whose names contain this")
@json_option
@server_options
def ls(kind: str, address: str, timeout: float, container: str, name: str, as_json: bool, **tls: Any) -> None:
    """List the accumulators of a server or a cluster, its layers, or its stored tensors.

    Accumulators and layers are those of all containers in which you have a role. Tensors are not in containers.

    What training runs make for themselves, such as line/939e.../answers, is listed with, for example, --name /answers.
    """
    if kind == TENSORS and (container or name):
        raise click.UsageError("--container and --name are for accumulators and layers; tensors have neither")

    def ask(client: "gradserve.Client") -> _Found:
        if kind == TENSORS:
            tensors = client.list_tensors()
            return _Found(tensors, len(tensors))
        status = client.server_status(
            container=container, name_contains=name, order="name", max_accumulators=_MOST_ACCUMULATORS, max_rounds=1
        )
        if kind == LAYERS:
            return _Found(status.layers, status.num_layers)
        return _Found(status.accumulators, status.num_accumulators)

    answers = ask_all(address, timeout, ask, **tls)
    listed = [(each.index, thing) for each in answers if each.value for thing in each.value.things]
    if kind != TENSORS:
        listed.sort(key=lambda pair: (pair[1].container, pair[1].name, pair[0]))
    total = sum(each.value.total for each in answers if each.value)
    if as_json:
        echo_json(_described(kind, listed, total, answers))
    elif listed:
        tell(*_shown(kind, listed, with_servers=len(answers) > 1))
    else:
        tell(f"no {kind}")
    if total > len(listed):
        tell_problem(f"and {total - len(listed):,} more; choose with --container or --name")
    tell_problems(answers)


@dataclass(frozen=True)
class _Found:
    """A server's things of the kind: the first ones, and their total number."""

    things: Sequence[Any]
    total: int


def _described(
    kind: str, listed: list[tuple[int, Any]], total: int, answers: Sequence[Answer[_Found]]
) -> dict[str, Any]:
    counts = {} if kind == TENSORS else {f"num_{kind}": total}
    if len(answers) == 1:
        return {kind: [thing for _, thing in listed], **counts}
    things = [{"server": index, **as_plain(thing)} for index, thing in listed]
    return {kind: things, **counts, "servers": described_servers(answers)}


def _shown(kind: str, listed: list[tuple[int, Any]], *, with_servers: bool) -> list[str]:
    kinds: dict[str, Callable[[Sequence[Any]], _Table]] = {
        ACCUMULATORS: _accumulators,
        LAYERS: _layers,
        TENSORS: _tensors,
    }
    describe = kinds[kind]
    header, rows, right = describe([thing for _, thing in listed])
    if with_servers:
        header = ("SERVER", *header)
        rows = [(str(index), *row) for (index, _), row in zip(listed, rows, strict=True)]
        right = frozenset({0, *(at + 1 for at in right)})
    return table(header, rows, right)


_Table = tuple[tuple[str, ...], list[tuple[str, ...]], frozenset[int]]
"""The header, the rows, and the columns that are set flush right."""


def _accumulators(found: "Sequence[AccumulatorStatus]") -> _Table:
    header = ("CONTAINER", "NAME", "STEP", "ROUNDS/S", "IN ROUND", "WAITING", "STALE", "MEMORY")
    rows: list[tuple[str, ...]] = [
        (
            each.container,
            each.name,
            str(each.global_step),
            f"{each.rounds_per_second:.1f}",
            f"{each.num_accumulated} of {each.num_required}" if each.num_required else str(each.num_accumulated),
            str(each.num_waiting),
            str(each.stale),
            size(each.num_bytes),
        )
        for each in found
    ]
    return header, rows, frozenset({2, 3, 4, 5, 6, 7})


def _layers(found: "Sequence[LayerStatus]") -> _Table:
    rows: list[tuple[str, ...]] = [
        (each.container, each.name, str(each.num_forwards), size(each.num_bytes)) for each in found
    ]
    return ("CONTAINER", "NAME", "FORWARDS", "MEMORY"), rows, frozenset({2, 3})


def _tensors(found: "Sequence[gradserve.TensorHandle]") -> _Table:
    rows: list[tuple[str, ...]] = []
    for each in found:
        num_bytes = each.dtype.itemsize
        for length in each.shape:
            num_bytes *= length
        rows.append((each.handle, str(each.dtype), str(list(each.shape)), size(num_bytes)))
    return ("HANDLE", "DTYPE", "SHAPE", "SIZE"), rows, frozenset({3})
