"""`gradserve run`: the workers of a training run on this machine, with a server of their own or for one that runs."""

import asyncio
import os
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gradserve_protocol.address import Address, addresses_to_connect
from gradserve_protocol.errors import GradserveError, InvalidArgumentError
from gradserve_protocol.printing import visible
from gradserve_protocol.variables import (
    ADDRESS_VARIABLE,
    LOCAL_RANK_VARIABLE,
    NUM_REQUIRED_VARIABLE,
    NUM_WORKERS_VARIABLE,
    RANK_VARIABLE,
    TLS_FILE_VARIABLES,
    TLS_VARIABLE,
    TOKEN_VARIABLE,
    WORKER_ID_VARIABLE,
)
from gradserve_server.commands.run.processes import Fleet, Guard, Output, Program, Stopping
from gradserve_server.commands.run.server import OwnServer, ServerError, ServerPlan, reachable_host, write_ca
from gradserve_server.commands.tls_options import tls_options
from gradserve_server.runtime.process import num_cores

_MOST_WORKERS = 1024
_HIDDEN = "..."
_JOIN_SECONDS = 30.0


@dataclass(frozen=True)
class RunPlan:
    """The workers to start.

    Attributes:
        script: The script, module or program as it was given, with its arguments.
        is_module: True for a module.
        is_program: True for a program other than a Python script.
        num_workers: Their number on this machine.
        num_required: The number of workers that a round needs.
        first_rank: The rank of the first of them.
        max_restarts: The most restarts of each.
    """

    script: tuple[str, ...]
    is_module: bool
    is_program: bool
    num_workers: int
    num_required: int
    first_rank: int
    max_restarts: int

    @property
    def command(self) -> tuple[str, ...]:
        """The command of a worker."""
        if self.is_program:
            return self.script
        return (sys.executable, *(("-m",) if self.is_module else ()), *self.script)

    def programs(self, server: Mapping[str, str]) -> list[Program]:
        """Returns the programs of the workers.

        Args:
            server: The variables that say where the server is.
        """
        fleet = f"{socket.gethostname()}-{secrets.token_hex(3)}"
        found = []
        for index in range(self.num_workers):
            rank = self.first_rank + index
            own = {
                WORKER_ID_VARIABLE: f"{fleet}-{rank}",
                RANK_VARIABLE: str(rank),
                LOCAL_RANK_VARIABLE: str(index),
                NUM_WORKERS_VARIABLE: str(self.first_rank + self.num_workers),
                NUM_REQUIRED_VARIABLE: str(self.num_required),
            }
            found.append(Program(str(rank), self.command, {**server, **own, **self._usual()}))
        return found

    def joining(self, address: str, token: str, ca_data: str) -> str:
        """Returns the line that starts a worker on another machine.

        Args:
            address: The server's address for other machines.
            token: The token; empty for none.
            ca_data: The authority of the server's certificate; empty for none.
        """
        words = ["gradserve", "run", "--server", address]
        if ca_data:
            words += ["--tls-ca-data", ca_data]
        name = Path(self.script[0]).stem or "run"
        words += ["--join", name, "--first-rank", str(self.first_rank + self.num_workers)]
        words += ["--num-required", str(self.num_required)]
        if self.is_module or self.is_program:
            words.append("-m" if self.is_module else "--no-python")
        # In the environment, so that other users of that machine do not see it in the list of processes.
        return (f"{TOKEN_VARIABLE}={shlex.quote(token)} " if token else "") + shlex.join([*words, *self.script])

    def _usual(self) -> dict[str, str]:
        """Returns the variables that suit several workers on one machine, unless they are set."""
        threads = max(1, num_cores() // self.num_workers)
        usual = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
        return {name: value for name, value in usual.items() if not os.environ.get(name)}


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option(
    "-n",
    "--workers",
    "num_workers",
    type=click.IntRange(1, _MOST_WORKERS),
    default=1,
    show_default=True,
    help="number of workers on this machine",
)
@click.option("--backup", type=click.IntRange(0), default=0, help="number of workers for which rounds do not wait")
@click.option(
    "--num-required",
    type=click.IntRange(1),
    help="number of workers that a round needs, those on other machines included  [default: workers less backup]",
)
@click.option(
    "--server",
    "--address",
    "address",
    metavar="ADDRESS",
    help=f"join the run on this server  [default: ${ADDRESS_VARIABLE}, otherwise a server is started]",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="start a server that other machines reach, at 0.0.0.0:50051 for example, with a certificate and a token",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="start a server with this state directory, which is started again if it ends",
)
@click.option(
    "--join",
    metavar="NAME",
    help="take the next free ranks of the run of this name on the server, so that any number of machines can join it",
)
@click.option(
    "--first-rank",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="rank of the first worker; with --join, of the first one that joins the run",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="number of times that a worker that fails is started again",
)
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a Python module, as for python -m")
@click.option("--no-python", "is_program", is_flag=True, help="SCRIPT is a program, not a Python script")
@click.option("--tls-ca-data", metavar="DATA", help="use TLS, with the authority of the line that another run printed")
@tls_options
@click.option("--dry-run", is_flag=True, help="print what would be started, and start nothing")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    context: click.Context,
    /,
    script: str,
    arguments: tuple[str, ...],
    num_workers: int,
    backup: int,
    num_required: int | None,
    address: str | None,
    listen: str | None,
    state_dir: Path | None,
    join: str | None,
    first_rank: int,
    max_restarts: int,
    is_module: bool,
    is_program: bool,
    tls_ca_data: str | None,
    dry_run: bool,
    **tls: Any,
) -> None:
    """Run SCRIPT in several workers, with a server if there is none, and start them again when they fail.

    All options stand before SCRIPT. A worker finds the server by gradserve.connect(), its part of the data by
    GRADSERVE_RANK and GRADSERVE_NUM_WORKERS, and the number of workers for a round in GRADSERVE_NUM_REQUIRED.

    Prints the line that lets another machine join. Ends with 0 when all workers have; a server that was started ends
    with them. Ends with the exit code of a worker that has failed too often, unless enough for a round are left.
    """
    if backup and num_required is not None:
        raise click.UsageError("expected --backup or --num-required, got both", context)
    if backup >= num_workers:
        raise click.UsageError(f"expected fewer --backup than the {num_workers} --workers, got {backup}", context)
    if is_module and is_program:
        raise click.UsageError("expected --module or --no-python, got both", context)
    _check_script(context, script, is_module=is_module, is_program=is_program)
    required = num_required or num_workers - backup
    plan = RunPlan((script, *arguments), is_module, is_program, num_workers, required, first_rank, max_restarts)
    starts_server = listen is not None or state_dir is not None
    if address and starts_server:
        flag = "--listen" if listen is not None else "--state-dir"
        raise click.UsageError(f"expected --server or {flag}, got both: {flag} starts a server", context)
    if not starts_server:
        address = address or os.environ.get(ADDRESS_VARIABLE)
    given = [name for name in tls if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if not address and join is not None:
        raise click.UsageError("expected --server with --join: the server has the free ranks of the run", context)
    if join == "":
        raise click.UsageError("expected the name of a run for --join, got an empty one", context)
    if not address and (given or tls_ca_data):
        raise click.UsageError(
            "expected --server with --tls..., got no server: a run makes its own credentials", context
        )
    with tempfile.TemporaryDirectory(prefix="gradserve-run-") as folder:
        if address:
            variables = _given_server(context, address, tls_ca_data, Path(folder), tls)
            own = None
        else:
            kept = (
                Path(folder) if state_dir is None else state_dir.absolute().with_name(f"{state_dir.name}.credentials")
            )
            own, variables = ServerPlan(_listening(context, listen), state_dir, kept), {}
        if join is not None and not dry_run:
            plan = replace(plan, first_rank=_take_ranks(join, plan, variables))
        if dry_run:
            _show(plan, own, variables)
        else:
            context.exit(asyncio.run(_run(plan, own, variables, Path(folder))))


async def _run(plan: RunPlan, server_plan: ServerPlan | None, variables: Mapping[str, str], folder: Path) -> int:
    stopping, output = Stopping(), Output(os.environ)
    with Guard(folder) as guard:
        server = None
        try:
            if server_plan is not None:
                server = OwnServer(server_plan, guard, output, stopping)
                if not await server.start(_tell):
                    return stopping.code
                variables = server.variables
                _tell_start(plan, server)
            needed = plan.num_required if server is not None and plan.num_required <= plan.num_workers else 1
            programs = plan.programs(variables)
            return await Fleet(programs, needed, plan.max_restarts, guard, output, stopping, _tell).run()
        except ServerError as error:
            raise click.ClickException(str(error)) from None
        except OSError as error:
            raise click.ClickException(f"cannot start {plan.command[0]}: {error.strerror}") from None
        finally:
            if server is not None:
                await server.stop()


def _tell(line: str) -> None:
    with suppress(BrokenPipeError):
        click.echo(f"[run] {visible(line)}", err=True)


def _tell_start(plan: RunPlan, server: OwnServer) -> None:
    if server.status_page:
        _tell(f"status page: {server.status_page}")
    if server.credentials is None:
        _tell(f"on this machine, another worker joins with: {plan.joining(server.address, '', '')}")
        _tell("with --listen 0.0.0.0:50051, other machines can join, too")
        return
    line = plan.joining(server.address, server.credentials.token, server.credentials.ca_data)
    _tell("another machine joins with this line; it has the token, so show it only to those who may:")
    click.echo(f"  {visible(line)}", err=True)


def _check_script(context: click.Context, script: str, *, is_module: bool, is_program: bool) -> None:
    if is_program:
        if shutil.which(script) is None:
            raise click.UsageError(f"expected a program as SCRIPT, found none for {script!r}", context)
    elif not is_module and not Path(script).exists():
        raise click.UsageError(f"expected a Python script as SCRIPT, found no file {script!r}", context)


def _listening(context: click.Context, listen: str | None) -> Address | None:
    if listen is None:
        return None
    try:
        address = Address.to_listen(listen)
    except InvalidArgumentError as error:
        raise click.UsageError(f"--listen: {error.message}", context) from None
    if address.path:
        raise click.UsageError(f"expected HOST:PORT for --listen, got {listen!r}", context)
    return address


def _given_server(
    context: click.Context, address: str, tls_ca_data: str | None, folder: Path, tls: Mapping[str, Any]
) -> dict[str, str]:
    """Returns the environment of workers for a server that runs."""
    if "://" not in address:  # Lookups are left to the client, which each worker imports anyway.
        try:
            addresses_to_connect(address)
        except InvalidArgumentError as error:
            raise click.UsageError(f"--server: {error.message}", context) from None
    variables = {**os.environ, ADDRESS_VARIABLE: address}
    files = {**tls}
    if files.pop("uses_tls"):
        variables[TLS_VARIABLE] = "1"
    if tls_ca_data:
        try:
            files["tls_ca"] = write_ca(tls_ca_data, folder)
        except ValueError as error:
            raise click.UsageError(f"expected --tls-ca-data as another run has printed it: {error}", context) from None
    for name, variable in TLS_FILE_VARIABLES.items():
        path = files["tls_ca" if name == "ca" else f"tls_client_{name}"]
        if path:
            variables[variable] = os.path.abspath(path)
    return variables


def _take_ranks(name: str, plan: RunPlan, variables: Mapping[str, str]) -> int:
    """Takes as many ranks of a run as there are workers; returns the first one. No others ever get them.

    The server holds the next free rank as parameters, of which each version has one successor: the first update of a
    version counts, and the others are stale and read again.

    Raises:
        click.ClickException: The server does not answer, or refuses.
    """
    import numpy as np

    import gradserve
    from gradserve.transport.settings import wanted_server

    address = variables[ADDRESS_VARIABLE]
    try:
        _, tls = wanted_server(None, None, variables)
        with gradserve.connect(address, tls=tls, token=variables.get(TOKEN_VARIABLE), timeout=_JOIN_SECONDS) as client:
            ranks = client.parameters(
                {"next": np.array(float(plan.first_rank))}, shared_name=f"ranks of run {name}", update="delta"
            )
            while True:
                version = ranks.read()
                result = ranks.push({"next": np.array(float(plan.num_workers))}, version)
                if result.outcome is gradserve.Outcome.ACCEPTED:
                    return int(version["next"])
    except GradserveError as error:
        raise click.ClickException(f"cannot join run {name!r} on {address}: {error}") from None


def _show(plan: RunPlan, own: ServerPlan | None, variables: Mapping[str, str]) -> None:
    joining = ""
    if own is not None:
        listen = own.listen or Address("127.0.0.1")
        port = str(listen.port or "PORT")
        address = str(Address(reachable_host(listen.host), listen.port)).removesuffix(str(listen.port)) + port
        secret = "" if own.listen is None else _HIDDEN
        click.echo(f"server: {visible(shlex.join(own.command()))}")
        if secret:
            click.echo(f"  certificate for {', '.join(own.hosts)}, and a token, in {visible(str(own.folder))}")
        variables = own.clients(address, secret)
        joining = plan.joining(address, secret, secret)
    for program in plan.programs(variables):
        click.echo(f"worker {program.label}: {visible(shlex.join(program.command))}")
        for name, value in sorted(program.variables.items()):
            if os.environ.get(name) != value or name.startswith("GRADSERVE_"):
                click.echo(f"  {name}={_HIDDEN if name == TOKEN_VARIABLE else visible(shlex.quote(value))}")
    if joining:
        click.echo(f"to join: {visible(joining)}")
