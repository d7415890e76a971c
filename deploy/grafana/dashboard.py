"""Makes the Grafana dashboard: `python deploy/grafana/dashboard.py > deploy/grafana/gradserve.json`."""

import json
import sys
from dataclasses import dataclass
from typing import Any

_WIDTH = 24
_HEIGHT = 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_HERE = 'instance=~"$instance"'


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard.

    Attributes:
        title: Its title.
        text: What it shows, and what to do about it.
        queries: The legends of its lines, with the queries; HERE stands for the chosen servers.
        unit: Grafana's name of the unit.
        kind: "timeseries" or "stat".
        width: Its part of 24 columns.
        stacked: Whether its lines are areas on top of each other.
        from_zero: Whether its axis begins with zero.
    """

    title: str
    text: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    from_zero: bool = True


def _quantile(share: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{{HERE}}[$__rate_interval])))"


def _rate(counter: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate({counter}{{HERE{where}}}[$__rate_interval]))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        Panel(
            "Rounds per second",
            "Rounds that have ended, of all accumulators.",
            {"": "sum(rate(gradserve_round_seconds_count{HERE}[$__rate_interval]))"},
            "ops",
            "stat",
            4,
        ),
        Panel(
            "Goodput",
            "Bytes of gradients that joined a round.",
            {"": 'sum(rate(gradserve_gradient_bytes_total{HERE, outcome="accepted"}[$__rate_interval]))'},
            "Bps",
            "stat",
            4,
        ),
        Panel(
            "Too late",
            "The share of gradients that were computed for nothing, because their round had ended.",
            {
                "": 'sum(rate(gradserve_gradients_total{HERE, outcome="stale"}[$__rate_interval])) / '
                'sum(rate(gradserve_gradients_total{HERE, outcome=~"accepted|stale"}[$__rate_interval]))'
            },
            "percentunit",
            "stat",
            4,
        ),
        Panel(
            "Calls that wait",
            "Calls that wait for other workers now.",
            {"": 'sum(gradserve_resources{HERE, kind="waiters"})'},
            "short",
            "stat",
            4,
        ),
        Panel(
            "Memory of tensors",
            "How much of --max-bytes is in use.",
            {
                "": 'max(gradserve_memory_bytes{HERE, purpose="all tensors"} / '
                'gradserve_memory_limit_bytes{HERE, purpose="all tensors"})'
            },
            "percentunit",
            "stat",
            4,
        ),
        Panel(
            "Kernels ready",
            "1 once the kernels of the ops are loaded.",
            {"": "min(gradserve_kernels_ready{HERE})"},
            "short",
            "stat",
            4,
        ),
    ),
    "Rounds": (
        Panel(
            "Rounds per second, by accumulator",
            "The accumulators whose last rounds ended last.",
            {
                "{{container}}/{{accumulator}}": "topk(20, "
                "rate(gradserve_accumulator_rounds_total{HERE}[$__rate_interval]))"
            },
            "ops",
        ),
        Panel(
            "How long rounds take",
            "From the first gradient of a round to its end, and to its last gradient: the difference is the server's.",
            {
                "median": _quantile(0.5, "gradserve_round_seconds"),
                "95 of 100": _quantile(0.95, "gradserve_round_seconds"),
                "gathering, median": _quantile(0.5, "gradserve_round_gathering_seconds"),
                "gathering, 95 of 100": _quantile(0.95, "gradserve_round_gathering_seconds"),
            },
            "s",
        ),
        Panel(
            "Whom the others wait for",
            "The share of time in which rounds had all gradients but that of one worker.",
            {"{{worker}}": "topk(10, rate(gradserve_round_waited_for_worker_seconds_total{HERE}[$__rate_interval]))"},
            "percentunit",
        ),
        Panel(
            "Age of the current round",
            "A line that goes on rising is a round that waits for somebody who does not come.",
            {"{{container}}/{{accumulator}}": "topk(20, gradserve_accumulator_open_round_age_seconds{HERE})"},
            "s",
        ),
        Panel(
            "Gradients by outcome",
            "Accepted, stale (too late), duplicate and refused gradients.",
            {"{{outcome}}": _rate("gradserve_gradients_total", "outcome")},
            "ops",
            stacked=True,
        ),
        Panel(
            "How late stale gradients are",
            "In steps. One step late: backup workers. Many steps late: slow workers.",
            {"95 of 100": _quantile(0.95, "gradserve_gradient_staleness_steps")},
        ),
    ),
    "Parameters": (
        Panel(
            "Steps per second",
            "Rounds that were applied, by parameters and the reason of their end.",
            {
                "{{container}}/{{parameters}} {{reason}}": "topk(20, "
                "rate(gradserve_parameters_rounds_total{HERE}[$__rate_interval]))"
            },
            "ops",
            width=6,
        ),
        Panel(
            "Live workers that count",
            "The share of live workers whose update counted in the latest round.",
            {"{{container}}/{{parameters}}": "topk(20, gradserve_parameters_participation_ratio{HERE})"},
            "percentunit",
            width=6,
        ),
        Panel(
            "Updates by outcome",
            "Accepted, stale (computed from too old a version), duplicate and refused updates.",
            {"{{outcome}}": _rate("gradserve_parameters_updates_total", "outcome")},
            "ops",
            width=6,
            stacked=True,
        ),
        Panel(
            "How stale updates are",
            "Versions made since the one from which an update was computed.",
            {
                "median": _quantile(0.5, "gradserve_parameters_update_staleness_steps"),
                "95 of 100": _quantile(0.95, "gradserve_parameters_update_staleness_steps"),
            },
            width=6,
        ),
        Panel(
            "How long rounds of parameters take",
            "From the first update of a round to its end, and the part of it that the optimizer took.",
            {
                "median": _quantile(0.5, "gradserve_parameters_round_seconds"),
                "95 of 100": _quantile(0.95, "gradserve_parameters_round_seconds"),
                "optimizer, median": _quantile(0.5, "gradserve_parameters_apply_seconds"),
            },
            "s",
        ),
        Panel(
            "Age of the current round of parameters",
            "A line that goes on rising is a round that waits for somebody who does not come.",
            {"{{container}}/{{parameters}}": "topk(20, gradserve_parameters_open_round_age_seconds{HERE})"},
            "s",
        ),
        Panel(
            "What workers measure",
            "Losses and other metrics: the means of the latest round. A line that ends has become NaN.",
            {
                "{{container}}/{{parameters}} {{metric}}": "topk(20, "
                'gradserve_parameters_round_metric{HERE, metric=~"$metric"})'
            },
            width=12,
            from_zero=False,
        ),
        Panel(
            "Evaluations",
            "What was measured of the newest version of which somebody has reported.",
            {
                "{{container}}/{{parameters}} {{metric}}": "topk(20, "
                'gradserve_parameters_evaluation_metric{HERE, metric=~"$metric"})'
            },
            width=12,
            from_zero=False,
        ),
        Panel(
            "Weight",
            "Weight per second of updates in versions, and of updates that did not count.",
            {
                "{{container}}/{{parameters}} applied": "topk(20, "
                "rate(gradserve_parameters_applied_weight_total{HERE}[$__rate_interval]))",
                "{{container}}/{{parameters}} {{reason}}": "topk(20, "
                "rate(gradserve_parameters_refused_weight_total{HERE}[$__rate_interval]))",
            },
        ),
    ),
    "Calls": (
        Panel(
            "Calls per second",
            "Calls that have ended.",
            {"{{grpc_method}}": _rate("grpc_server_handled_total", "grpc_method")},
            "ops",
        ),
        Panel(
            "Failed calls per second",
            "Calls that have ended with an error; the log of the server has lines about them.",
            {
                "{{grpc_method}} {{grpc_code}}": _rate(
                    "grpc_server_handled_total", "grpc_method, grpc_code", ', grpc_code!="OK"'
                )
            },
            "ops",
        ),
        Panel(
            "Work on a call, 99 of 100",
            "Without the time in which it waited for other workers.",
            {"{{grpc_method}}": _quantile(0.99, "grpc_server_handling_seconds", "grpc_method")},
            "s",
        ),
        Panel(
            "Waiting of calls, median",
            "For other workers.",
            {"{{grpc_method}}": _quantile(0.5, "gradserve_call_waiting_seconds", "grpc_method")},
            "s",
        ),
        Panel(
            "Received",
            "Bytes of requests, by way.",
            {"{{way}}": _rate("gradserve_transferred_bytes_total", "way", ', direction="received"')},
            "Bps",
            stacked=True,
        ),
        Panel(
            "Sent",
            "Bytes of replies, by way.",
            {"{{way}}": _rate("gradserve_transferred_bytes_total", "way", ', direction="sent"')},
            "Bps",
            stacked=True,
        ),
    ),
    "The server": (
        Panel(
            "Memory by purpose",
            "Stored tensors, accumulators, layers and calls together are all tensors.",
            {"{{purpose}}": 'sum by (purpose) (gradserve_memory_bytes{HERE, purpose!="all tensors"})'},
            "bytes",
            stacked=True,
        ),
        Panel(
            "What there is",
            "Handles, accumulators, layers, waiting calls, connections, regions, leases.",
            {"{{kind}}": "sum by (kind) (gradserve_resources{HERE})"},
        ),
        Panel(
            "Share of limits",
            "What is near 1 will be refused soon.",
            {
                "{{kind}}": "max by (kind) (gradserve_resources{HERE} / gradserve_resource_limit{HERE})",
                "{{purpose}}": "max by (purpose) (gradserve_memory_bytes{HERE} / gradserve_memory_limit_bytes{HERE})",
            },
            "percentunit",
        ),
        Panel(
            "Processor", "Cores in use.", {"{{instance}}": "rate(process_cpu_seconds_total{HERE}[$__rate_interval])"}
        ),
        Panel(
            "Resident memory", "Of the whole process.", {"{{instance}}": "process_resident_memory_bytes{HERE}"}, "bytes"
        ),
        Panel(
            "Open descriptors",
            "Sockets, files and shared memory.",
            {"{{instance}}": "process_open_fds{HERE}"},
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard in Grafana's own form."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {"type": "row", "title": title, "gridPos": _place(0, y, _WIDTH, 1), "id": len(panels) + 1, "panels": []}
        )
        y, x = y + 1, 0
        height = 4 if row[0].kind == "stat" else _HEIGHT
        for panel in row:
            if x + panel.width > _WIDTH:
                x, y = 0, y + height
            panels.append({**_panel(panel), "gridPos": _place(x, y, panel.width, height), "id": len(panels) + 1})
            x += panel.width
        y += height
    return {
        "uid": "gradserve",
        "title": "gradserve",
        "tags": ["gradserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                _choice("instance", "Server", "label_values(gradserve_info, instance)"),
                _choice(
                    "metric",
                    "Metric",
                    'label_values({__name__=~"gradserve_parameters_(round|evaluation)_metric"}, metric)',
                ),
            ]
        },
        "panels": panels,
    }


def _choice(name: str, label: str, query: str) -> dict[str, Any]:
    """Returns a variable whose values are those of a query; all of them at first."""
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel) -> dict[str, Any]:
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    defaults: dict[str, Any] = {"unit": panel.unit, **({"min": 0} if panel.from_zero else {})}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query.replace("HERE", _HERE),
                "legendFormat": legend,
            }
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=2) + "\n")
