"""`gradserve what-if`: what the last rounds would have been with fewer required gradients, or with a grace."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gradserve_protocol.server_status import AccumulatorStatus, ParametersStatus
from gradserve_server.commands.servers import ask_all, complete_rounds, server_options, status_about, tell_problems
from gradserve_server.commands.wording import duration, echo_json, json_option, table, tell
from gradserve_server.observe import what_if as replaying
from gradserve_server.observe.what_if import FEWEST_ROUNDS, Alternative, WhatIf

if TYPE_CHECKING:
    import gradserve


@click.command()
@click.argument("name", shell_complete=complete_rounds)
@click.option("--container", metavar="NAME", default="", help="the container  [default: default]")
@json_option
@server_options
def what_if(name: str, address: str, timeout: float, container: str, as_json: bool, **tls: Any) -> None:
    """Print what the last rounds of an accumulator or of parameters would have been under other rules.

    Replays them from the recorded arrivals: with a backup worker or two, a majority, one gradient more, and for
    parameters with a grace. Says how long rounds would take and how many gradients would come too late.
    """
    place = container or "default"

    def ask(client: "gradserve.Client") -> AccumulatorStatus | ParametersStatus | None:
        status = status_about(client, place, name)
        listed: list[AccumulatorStatus | ParametersStatus] = [*status.accumulators, *status.parameters]
        return next((each for each in listed if each.name == name), None)

    answers = ask_all(address, timeout, ask, **tls)
    found = next((each.value for each in answers if each.value is not None), None)
    if found is None:
        tell_problems(answers)
        raise click.ClickException(f"no accumulator and no parameters {place}/{name} on {address}")
    replayed = _replayed(found)
    if replayed is None:
        raise click.ClickException(
            f"too few rounds of {place}/{name} to replay: expected {FEWEST_ROUNDS} ended rounds with two workers that "
            "have ids (worker_id=...)"
        )
    if as_json:
        echo_json(replayed)
    else:
        tell(*_lines(replayed))


def better_rules(described: AccumulatorStatus | ParametersStatus) -> Sequence[str]:
    """Returns a line with rules that would have been better for an accumulator or parameters, none if none would."""
    found = _replayed(described)
    best = _best(found) if found is not None else ""
    return [f"what if: {best}"] if best else []


def _replayed(described: AccumulatorStatus | ParametersStatus) -> WhatIf | None:
    return replaying.what_if(described.rounds, has_grace=isinstance(described, ParametersStatus))


def _best(found: WhatIf) -> str:
    best = found.better
    if best is None:
        return ""
    return (
        f"with {_rule(best)} of {found.num_workers} gradients, a round would have taken {duration(best.seconds)} in "
        f"place of {duration(found.as_required.seconds)}, {best.late:.0%} of the gradients would have come too late, "
        f"and {best.per_second / found.as_required.per_second:.1f} times as many would have counted"
    )


def _rule(rule: Alternative) -> str:
    return f"{rule.num_required}" + (f" (grace {duration(rule.grace)})" if rule.grace else "")


_COLUMNS = ("REQUIRED", "GRACE", "ROUND", "FASTER", "TOO LATE", "GRADIENTS/S")


def _lines(found: WhatIf) -> Sequence[str]:
    rules = sorted((found.as_required, *found.alternatives), key=lambda each: (-each.num_required, each.grace))
    rows = [_row(each, found.as_required) for each in rules]
    return (
        f"the last {found.num_rounds} rounds of {found.num_workers} workers took {duration(found.seconds)} each; "
        "replayed from their arrivals:",
        "",
        *table(_COLUMNS, rows, frozenset(range(len(_COLUMNS)))),
        "",
        _best(found) or "No other rule would have let a tenth more gradients count.",
    )


def _row(rule: Alternative, base: Alternative) -> tuple[str, ...]:
    return (
        f"{rule.num_required}",
        duration(rule.grace) if rule.grace else "",
        duration(rule.seconds),
        "as required" if rule is base else f"{1 - rule.seconds / base.seconds:.0%}" if base.seconds else "",
        f"{rule.late:.0%}",
        f"{rule.per_second:.3g}",
    )
