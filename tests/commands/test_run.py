"""`gradserve run`: workers that are started again, signals, output, the server that it starts, and other machines."""

import asyncio
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from gradserve_server.commands.cli import cli
from gradserve_server.commands.run.processes import Output
from gradserve_testing import LocalServer
from tests.project.blocks.reading import read_blocks
from tests.servers.connecting import no_server
from tests.servers.polling import PATIENCE_SECONDS, eventually

(PROGRAM,) = (block.text for block in read_blocks("docs/howto/run.md") if block.language == "python")
RUN = (sys.executable, "-m", "gradserve_server", "run")
NOWHERE = ("--server", "localhost:1")
VARIABLES = {**os.environ, "GRADSERVE_WARM_UP": "false", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class Running:
    """A `gradserve run` whose output, of both kinds, is read line by line."""

    def __init__(self, command: Sequence[str] | str, **variables: str) -> None:
        self.process = subprocess.Popen(
            command,
            env={**VARIABLES, **variables},
            shell=isinstance(command, str),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.seen = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Reads until a line matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"nothing like {pattern!r} in:\n{self.seen}")

    def ended(self) -> int:
        """Reads the rest, and returns the exit code as a shell does: an interpreter that ends handles no signals."""
        assert self.process.stdout is not None
        self.seen += self.process.stdout.read()
        code = self.process.wait(PATIENCE_SECONDS)
        return code if code >= 0 else 128 - code

    @property
    def below(self) -> list[psutil.Process]:
        """All processes that it has started, and those that they have."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def running(*arguments: object, line: str = "", **variables: str) -> Iterator[Running]:
    """Runs the command with arguments, or a line of a shell."""
    run = Running(line or (*RUN, *map(str, arguments)), **variables)
    try:
        yield run
    finally:
        run.process.kill()  # whatever it started ends with it
        run.process.communicate()


def completed(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *map(str, arguments)],
        env={**VARIABLES, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    """Waits for the end of processes; the system may keep the entries of orphans for a moment."""
    eventually(lambda: not any(each.is_running() and each.status() != "zombie" for each in processes))


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(f"import os, signal, subprocess, sys, time\nrank = os.environ['GRADSERVE_RANK']\n{text}")
    return path


def test_workers_know_their_place_and_no_line_is_lost(tmp_path: Path) -> None:
    shown = """
print(*(os.environ["GRADSERVE_" + each] for each in ("ADDRESS", "LOCAL_RANK", "NUM_WORKERS", "NUM_REQUIRED")))
print(os.environ["GRADSERVE_WORKER_ID"].rpartition("-")[2], sys.argv[1:], {"RANK", "WORLD_SIZE"} & {*os.environ})
sys.stderr.write("to stderr")
sys.stdout.write("no end of line")
"""
    options = ("-n", "2", "--first-rank", "5", "--num-required", "3")
    done = completed(*NOWHERE, *options, script(tmp_path, shown), "-n", "--server")
    assert done.returncode == 0
    of_rank = [f"localhost:1 {at} 7 3\n{5 + at} ['-n', '--server'] set()\nno end of line\n" for at in (0, 1)]
    for at, lines in enumerate(of_rank):
        own = [line for line in done.stdout.splitlines(True) if line.startswith(f"[{5 + at}] ")]
        assert "".join(line.partition(" ")[2] for line in own) == lines
    assert sorted(done.stderr.splitlines()) == ["[5] to stderr", "[6] to stderr"]


@pytest.mark.parametrize("form", [["-m", "train"], ["--no-python", "./train"]])
def test_modules_and_programs(tmp_path: Path, form: list[str]) -> None:
    script(tmp_path, "print(sys.argv[1:])")
    (tmp_path / "train").write_text("#!/bin/sh\necho \"['$1']\"\n")
    (tmp_path / "train").chmod(0o755)
    done = subprocess.run([*RUN, *NOWHERE, *form, "a"], env=VARIABLES, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == b"[0] ['a']\n"


def test_a_worker_that_is_killed_is_started_again_with_its_id(tmp_path: Path) -> None:
    dies_once = """
print("id", os.environ["GRADSERVE_WORKER_ID"])
if not os.path.exists(sys.argv[1] + rank):
    open(sys.argv[1] + rank, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = completed(*NOWHERE, "-n", "2", script(tmp_path, dies_once), tmp_path / "died")
    assert done.returncode == 0
    ids = done.stdout.splitlines()
    assert len(ids) == 4
    assert len(set(ids)) == 2
    assert "worker 1 was ended by SIGKILL; restart 1 of 3 in 0.5 s" in done.stderr


@pytest.mark.parametrize(
    ("options", "failing", "code", "num_starts"),
    [
        (("-n", "1", "--max-restarts", "1"), "0", 7, 2),
        (("-n", "3", "--backup", "1", "--max-restarts", "0"), "2", 0, 3),
        (("-n", "3", "--backup", "1", "--max-restarts", "0"), "12", 7, 3),
    ],
    ids=["restarts are bounded", "a backup worker is not missed", "too few are left"],
)
def test_workers_that_fail_again_and_again(
    tmp_path: Path, options: tuple[str, ...], failing: str, code: int, num_starts: int
) -> None:
    """With a server of its own, which serves at once: this one is a script."""
    started = tmp_path / "started"
    started.mkdir()
    fails = f"""
print("start", flush=True)
open({str(started)!r} + "/" + rank, "w").close()
while len(os.listdir({str(started)!r})) < {options[1]}:  # those that fail end the others
    time.sleep(0.01)
if rank in {failing!r}:
    sys.exit(7)
time.sleep(0 if {code == 0} else 1000)
"""
    path = script(tmp_path, fails)
    serves = "import time, sys; print('serving on 127.0.0.1:1', file=sys.stderr, flush=True); time.sleep(1000)"
    program = (
        "import sys\n"
        "from gradserve_server.commands.run import command, server\n"
        f"server.ServerPlan.command = lambda *_: (sys.executable, '-c', {serves!r})\n"
        "command.run(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *options, str(path)], env=VARIABLES, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stdout.count("start") == num_starts
    assert "is not started again" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_workers_and_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    waits = """
def on_signal(number, _frame):
    print("got", number)
    sys.exit(1)
signal.signal(signal.SIGINT, on_signal)
signal.signal(signal.SIGTERM, on_signal)
subprocess.Popen(["sleep", "1000"], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
print("ready")
time.sleep(1000)
"""
    with running(*NOWHERE, "-n", "2", script(tmp_path, waits)) as run:
        for _ in range(2):
            run.until("ready")
        below = run.below
        run.process.send_signal(number)
        assert run.ended() == 128 + number
        assert sorted(re.findall(r"\[.\] got \d+", run.seen)) == [f"[{rank}] got {int(number)}" for rank in (0, 1)]
        assert "restart" not in run.seen
        assert_gone(below)


def test_a_second_signal_kills(tmp_path: Path) -> None:
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\ntime.sleep(1000)"
    with running(*NOWHERE, script(tmp_path, ignores)) as run:
        run.until("ready")

        def ended_after_another() -> bool:
            run.process.terminate()
            return run.process.poll() is not None

        eventually(ended_after_another)
        assert run.ended() == 128 + signal.SIGTERM


def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    waits = "subprocess.Popen(['sleep', '1000'])\nprint('ready')\ntime.sleep(1000)"
    with running(*NOWHERE, script(tmp_path, waits), TMPDIR=str(tmp_path)) as run:
        run.until("ready")
        assert list(tmp_path.glob("gradserve-run-*"))
        below = run.below
        assert len(below) == 3  # the worker, its own process, and the guard
        run.process.kill()
        assert_gone(below)
        assert not list(tmp_path.glob("gradserve-run-*"))


def test_a_run_with_a_server_that_others_join_by_the_line_that_it_prints(tmp_path: Path) -> None:
    arguments = ("--listen", "127.0.0.1:0", "--num-required", "3", script(tmp_path, PROGRAM), "5")
    with running(*arguments, GRADSERVE_TOKEN="of another server") as run:
        assert run.until(r"status page: (\S+)")[1].startswith("https://127.0.0.1:")
        run.until("another machine joins")
        line = run.until("  GRADSERVE_TOKEN=.* gradserve run --server .*")[0].strip()
        line = line.replace("gradserve run", shlex.join(RUN), 1)
        with running(line=line) as second, running(line=line) as third:
            for each in (second, third, run):
                assert each.ended() == 0, each.seen
    ends = [re.search(r"\[(.)\] (step 5, y = .*)", each.seen) for each in (run, second, third)]
    assert sorted(end[1] if end else "" for end in ends) == ["0", "1", "2"]
    assert len({end[2] if end else "" for end in ends}) == 1
    assert "[server]" in run.seen
    assert "stopped" in run.seen.splitlines()[-1]


def test_ranks_are_taken_once_and_by_name(tmp_path: Path, local: LocalServer) -> None:
    path = str(script(tmp_path, "import os; print('rank', os.environ['GRADSERVE_RANK'])"))

    def ranks(name: str, number: int, first: int) -> list[int]:
        words = ["--server", local.address, "--join", name, "-n", str(number), "--first-rank", str(first), path]
        with running(*words) as run:
            assert run.ended() == 0, run.seen
        return sorted(int(each) for each in re.findall(r"rank (\d+)", run.seen))

    assert [ranks("one", 2, 3), ranks("one", 1, 3), ranks("two", 1, 0), ranks("one", 1, 99)] == [[3, 4], [5], [0], [6]]


def test_a_run_that_cannot_be_joined_says_why(tmp_path: Path) -> None:
    options = ("--join", "one", script(tmp_path, PROGRAM))
    with no_server() as address, running("--server", address, *options, GRADSERVE_RESTART_PATIENCE="0") as run:
        assert run.ended() == 1
    assert "cannot join run 'one' on " in run.seen


@contextmanager
def running_with_state(folder: Path) -> Iterator[Running]:
    """A run whose server has a state directory; its worker prints its steps until the file "stop" is there."""
    stop = folder / "stop"
    going_on = PROGRAM.replace(
        "time.sleep", f"print(f'at step {{version.step}}'); os.path.exists({str(stop)!r}) and sys.exit(); time.sleep"
    )
    patience = {"GRADSERVE_RESTART_PATIENCE": str(PATIENCE_SECONDS)}
    with running("--state-dir", folder / "state", script(folder, going_on), "1000000", **patience) as run:
        yield run


def next_step(run: Running) -> int:
    return int(run.until(r"\] at step (\d+)$")[1])


def server_of(run: Running) -> psutil.Process:
    (server,) = (each for each in run.below if "serve" in each.cmdline())
    return server


def test_a_server_with_a_state_directory_comes_back_and_workers_go_on(tmp_path: Path) -> None:
    with running_with_state(tmp_path) as run:
        address = run.until(r"serving on (\S+)")[1]
        before = next_step(run)
        server_of(run).kill()
        run.until("the server was ended by SIGKILL; it is started again")
        assert run.until(r"serving on (\S+)")[1] == address
        assert next_step(run) > before
        (tmp_path / "stop").touch()
        assert run.ended() == 0


def bound_to(port: int) -> socket.socket | None:
    with suppress(OSError):
        return socket.create_server(("127.0.0.1", port))
    return None


@pytest.mark.exhaustive
def test_a_server_comes_back_although_another_program_has_taken_the_port_of_its_status_page(tmp_path: Path) -> None:
    with running_with_state(tmp_path) as run:
        port = int(run.until(r"status page: http://127\.0\.0\.1:(\d+)/")[1])
        before, server = next_step(run), server_of(run)
        run.process.send_signal(signal.SIGSTOP)  # it starts none before the port is taken
        server.kill()
        other = eventually(lambda: bound_to(port))
        assert other is not None
        with other:
            run.process.send_signal(signal.SIGCONT)
            run.until(f"cannot listen for HTTP on 127.0.0.1:{port}")
            assert int(run.until(r"status page and metrics on http://127\.0\.0\.1:(\d+)/")[1]) != port
            assert next_step(run) > before
            (tmp_path / "stop").touch()
            assert run.ended() == 0


def test_without_a_state_directory_the_run_ends_with_its_server(tmp_path: Path) -> None:
    with running(script(tmp_path, "print('ready')\ntime.sleep(1000)")) as run:
        run.until("ready")
        server_of(run).kill()
        assert run.ended() == 128 + signal.SIGKILL
        assert "the server was ended by SIGKILL, and the run with it; with --state-dir, it would go on" in run.seen


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "mine").touch()
    done = completed("--state-dir", tmp_path / "state", script(tmp_path, "print('started')"))
    assert done.returncode == 1
    assert not done.stdout
    assert "[server] Error: " in done.stderr
    assert "the server ended with 1 before it served" in done.stderr


def test_the_run_imports_neither_the_client_nor_the_server(tmp_path: Path) -> None:
    program = """
import sys
from gradserve_server.__main__ import main
try:
    main()
except SystemExit:
    print(*(each for each in ("numpy", "pydantic", "gradserve", "grpc", "google.protobuf") if each in sys.modules))
"""
    arguments = ["run", *NOWHERE, str(script(tmp_path, ""))]
    done = subprocess.run([sys.executable, "-c", program, *arguments], env=VARIABLES, capture_output=True, check=True)
    assert done.stdout == b"\n"


def test_help_without_the_other_commands() -> None:
    assert completed("-h").stdout.startswith("Usage: gradserve run [OPTIONS] SCRIPT [ARGUMENTS]...\n")


def test_a_dry_run_starts_nothing_and_shows_no_token(tmp_path: Path) -> None:
    path = script(tmp_path, "print('started')")
    options = ["run", "--dry-run", "-n", "2", "--backup", "1", "--listen", "0.0.0.0:50070", str(path), "--lr", "a b"]
    done = CliRunner().invoke(cli, options, env={"GRADSERVE_TOKEN": "of another server"})
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert re.match(r"server: .* serve --listen 0.0.0.0:50070 .*--access .*--tls-certificate .*", lines[0])
    assert f"worker 1: {sys.executable} {path} --lr 'a b'" in lines
    assert {"  GRADSERVE_RANK=1", "  GRADSERVE_NUM_REQUIRED=1", "  GRADSERVE_TOKEN=..."} <= set(lines)
    assert re.match(
        r"to join: GRADSERVE_TOKEN=\.\.\. gradserve run --server \S+:50070 --tls-ca-data \.\.\. ", lines[-1]
    )
    assert "another server" not in done.output
    given = ["run", "--dry-run", "--tls-ca", str(path), str(path)]
    done = CliRunner().invoke(cli, [*given[:2], "--server", "h:1", *given[2:]])
    assert f"  GRADSERVE_TLS_CA={path}" in done.stdout.splitlines()
    assert "server:" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (["nowhere.py"], "expected a Python script as SCRIPT, found no file 'nowhere.py'"),
        (["--no-python", "no-such-program"], "found none for 'no-such-program'"),
        (["-n", "0", "SCRIPT"], "Invalid value for '-n'"),
        (["-n", "2", "--backup", "2", "SCRIPT"], "expected fewer --backup than the 2 --workers, got 2"),
        (
            ["--backup", "1", "-n", "2", "--num-required", "1", "SCRIPT"],
            "expected --backup or --num-required, got both",
        ),
        (["-m", "--no-python", "SCRIPT"], "expected --module or --no-python, got both"),
        (["--server", "h:1", "--state-dir", "d", "SCRIPT"], "expected --server or --state-dir, got both"),
        (["--server", "h:1", "--listen", "h:1", "SCRIPT"], "expected --server or --listen, got both"),
        (["--join", "run", "SCRIPT"], "expected --server with --join"),
        (["--server", "h:1", "--join", "", "SCRIPT"], "expected the name of a run for --join, got an empty one"),
        (["--server", "h:1:2", "SCRIPT"], "there is more than one colon"),
        (["--listen", "h:1:2", "SCRIPT"], "there is more than one colon"),
        (["--listen", "unix:a", "SCRIPT"], "expected HOST:PORT for --listen, got 'unix:a'"),
        (["--tls-ca", "ca.pem", "SCRIPT"], "expected --server with --tls..."),
        (["--server", "h:1", "--tls-ca-data", "abc", "SCRIPT"], "expected --tls-ca-data as another run has printed it"),
        (
            ["--server", "h:1", "--tls-ca-data", "YWJj", "SCRIPT"],
            "expected --tls-ca-data as another run has printed it",
        ),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    given = [__file__ if each == "SCRIPT" else each for each in arguments]
    done = CliRunner().invoke(cli, ["run", *given], env={"GRADSERVE_ADDRESS": None})
    assert done.exit_code == 2
    assert message in done.output


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "prefix"),
    [
        (io.BytesIO(), {}, b"[1] "),
        (Terminal(), {}, b"\x1b[33m[1]\x1b[0m "),
        (Terminal(), {"NO_COLOR": "1"}, b"[1] "),
        (Terminal(), {"TERM": "dumb"}, b"[1] "),
    ],
)
def test_colours_are_for_terminals(stream: io.BytesIO, environment: dict[str, str], prefix: bytes) -> None:
    assert Output(environment).prefix("1", stream) == prefix


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [
        ([b"one\ntw", b"o\n\nthree"], b"[1] one\n[1] two\n[1] \n[1] three\n"),
        ([b"10%\r20%\r", b"done\r\n"], b"[1] done\n"),
        ([b"x" * (2 << 20)], None),
    ],
    ids=["pieces of lines", "a progress bar", "an endless line"],
)
async def test_lines_are_whole(chunks: list[bytes], shown: bytes | None) -> None:
    source, stream = asyncio.StreamReader(), io.BytesIO()
    for chunk in chunks:
        source.feed_data(chunk)
    source.feed_eof()
    await Output({}).copy(source, "1", stream)
    if shown is None:
        assert [len(line) for line in stream.getvalue().splitlines()] == [4 + (1 << 20) + (1 << 16), 4 + (15 << 16)]
    else:
        assert stream.getvalue() == shown
