"""`gradserve ls`, `show` and `rm`: what is on servers, of each kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from gradserve_protocol.printing import visible
from gradserve_server.commands import parameters as parameters_command
from gradserve_server.commands.servers import (
    ACCUMULATORS,
    AT_HOME,
    LAYERS,
    PARAMETERS,
    TENSORS,
    Answer,
    Kind,
    address_option,
    ask_all,
    ask_one,
    complete_names,
    connected,
    connection_options,
    described_things,
    keep_address_argument,
    one_of,
    server_options,
    servers_at,
    status_about,
    tell_problems,
    tls_of,
)
from gradserve_server.commands.what_if import better_rules
from gradserve_server.commands.wording import (
    compared_weights,
    duration,
    echo_json,
    json_option,
    size,
    some,
    table,
    tell,
    tell_problem,
)
from gradserve_server.runtime.process import silence_grpc

if TYPE_CHECKING:
    import gradserve
    from gradserve_protocol.server_status import AccumulatorStatus, LayerStatus, ParametersStatus, RoundStatus

_MOST_ACCUMULATORS = 1000
_MUCH_LONGER = 3
_LONGER_SECONDS = 2.0


container_option = click.option("--container", metavar="NAME", default="", help="the container  [default: default]")


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
@click.option("--name", metavar="TEXT", default="", help="only those whose names contain this; not for tensors")
@json_option
@server_options
def ls(kind: str, address: str, timeout: float, container: str, name: str, as_json: bool, **tls: Any) -> None:
    """List the accumulators of a server or a cluster, its parameters, its layers, or its stored tensors.

    They are those of all containers in which you have a role. Tensors are not in containers.

    What training runs make for themselves, such as line/939e.../answers, is listed with, for example, --name /answers.
    """
    if kind == TENSORS and (container or name):
        raise click.UsageError(
            "--container and --name are for accumulators, parameters and layers; tensors have neither"
        )

    def ask(client: "gradserve.Client") -> _Found:
        if kind == TENSORS:
            tensors = client.list_tensors()
            return _Found(tensors, len(tensors))
        status = client.server_status(
            container=container, name_contains=name, order="name", max_accumulators=_MOST_ACCUMULATORS, max_rounds=1
        )
        if kind == LAYERS:
            return _Found(status.layers, status.num_layers)
        if kind == PARAMETERS:
            return _Found(status.parameters, status.num_parameters)
        return _Found(status.accumulators, status.num_accumulators)

    answers = ask_all(address, timeout, ask, **tls)
    listed = [(each.index, thing) for each in answers if each.value for thing in each.value.things]
    if kind != TENSORS:
        listed.sort(key=lambda pair: (pair[1].container, pair[1].name, pair[0]))
    total = sum(each.value.total for each in answers if each.value)
    if as_json:
        counts = {} if kind == TENSORS else {f"num_{kind}": total}
        echo_json(described_things(kind, listed, answers, **counts))
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


def _shown(kind: str, listed: list[tuple[int, Any]], *, with_servers: bool) -> list[str]:
    kinds: dict[str, Callable[[Sequence[Any]], _Table]] = {
        ACCUMULATORS: _accumulators,
        PARAMETERS: _parameters,
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


def _parameters(found: "Sequence[ParametersStatus]") -> _Table:
    return parameters_command.HEADER, parameters_command.rows_of(found), parameters_command.RIGHT


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


@click.command()
@click.argument("kind", type=Kind())
@click.argument("name", shell_complete=complete_names)
@container_option
@json_option
@server_options
def show(kind: str, name: str, address: str, timeout: float, container: str, as_json: bool, **tls: Any) -> None:
    """Show one accumulator, parameters or layer by its name, or one tensor by its handle.

    Of an accumulator, also its last rounds: who came when, who was late, and who is missing. Of parameters, also their
    rules, the weight of all updates, and the records of the last 20 rounds.
    """

    def ask(client: "gradserve.Client") -> dict[str, Any] | None:
        if kind == PARAMETERS:
            import gradserve

            connect = partial(gradserve.connect, address, timeout=timeout, tls=tls_of(**tls))
            return parameters_command.find(client, name, container, connect)
        return _FIND[kind](client, name, container)

    answers = _answers(address, timeout, kind, name, container, ask, **tls)
    found = next((each.value for each in answers if each.value is not None), None)
    if found is None:
        tell_problems(answers)
        full_name = f"{container or 'default'}/{name}" if kind in AT_HOME else name
        raise click.ClickException(f"no {one_of(kind)} {full_name} on {address}")
    if as_json:
        echo_json({key: value for key, value in found.items() if key != "uptime"})
    else:
        tell(*_TEXT[kind](**found))


def _answers(
    address: str,
    timeout: float,
    kind: str,
    name: str,
    container: str,
    ask: "Callable[[gradserve.Client], dict[str, Any] | None]",
    **tls: Any,
) -> Sequence[Answer[dict[str, Any] | None]]:
    """Asks the home of an accumulator or of parameters, and all servers for anything else."""
    silence_grpc()
    servers = servers_at(address, timeout)
    if kind not in AT_HOME or len(servers) == 1:
        return ask_all(address, timeout, ask, **tls)
    from gradserve_protocol.placement import home_of  # not before silence_grpc: it imports gRPC

    return [ask_one(servers, home_of(container, name, len(servers)), timeout, tls_of(**tls), ask)]


def _find_accumulator(client: "gradserve.Client", name: str, container: str) -> dict[str, Any] | None:
    place = container or "default"
    found = [each for each in client.list_accumulators(place) if each.name == name]
    if not found:
        return None
    status = status_about(client, place, name)
    seen = [each for each in status.accumulators if each.name == name]
    return {"info": found[0], "status": seen[0] if seen else None, "uptime": status.uptime}


def _find_layer(client: "gradserve.Client", name: str, container: str) -> dict[str, Any] | None:
    return next(({"layer": each} for each in client.list_batch_norm_layers(container) if each.name == name), None)


def _find_tensor(client: "gradserve.Client", name: str, _container: str) -> dict[str, Any] | None:
    return next(({"tensor": each} for each in client.list_tensors() if each.handle == name), None)


_FIND = {
    ACCUMULATORS: _find_accumulator,
    LAYERS: _find_layer,
    TENSORS: _find_tensor,
}


def _accumulator(info: "gradserve.AccumulatorInfo", status: "AccumulatorStatus | None", uptime: float) -> list[str]:
    lines = [
        f"{info.container}/{info.name}: step {info.global_step}, {size(info.num_bytes)} on {info.device}"
        + (", private to a client" if info.is_private else ""),
        f"current round: {info.num_accumulated} gradients"
        + (f" of {status.num_required}" if status is not None and status.num_required else "")
        + f", {info.num_waiting} calls wait",
    ]
    if info.worker_ids:
        lines.append(f"  from {some(info.worker_ids)}")
    if status is None:
        return lines
    if status.missing and _is_overdue(status, uptime):
        lines.append(f"  missing from the round before: {some(status.missing)}")
    lines += [f"  {line}" for line in compared_weights(status)]
    lines.append(
        f"since the server started: {status.accepted} gradients accepted, {status.stale} stale, "
        f"{status.duplicate} duplicate, {status.refused} refused; {status.rounds_per_second:.1f} rounds/s"
    )
    lines += better_rules(status)
    ended = [each for each in status.rounds if each.ended]
    if ended:
        lines += [
            "",
            *table(_ROUND_COLUMNS, [_round(each, uptime) for each in reversed(ended)], frozenset({0, 1, 2, 3})),
        ]
    return lines


def _is_overdue(status: "AccumulatorStatus", uptime: float) -> bool:
    """True if the open round lasts much longer than the others, for which its workers are then to be named."""
    usual = status.median_round_seconds
    opened = next((each for each in status.rounds if not each.ended), None)
    return opened is not None and uptime - opened.began > max(_MUCH_LONGER * usual, usual + _LONGER_SECONDS)


_ROUND_COLUMNS = ("STEP", "ENDED AGO", "TOOK", "GRADIENTS", "LAST", "LATE", "MISSING")


def _round(described: "RoundStatus", uptime: float) -> tuple[str, ...]:
    in_time = [each for each in described.arrivals if not each.stale]
    last = in_time[-1] if in_time else None
    return (
        str(described.step),
        duration(max(uptime - described.ended, 0.0)),
        duration(described.ended - described.began),
        str(len(in_time)),
        f"{last.worker_id or '(no id)'} after {duration(last.after)}" if last else "",
        some(each.worker_id or "(no id)" for each in described.arrivals if each.stale),
        some(described.missing),
    )


def _layer(layer: "gradserve.BatchNormLayerInfo") -> list[str]:
    lines = [
        f"{layer.container}/{layer.name}: {size(layer.num_bytes)}"
        + (", private to a client" if layer.is_private else ""),
        f"{layer.num_forwards} forwards kept, {layer.num_updates} updates of the moving averages",
    ]
    if layer.variables:
        rows = [(each.name, str(each.dtype), str(list(each.shape))) for each in layer.variables]
        lines += ["", *table(("VARIABLE", "DTYPE", "SHAPE"), rows)]
    return lines


def _tensor(tensor: "gradserve.TensorHandle") -> list[str]:
    return [f"{tensor.dtype} {list(tensor.shape)}"]


_TEXT: dict[str, Callable[..., list[str]]] = {
    ACCUMULATORS: _accumulator,
    PARAMETERS: partial(parameters_command.described, some=some),
    LAYERS: _layer,
    TENSORS: _tensor,
}


@click.command()
@click.argument("kind", type=Kind())
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names)
@container_option
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@address_option
@connection_options
def rm(
    kind: str,
    names: Sequence[str],
    address: str,
    timeout: float,
    container: str,
    yes: bool,
    as_json: bool,
    **tls: Any,
) -> None:
    """Delete accumulators, parameters or layers by name, or tensors by handle.

    Calls that wait on what is deleted fail. Exits with 1 if something was not there; the rest is deleted.
    """
    if not yes:
        what = one_of(kind) if len(names) == 1 else f"{len(names)} {kind}"
        click.confirm(visible(f"Delete {what} {', '.join(names)} of {address}?"), abort=True, err=True)
    silence_grpc()
    servers = servers_at(address, timeout)
    deleted: dict[str, bool] = {}
    problems: list[str] = []
    try:
        with connected(address, timeout, **tls) as client:
            for name in dict.fromkeys(names):
                if len(servers) == 1:
                    deleted[name] = _delete(client, kind, name, container)
                else:
                    found = _delete_in_cluster(client, servers, kind, name, container, timeout, tls_of(**tls))
                    silent = [each for each in found if each.problem]
                    problems += [f"server {each.index} at {each.address}: {each.problem}" for each in silent]
                    was_there = any(each.value for each in found)
                    if was_there or not silent:  # Otherwise nobody knows.
                        deleted[name] = was_there
                if deleted.get(name) and not as_json:
                    tell(f"deleted {name}")
    finally:
        if as_json:  # what was deleted before a call has failed, too
            echo_json({"deleted": deleted})
    missing = [name for name, was_there in deleted.items() if not was_there]
    if missing:
        problems.append(f"no {kind} {', '.join(missing)} on {address}")
    if problems:
        raise click.ClickException("\n".join(dict.fromkeys(problems)))


def _delete_in_cluster(
    client: "gradserve.Client",
    servers: Sequence[str],
    kind: str,
    name: str,
    container: str,
    timeout: float,
    tls: "gradserve.TLS | None",
) -> list[Answer[bool]]:
    """Deletes an accumulator or parameters through their home, and anything else from whatever server has it."""
    if kind not in AT_HOME:
        return [
            ask_one(servers, index, timeout, tls, lambda server: _delete(server, kind, name, container))
            for index in range(len(servers))
        ]
    from gradserve_protocol.placement import home_of  # not before silence_grpc: it imports gRPC

    home = home_of(container, name, len(servers))
    return [ask_one(servers, home, timeout, tls, lambda _: _delete(client, kind, name, container))]


def _delete(client: "gradserve.Client", kind: str, name: str, container: str) -> bool:
    if kind == ACCUMULATORS:
        return client.delete_accumulator(name, container)
    if kind == PARAMETERS:
        return client.delete_parameters(name, container)
    if kind == LAYERS:
        return client.delete_batch_norm_layer(name, container)
    found = [each for each in client.list_tensors() if each.handle == name]
    return bool(client.delete(*found)) if found else False
