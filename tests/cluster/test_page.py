"""The program of docs/many_servers.md runs as printed, and its accumulator is on two servers."""

import gradserve
from tests.cluster.servers import addresses_of, running_cluster
from tests.project.blocks.reading import read_blocks


def test_the_program_runs() -> None:
    (program,) = [block.text for block in read_blocks("docs/many_servers.md") if block.language == "python"]
    with running_cluster(2) as servers:
        addresses = addresses_of(servers)
        for place, address in zip(("h1:50051", "h2:50051"), addresses, strict=True):
            program = program.replace(place, address)
        exec(compile(program, "docs/many_servers.md", "exec"), {})  # noqa: S102
        found = []
        for address in addresses:
            with gradserve.connect(address) as client:
                found.append([info.name for info in client.list_accumulators()])
    assert found == [["model"], ["model"]]
