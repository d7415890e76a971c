"""`gradserve history`: the accumulators and parameters that are gone."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.parameters import metrics_text
from gradserve_server.commands.servers import ask_all, described_things, server_options, tell_problems
from gradserve_server.commands.wording import echo_json, json_option, table, tell

if TYPE_CHECKING:
    import gradserve
    from gradserve_protocol.server_status import PastRun

_MOST = 256
_HEADER = ("KIND", "CONTAINER", "NAME", "STEP", "BEGUN", "ENDED", "METRICS", "WHY")


@click.command()
@click.option("--container", metavar="NAME", default="", help="only what was in this container")
@click.option("--name", metavar="TEXT", default="", help="only those whose names contain this")
@json_option
@server_options
def history(address: str, timeout: float, container: str, name: str, as_json: bool, **tls: Any) -> None:
    """List the accumulators and parameters that are gone, the latest to end first.

    Servers keep the last 256 that had a round; with a state directory, also after a restart. Times are in UTC. Metrics
    are what the workers of parameters had measured in the latest round, such as the loss.
    """

    def ask(client: "gradserve.Client") -> "tuple[PastRun, ...]":
        return client.server_status(
            container=container,
            name_contains=name,
            max_accumulators=1,
            max_rounds=1,
            max_workers=1,
            max_past_runs=_MOST,
        ).past_runs

    answers = ask_all(address, timeout, ask, **tls)
    found = [(each.index, run) for each in answers for run in each.value or ()]
    found.sort(key=lambda pair: -pair[1].ended)
    if as_json:
        echo_json(described_things("runs", found, answers))
    elif found:
        tell(*table(_HEADER, [_row(run) for _, run in found], frozenset({3})))
    else:
        tell("nothing has been deleted")
    tell_problems(answers)


def _row(run: "PastRun") -> tuple[str, ...]:
    metrics = metrics_text(run.metrics)
    step = str(run.step) if run.step else ""
    return (run.kind, run.container, run.name, step, _time(run.begun), _time(run.ended), metrics, run.reason)


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}" if seconds else "?"
