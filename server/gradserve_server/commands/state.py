"""`gradserve state`: looks at the state directory of a server that does not run, or backs up that of any server."""

import asyncio
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from gradserve_server.commands.wording import bytes_of, duration, reading, size, tell, tell_problem
from gradserve_server.resources.registry import DEFAULT_CONTAINER

if TYPE_CHECKING:  # imported late: other commands need none of it, and start sooner
    from gradserve_protocol.arrays import Array
    from gradserve_server.accumulators.durable.restoring import Found
    from gradserve_server.layers.batch_norm.restoring import FoundLayer
    from gradserve_server.storage.store import Change, StateStore

_directory = click.argument("directory", type=click.Path(path_type=Path, file_okay=False))


@click.group()
def state() -> None:
    """Back up the state directory of a server; check, repair, export or restore it while no server runs."""


@state.command()
@_directory
def check(directory: Path) -> None:
    """Read and verify all of DIRECTORY. Exit with 1 if something is damaged."""
    from gradserve_server.storage.journal import RESIZED, num_incoming

    with _opened(directory, may_be_backup=True) as store:
        found = _found_in(store)
        incoming = num_incoming(store)
        wrong = store.faults
        for fault in wrong:
            tell_problem(fault)
        for each in found:
            tell(each.line)
            for fault in each.faults:
                tell_problem(f"  {fault}")
    of_kinds = [[each for each in found if each.kind == kind] for kind in _KINDS]
    damaged = [sum(bool(each.faults) for each in of_kind) for of_kind in of_kinds]
    if wrong or any(damaged):
        counts = [f"{count} of {len(all_)} {kind}" for count, all_, kind in zip(damaged, of_kinds, _KINDS, strict=True)]
        raise click.ClickException(
            f"{directory}: {', '.join(counts[:-1])} and {counts[-1]} are damaged"
            + (", and the files do not belong together" if wrong else "")
        )
    if incoming:
        raise click.ClickException(f"{directory}: {incoming} {RESIZED}")
    counts = [f"{len(of_kind)} {kind}" for kind, of_kind in zip(_KINDS, of_kinds, strict=True)]
    tell(f"{directory}: {', '.join(counts)}, nothing is damaged")


@state.command()
@_directory
@click.option("--yes", is_flag=True, help="Remove what is damaged; otherwise only say what would be removed.")
def repair(directory: Path, yes: bool) -> None:
    """Remove from DIRECTORY what is damaged, so that a server can use the rest.

    A damaged average is removed alone, and so is a damaged version of parameters that is not the newest. An accumulator
    or parameters of which anything else is damaged are removed with all they have, and so is a layer. If the database
    is older than the other files, or they belong to another directory, what it has is kept, and what it lacks is lost;
    without a database, everything is.
    """
    try:
        is_damaged = _remove_damaged(directory, yes)
    except _LostError as error:
        tell(f"{'remove' if yes else 'would remove'} everything: {error.message}")
        if yes:
            _begin_anew(directory)
        is_damaged = True
    if not is_damaged:
        tell(f"{directory}: nothing is damaged")
    elif not yes:
        raise click.ClickException("nothing was changed; --yes removes what is damaged")


def _remove_damaged(directory: Path, yes: bool) -> bool:
    """Removes what is damaged, or only says what; returns True if something is."""
    with _opened(directory) as store:
        found = _found_in(store)
        wrong = store.faults
        for fault in wrong:
            tell(f"{'go on' if yes else 'would go on'} with what is there: {fault}")
        removals = [(f"{each.damaged}: {'; '.join(each.faults)}", each.removal) for each in found if each.removal]
        for what, _ in removals:
            tell(f"{'remove' if yes else 'would remove'} {what}")

        async def carry_out() -> None:
            store.start(tell_problem)
            for _, change in removals:
                await store.commit(change)

        if yes:
            store.go_on()
            asyncio.run(carry_out())
    return bool(wrong or removals)


def _begin_anew(directory: Path) -> None:
    from gradserve_server.storage.directory import StateDirectory
    from gradserve_server.storage.store import StateStore

    lost = StateDirectory(directory, make=False)
    lost.begin_anew()
    StateStore(lost).close()


@state.command()
@_directory
@click.argument("name")
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--container", default=DEFAULT_CONTAINER, show_default=True, help="container of NAME")
@click.option("--kind", type=click.Choice(["accumulator", "parameters"]), help="what NAME is, if there are both")
@click.option("--step", type=click.IntRange(min=0), help="step of a version of parameters  [default: the newest]")
def export(directory: Path, name: str, output: Path, container: str, kind: str | None, step: int | None) -> None:
    """Write the newest average of an accumulator, or a version of parameters, to OUTPUT.

    Of accumulator NAME, OUTPUT is a .npz file of NumPy's. It has an array for each component, NAME.indices and
    NAME.values for a sparse one, and the step and the number of gradients as `.step` and `.num_gradients`. The only
    component of a plain accumulator is called `average`. Values of bfloat16 become float32.

    Of parameters NAME, OUTPUT is the file in safetensors' format that `gradserve parameters save` writes. The newest
    version has the state of the optimizer, too. gradserve.load_parameters reads it.
    """
    from gradserve_server.storage.directory import DAMAGES, StateError

    with _opened(directory, may_be_backup=True) as store:
        numbers = {
            each: rows[0][0]
            for each in ("accumulator", "parameters")
            if kind in (None, each)
            and (rows := store.rows(f"SELECT id FROM {each} WHERE container = ? AND name = ?", container, name))
        }
        title = f"'{container}/{name}'"
        if not numbers:
            what = "no accumulator and no parameters" if kind is None else f"no {kind}"
            raise click.ClickException(f"{directory}: there is {what} {title}")
        if len(numbers) > 1:
            raise click.ClickException(f"{directory}: an accumulator and parameters are called {title}: add --kind")
        ((found, number),) = numbers.items()
        try:
            if found == "accumulator":
                _export_average(store, number, output)
            else:
                _export_version(store, number, output, step)
        except (StateError, *DAMAGES) as error:
            raise click.ClickException(f"{directory}: {found} {title}: {error}") from None
        except OSError as error:
            raise click.ClickException(str(error)) from None


def _export_average(store: "StateStore", number: int, output: Path) -> None:
    import numpy as np

    from gradserve_server.accumulators.durable.restoring import average_bytes, read_average
    from gradserve_server.accumulators.gradient import SparseSlices

    with reading(store, average_bytes(store, number)):
        average = read_average(store, number)
    arrays: dict[str, Any] = {
        ".step": np.array(average.step),
        ".num_gradients": np.array(average.num_gradients),
    }
    for component, value in average.values.items():
        label = component or "average"
        if isinstance(value, SparseSlices):
            arrays |= {f"{label}.indices": value.indices, f"{label}.values": value.values}
        else:
            arrays[label] = value
    for label, array in arrays.items():
        if array.dtype.name == "bfloat16":  # which NumPy cannot read again
            arrays[label] = array.astype(np.float32)
    num_bytes = sum(array.nbytes for array in arrays.values())
    with bytes_of("writing", num_bytes) as add, _ToldFile(output, add) as file:
        np.savez(file, **arrays)
    tell(f"{output}: {json.dumps(sorted(average.values))[1:-1] or 'nothing'}, step {average.step}")


def _export_version(store: "StateStore", number: int, output: Path, step: int | None) -> None:
    from gradserve.saved.parameters import SavedParameters, SavedState, save
    from gradserve_server.errors import OutOfRangeError
    from gradserve_server.parameters.restoring import read_version
    from gradserve_server.rpc.parameters.rules import encode_optimizer, encode_schedule

    try:
        with reading(store):
            spec, version, state = read_version(store, number, step)
    except OutOfRangeError as error:
        raise click.ClickException(str(error)) from None
    if spec.num_shards:
        raise click.ClickException(
            f"they are sharded over {spec.num_shards} servers, and this is the directory of one: start them all, and "
            "save them with gradserve parameters save"
        )
    saved_state = None
    if state is not None:
        slots = {
            (slot, component): values[component]
            for component in state.component_steps
            for slot, values in state.slots.items()
            if component in values
        }
        saved_state = SavedState(slots, state.component_steps, state.rounds, encode_optimizer(state.optimizer))
    schedule, update = encode_schedule(spec.rules.schedule), spec.update.value.lower()
    values = cast("Mapping[str, Array]", version.values)
    save(output, SavedParameters(values, version.step, version.digest.hex(), saved_state, schedule, update))
    tell(f"{output}: step {version.step}, {size(output.stat().st_size)}")


@state.command()
@click.argument("backup", type=click.Path(path_type=Path))
@click.option(
    "--state-dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="state directory of the server, which may run meanwhile",
)
def backup(backup: Path, directory: Path) -> None:
    """Copy a state directory to BACKUP, a new or an empty folder, as it is at one moment.

    The server goes on without a pause. BACKUP gets its name only when all of it is on disk, and every value in it was
    verified. Run it as the user of the server, on its machine.
    """
    from gradserve_server.storage.backup import back_up, num_bytes_of

    with _copying(), bytes_of("copying", num_bytes_of(directory)) as add:
        taken = back_up(directory, backup, add)
    tell(f"{backup}: commit {taken.commit}, {size(taken.num_bytes)}, in {duration(taken.seconds)}")


@state.command()
@click.argument("backup", type=click.Path(path_type=Path, file_okay=False))
@click.argument("directory", type=click.Path(path_type=Path))
def restore(backup: Path, directory: Path) -> None:
    """Make DIRECTORY, which is new or empty, a state directory with what is in BACKUP.

    Clients of the server that was backed up do not take what is restored for what they had: they get errors until they
    open it again.
    """
    from gradserve_server.parts import renew_incarnations
    from gradserve_server.resources.registry import RandomIds, ServerRun
    from gradserve_server.storage.backup import num_bytes_of
    from gradserve_server.storage.backup import restore as restore_backup

    new_id = ServerRun(RandomIds()).new_id
    with _copying(), bytes_of("copying", num_bytes_of(backup)) as add:
        made = restore_backup(
            backup, directory, lambda database: renew_incarnations(database, new_id, time.time_ns()), add
        )
    tell(f"{directory}: commit {made.commit}, {size(made.num_bytes)}, in {duration(made.seconds)}")


@contextmanager
def _copying() -> "Iterator[None]":
    from gradserve_server.storage.directory import StateError

    try:
        yield
    except StateError as error:
        raise click.ClickException(str(error)) from None


class _ToldFile(io.BufferedWriter):
    """A new file that tells how many bytes are written to it."""

    def __init__(self, path: Path, add: Callable[[int], object] | None) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._add = add

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        if self._add is not None:
            self._add(count)
        return count


class _LostError(click.ClickException):
    """The database is gone."""


@contextmanager
def _opened(directory: Path, *, may_be_backup: bool = False) -> "Iterator[StateStore]":
    from gradserve_server.storage.directory import LostDatabaseError, StateDirectory, StateError
    from gradserve_server.storage.store import StateStore

    try:
        store = StateStore(StateDirectory(directory, make=False, may_be_backup=may_be_backup), damaged=True)
    except LostDatabaseError as error:
        raise _LostError(str(error)) from None
    except (StateError, OSError) as error:
        raise click.ClickException(str(error)) from None
    try:
        yield store
    except StateError as error:  # the records of something else
        raise click.ClickException(str(error)) from None
    finally:
        store.close()


_KINDS = ("accumulators", "layers", "parameters")


@dataclass(frozen=True)
class _Found:
    """A resource of a state directory.

    Attributes:
        kind: One of `_KINDS`.
        line: What it is, for people.
        faults: The reasons why it cannot be used as it is.
        damaged: What is damaged, and would be removed.
        removal: The change that removes it; None if nothing is damaged.
    """

    kind: str
    line: str
    faults: list[str]
    damaged: str
    removal: "Change | None"


def _found_in(store: "StateStore") -> list[_Found]:
    """Reads everything in a state directory, and shows how far it is."""
    from gradserve_server.accumulators.durable.restoring import inspect
    from gradserve_server.layers.batch_norm.restoring import inspect_layers
    from gradserve_server.parameters.restoring import inspect_parameters

    with reading(store):
        return [
            *[
                _in_rounds(store, each, "accumulators", f"accumulator {each.key}", "gradient", "average")
                for each in inspect(store)
            ],
            *[_layer(store, each) for each in inspect_layers(store)],
            *[
                _in_rounds(store, each, "parameters", f"parameters {each.key}", "update", "version")
                for each in inspect_parameters(store)
            ],
        ]


def _in_rounds(store: "StateStore", found: "Found", kind: str, name: str, item: str, result: str) -> _Found:
    """Shows an accumulator or parameters, by a name, with the words for what comes into a round and for its result."""
    from gradserve_server.accumulators.durable.restoring import removal

    line = (
        f"{found.durability.lower()}, {_step(found.step)}, {found.num_gradients} {item}s in the round, "
        f"{len(found.averages)} {result}s"
    )
    faults = [] if found.damage is None else [found.damage]
    faults += [f"{result} of round {number}: {why}" for number, why in found.damaged_averages.items()]
    damaged = name if found.damage else f"{result}s of {name}"
    shown = str(found.key) if kind == "accumulators" else name
    return _Found(kind, f"{shown}: {line}", faults, damaged, removal(store, found))


def _layer(store: "StateStore", found: "FoundLayer") -> _Found:
    from gradserve_server.layers.batch_norm.restoring import layer_removal

    line = what = f"layer {found.key}"
    if found.damage is None:
        line += f": {found.num_variables} variables, {found.num_updates} updates, {found.num_pending} pending"
    faults = [] if found.damage is None else [found.damage]
    return _Found("layers", line, faults, what, layer_removal(store, found))


def _step(step: int | None) -> str:
    return "step unknown" if step is None else f"step {step}"
