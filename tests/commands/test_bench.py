"""`gradserve bench`."""

import gradserve
from tests.commands.conftest import CommandLine

_QUICKLY = ("bench", "--seconds", "0.01", "--size", "64KiB")


def test_every_way_is_measured_and_nothing_is_left(command_line: CommandLine, client: gradserve.Client) -> None:
    before = client.server_info().usage
    found = command_line.json(*_QUICKLY)
    assert [each["way"] for each in found["ways"]] == ["shared_memory", "bulk", "grpc"]
    for each in found["ways"]:
        assert not each["why_not"]
        assert 0 < each["small_median_seconds"] <= each["small_p99_seconds"]
        assert min(each["round_bytes_per_second"], each["put_bytes_per_second"], each["get_bytes_per_second"]) > 0
    assert min(found["host"].values()) > 0
    after = client.server_info().usage
    assert (after["num_accumulators"], after["num_handles"]) == (before["num_accumulators"], before["num_handles"])


def test_one_way_is_measured_where_one_is_asked_for(command_line: CommandLine) -> None:
    done = command_line.run(*_QUICKLY, "--way", "grpc")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["WAY", "grpc", "this"]
    assert done.stderr == "", "that is no terminal"
