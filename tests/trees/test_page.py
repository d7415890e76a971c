"""The program of docs/howto/trees.md runs as printed."""

from pathlib import Path

import gradserve
from gradserve_testing import LocalServer
from tests.project.blocks.reading import read_blocks


def test_the_program_runs(folder: Path, top: LocalServer) -> None:
    (program,) = [block.text for block in read_blocks("docs/howto/trees.md") if block.language == "python"]
    program = program.replace("localhost:50051", top.address)
    exec(compile(program, "docs/howto/trees.md", "exec"), {})  # noqa: S102
    with gradserve.connect(top.address) as client:
        assert [info.name for info in client.list_accumulators()] == ["net"]
