"""`gradserve serve`: runs a server."""

import asyncio
import fcntl
import logging
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click

from gradserve_protocol.extras import MissingExtraError, require
from gradserve_server.config.settings import SettingsError, config_options, make_config, read_settings
from gradserve_server.observe.logs import configure
from gradserve_server.runtime.process import (
    StopSignals,
    allow_many_descriptors,
    end_process,
    importing,
    silence_grpc,
    switch_threads_often,
)

_log = logging.getLogger(__name__)

_USERS_LOOK_SECONDS = 1.0


@click.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="GRADSERVE_CONFIG",
    help="TOML file with settings of the same names as the flags, e.g. max_bytes",
)
@config_options
@click.pass_obj
def serve(signals: StopSignals | None, /, config_path: Path | None, **flags: Any) -> None:
    """Run the server until SIGTERM or SIGINT.

    Each flag is also an environment variable, e.g. GRADSERVE_MAX_BYTES, and an entry of the TOML file, e.g.
    max_bytes = "4GiB".
    """
    settings = read_settings(flags, config_path)
    if "log_level" not in settings or str(settings["log_level"].value).lower() != "debug":
        silence_grpc()
    config = make_config(settings)
    configure(config.runtime.log_level, config.runtime.log_format)
    signals = signals or StopSignals()

    with importing():
        from gradserve_protocol.lasting import lasting_task
        from gradserve_protocol.tls import CertificateError
        from gradserve_server.accumulators.round_hold import follow_signals
        from gradserve_server.app import Server
        from gradserve_server.devices.host.products import use_one_blas_thread
        from gradserve_server.devices.inventory import NoSuchDeviceError
        from gradserve_server.errors import ServiceError
        from gradserve_server.runtime.event_loop import GcTuner, new_event_loop
        from gradserve_server.runtime.process import keep_freed_memory
        from gradserve_server.security.access_file import AccessFileError
        from gradserve_server.security.tls import setting_of
        from gradserve_server.storage.directory import DamagedError, StateError

    allow_many_descriptors()
    switch_threads_often()
    keep_freed_memory()
    use_one_blas_thread()

    held: list[_Users] = []  # whose lock is to end with the process, after everything else
    traces: AbstractContextManager[object] = nullcontext()
    if config.runtime.tracing:
        traces = _exported_traces()

    async def stop_without(users: _Users, stop: asyncio.Event) -> None:
        await users.all_gone(config.upstream.upstream_idle_seconds)
        held.append(users)
        stop.set()

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        failures: list[str] = []

        def fail(reason: str) -> None:
            failures.append(reason)
            stop.set()

        server = Server(config, on_failure=fail)
        signals.drain_with(lambda: loop.call_soon_threadsafe(stop.set), config.runtime.drain_seconds)
        if server.round_hold is not None:
            follow_signals(server.round_hold)
        async with server:
            with GcTuner(
                num_waiting=lambda: server.registry.factory.waiters.used,
                is_prepared=lambda: server.runner.is_prepared,
            ) as pauses:
                beside = [lasting_task("the garbage collector's look at everything", pauses.look_at_all, _log)]
                if config.upstream.upstream_users_file is not None:
                    users = _Users(Path(config.upstream.upstream_users_file))
                    ending = partial(stop_without, users, stop)
                    beside.append(lasting_task("noticing that nobody uses this aggregator", ending, _log))
                await stop.wait()
                for each in beside:
                    each.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
        if failures:
            raise click.ClickException(failures[0])

    try:
        with traces, asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run())
    except CertificateError as error:
        name = setting_of(error)
        source = settings[name].source if name in settings else f"--{name.replace('_', '-')}"
        raise SettingsError(f"{source}: {error}") from None
    except NoSuchDeviceError as error:
        raise click.ClickException(f"{settings[error.setting].source}: {error}") from None
    except AccessFileError as error:
        raise SettingsError(f"{settings['access'].source}: {error}") from None
    except DamagedError as error:
        raise click.ClickException(
            f"{error}; `gradserve state check` lists all that is damaged, `gradserve state repair` removes it"
        ) from None
    except StateError as error:
        raise click.ClickException(f"{settings['state_dir'].source}: {error}") from None
    except (OSError, ServiceError) as error:
        raise click.ClickException(str(error)) from None
    end_process()


def _exported_traces() -> AbstractContextManager[object]:
    try:
        require("tracing")
        import gradserve
        from gradserve_server.observe.tracing import ExportedTraces, ExporterError
    except MissingExtraError as error:
        raise click.ClickException(str(error)) from None
    try:
        return ExportedTraces(gradserve.__version__)
    except ExporterError as error:
        raise SettingsError(str(error)) from None


class _Users:
    """The processes that use an aggregator. Each holds a shared lock on a file; the system releases it at their end."""

    def __init__(self, path: Path) -> None:
        """Opens the file; creates it if it does not exist.

        Raises:
            OSError: It cannot be opened.
        """
        self._file = path.open("ab")

    async def all_gone(self, idle_seconds: float) -> None:
        """Returns once nobody has held the lock for so long, holding it exclusively until this process ends.

        A process that asks for the lock after that waits for the end, and can then start another server.
        """
        loop = asyncio.get_running_loop()
        look_seconds = min(_USERS_LOOK_SECONDS, idle_seconds / 4)
        since = loop.time()
        while True:
            await asyncio.sleep(look_seconds)
            if not self._lock():
                since = loop.time()
            elif loop.time() - since >= idle_seconds:
                return
            else:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
