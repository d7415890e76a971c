"""`gradserve history`."""

import numpy as np

import gradserve
from tests.commands.conftest import CommandLine


def test_what_is_gone_is_listed(command_line: CommandLine, client: gradserve.Client) -> None:
    assert command_line.run("history", "--name", "past/net").stdout == "nothing has been deleted\n"
    values = {"w": np.ones(2, np.float32)}
    parameters = client.parameters(values, shared_name="past/net", optimizer=gradserve.optim.SGD(0.5))
    parameters.push_pull(values, 0, metrics={"loss": 0.25})
    client.delete_parameters("past/net")
    header, line = command_line.run("history", "--name", "PAST/N").stdout.splitlines()
    assert header.split() == ["KIND", "CONTAINER", "NAME", "STEP", "BEGUN", "ENDED", "METRICS", "WHY"]
    assert line.split()[:4] == ["parameters", "default", "past/net", "1"]
    assert line.split()[-3:] == ["loss", "0.25", "deleted"]
    (run,) = command_line.json("history", "--container", "default", "--name", "past/net")["runs"]
    assert (run["kind"], run["step"], run["metrics"]) == ("parameters", 1, {"loss": 0.25})
    assert run["begun"] <= run["ended"]
