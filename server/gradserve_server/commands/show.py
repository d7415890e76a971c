"""`gradserve show`: shows one accumulator, layer or tensor."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.kinds import ACCUMULATORS, LAYERS, TENSORS, Kind, complete_names, container_option
from gradserve_server.commands.servers import (
    Answer,
    ask_all,
    ask_one,
    server_options,
    servers_at,
    tell_problems,
    tls_of,
)
from gradserve_server.commands.wording import duration, echo_json, json_option, size, table, tell
from gradserve_server.runtime.process import silence_grpc

if TYPE_CHECKING:
    import gradserve
    from gradserve_protocol.server_status import AccumulatorStatus, RoundStatus

_MOST_NAMED = 20
_MUCH_LONGER = 3
_LONGER_SECONDS = 2.0


@click.command()
@click.argument("kind", type=Kind())
@click.argument("name", shell_complete=complete_names)
@container_option
@json_option
@server_options
def show(kind: str, name: str, address: str, timeout: float, container: str, as_json: bool, **tls: Any) -> None:
    """Show one accumulator or layer by its name, or one tensor by its handle.

    Of an accumulator, also its last rounds: who came when, who was late, and who is missing.
    """

    def ask(client: "gradserve.Client") -> dict[str, Any] | None:
        return _FIND[kind](client, name, container)

    answers = _answers(address, timeout, kind, name, container, ask, **tls)
    found = next((each.value for each in answers if each.value is not None), None)
    if found is None:
        tell_problems(answers)
        full_name = f"{container or 'default'}/{name}" if kind == ACCUMULATORS else name
        raise click.ClickException(f"no {kind.removesuffix('s')} {full_name} on {address}")
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
    """Asks the home of an accumulator, and all servers for anything else."""
    silence_grpc()
    servers = servers_at(address, timeout)
    if kind != ACCUMULATORS or len(servers) == 1:
        return ask_all(address, timeout, ask, **tls)
    from gradserve_protocol.placement import home_of  # not before silence_grpc: it imports gRPC

    return [ask_one(servers, home_of(container, name, len(servers)), timeout, tls_of(**tls), ask)]


def _find_accumulator(client: "gradserve.Client", name: str, container: str) -> dict[str, Any] | None:
    place = container or "default"
    found = [each for each in client.list_accumulators(place) if each.name == name]
    if not found:
        return None
    status = client.server_status(container=place, name_contains=f"{place}/{name}", max_accumulators=1000)
    seen = [each for each in status.accumulators if each.name == name]
    return {"info": found[0], "status": seen[0] if seen else None, "uptime": status.uptime}


def _find_layer(client: "gradserve.Client", name: str, container: str) -> dict[str, Any] | None:
    return next(({"layer": each} for each in client.list_batch_norm_layers(container) if each.name == name), None)


def _find_tensor(client: "gradserve.Client", name: str, _container: str) -> dict[str, Any] | None:
    return next(({"tensor": each} for each in client.list_tensors() if each.handle == name), None)


_FIND = {ACCUMULATORS: _find_accumulator, LAYERS: _find_layer, TENSORS: _find_tensor}


def _accumulator(info: "gradserve.AccumulatorInfo", status: "AccumulatorStatus | None", uptime: float) -> list[str]:
    lines = [
        f"{info.container}/{info.name}: step {info.global_step}, {size(info.num_bytes)} on {info.device}"
        + (", private to a client" if info.is_private else ""),
        f"current round: {info.num_accumulated} gradients"
        + (f" of {status.num_required}" if status is not None and status.num_required else "")
        + f", {info.num_waiting} calls wait",
    ]
    if info.worker_ids:
        lines.append(f"  from {_some(info.worker_ids)}")
    if status is None:
        return lines
    if status.missing and _is_overdue(status, uptime):
        lines.append(f"  missing from the round before: {_some(status.missing)}")
    lines.append(
        f"since the server started: {status.accepted} gradients accepted, {status.stale} stale, "
        f"{status.duplicate} duplicate, {status.refused} refused; {status.rounds_per_second:.1f} rounds/s"
    )
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
        _some(each.worker_id or "(no id)" for each in described.arrivals if each.stale),
        _some(described.missing),
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


_TEXT: dict[str, Callable[..., list[str]]] = {ACCUMULATORS: _accumulator, LAYERS: _layer, TENSORS: _tensor}


def _some(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    more = len(listed) - _MOST_NAMED
    return ", ".join(listed[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
