"""`gradserve plan`."""

import json

import pytest
from click.testing import CliRunner, Result

from gradserve_server.commands.cli import cli

RUN = ("--model-bytes", "100MB", "--workers", "4", "--bandwidth", "200Mbit", "--worker-bandwidth", "200Mbit/s")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def test_the_table_and_the_advice() -> None:
    done = run(*RUN, "--servers", "8")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].split() == ["servers", "round", "computing", "stale", "into", "each", "server"]
    assert lines[1].split() == ["1", "33.7", "s", "0", "%", "0", "%", "381", "MiB"]
    assert lines[3].split()[:3] == ["4", "8.4", "s"]
    assert lines[3].endswith("<- enough")
    assert "Run 4 servers" in lines[6]
    assert lines[7].endswith("--cluster NAME --cluster-index I --cluster-size 4")


def test_aggregators() -> None:
    done = run("--model-bytes", "100MB", "--workers", "8", "--bandwidth", "200Mbit", "--workers-per-host", "4")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[1].split()[:3] == ["1", "16.8", "s"]
    assert done.output.splitlines()[-1] == "Workers: gradserve.connect(ADDRESS, local_aggregator=4)"
    assert "local_aggregator" not in run(*RUN).output


def test_json() -> None:
    found = json.loads(run(*RUN, "--json").output)
    assert found["num_servers"] == 4
    assert found["deployment"]["server_bandwidth"] == 25e6
    assert [choice["num_servers"] for choice in found["choices"]] == [1, 2, 4, 8, 16, 32, 64]
    assert found["choices"][2]["forecast"]["round_seconds"] == pytest.approx(8.42, abs=0.01)


def test_one_server_is_enough() -> None:
    assert (
        "Run one server"
        in run("--model-bytes", "1MiB", "--workers", "4", "--bandwidth", "10gbit", "--compute", "1min").output
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--model-bytes", "14X"), "expected a number with a unit, such as 500MB or 2GiB, got '14X'"),
        (("--model-bytes", "-1MB"), "got '-1MB'"),
        (("--model-bytes", "0"), "have to be more than 0"),
        (("--bandwidth", "10GB"), "such as 10Gbit, got '10GB'"),
        (("--bandwidth", "0Gbit"), "have to be more than 0"),
        (("--latency", "4h"), "such as 40ms or 2.5s, got '4h'"),
        (("--required", "5"), "--required 5 is more than --workers 4: no round would end"),
        (("--workers", "0"), "0 is not in the range"),
        (("--servers", "1001"), "1001 is not in the range"),
        (("--jitter", "3"), "3.0 is not in the range"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], expected: str) -> None:
    done = run(*RUN, *arguments)
    assert done.exit_code == 2
    assert expected in done.output
