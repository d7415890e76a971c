"""The Python in the documentation runs as printed, each program against a server of its own."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import gradserve
from deploy.site.places import ROOT
from gradserve.testing import ServerThread
from tests.project.blocks.reading import Block, all_blocks
from tests.servers.polling import PATIENCE_SECONDS

NOT_RUN = {
    "needs a GPU": r"\bcupy\b|cuda:0",
    "needs FSDP in several processes": r"\bFSDPModule\b",
}
"""The reasons for which a block may go untested, and what is then in it."""

_ADDRESS = re.compile(r"\b[\w.-]+:50051\b")


def programs() -> Iterator[list[Block]]:
    """Yields the blocks of each program: a block, and those that continue it."""
    program: list[Block] = []
    for block in all_blocks("python"):
        if {"not run", "run by"} & block.said.keys():
            continue
        if program and "continued" in block.said and program[-1].page == block.page:
            program.append(block)
            continue
        if program:
            yield program
        program = [block]
    if program:
        yield program


PROGRAMS = list(programs())


def run(program: list[Block], address: str, **names: Any) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    for block in program:
        where = str(ROOT / block.page)
        setup = _ADDRESS.sub(address, block.said.get("setup", ""))
        exec(compile(setup, f"setup of {block}", "exec"), namespace)  # noqa: S102
        text = _ADDRESS.sub(namespace.get("server_address", address), block.text)
        exec(compile("\n" * (block.line - 1) + text, where, "exec"), namespace)  # noqa: S102
        exec(compile(block.said.get("check", ""), f"check of {block}", "exec"), namespace)  # noqa: S102
    for thread in threading.enumerate():  # as the end of a process does
        if getattr(getattr(thread, "_target", None), "__globals__", None) is namespace:
            thread.join(PATIENCE_SECONDS)
    for value in namespace.values():
        if isinstance(value, gradserve.Client):
            value.close()


@pytest.mark.timeout(4 * PATIENCE_SECONDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=[str(program[0]) for program in PROGRAMS])
def test_program_runs(
    program: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = "\n".join(block.said.get("setup", "") + "\n" + block.text for block in program)
    frameworks = [name for name in ("torch", "jax") if re.search(rf"\b{name}\b", everything)]
    for framework in frameworks:
        pytest.importorskip(framework, reason="not installed: make install-frameworks")
    monkeypatch.chdir(tmp_path)
    num_workers = int(program[0].said.get("workers", "1"))
    with ServerThread() as server, ThreadPoolExecutor(num_workers) as threads:
        monkeypatch.setenv("GRADSERVE_ADDRESS", server.address)
        for _attempt in ["first"] if frameworks else ["first", "again"]:
            workers = [threads.submit(run, program, server.address, worker=worker) for worker in range(num_workers)]
            for worker in workers:
                worker.result()
            printed = capsys.readouterr().out
            for block in program:
                if expected := block.said.get("prints"):
                    assert re.search(expected, printed, re.DOTALL), printed


@pytest.mark.parametrize("block", [block for block in all_blocks("python") if "not run" in block.said], ids=str)
def test_what_is_not_run_has_a_reason(block: Block) -> None:
    assert block.said["not run"] in NOT_RUN, f"expected one of {', '.join(NOT_RUN)}"
    assert re.search(NOT_RUN[block.said["not run"]], block.text)
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [block for block in all_blocks("python") if "run by" in block.said], ids=str)
def test_what_others_run_is_run_there(block: Block) -> None:
    test = (ROOT / block.said["run by"]).read_text()
    assert re.search(rf"\b{re.escape(block.page.rpartition('/')[2])}\b", test), (
        f"{block.said['run by']} does not read it"
    )
