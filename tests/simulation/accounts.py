"""What a server counts, compared with what is there."""

from gradserve_server.storage.segments import whole_blocks
from tests.simulation.promises import check
from tests.simulation.server import Server

_REFERENCES = " UNION ALL ".join(
    [
        "SELECT blob FROM gradient",
        "SELECT blob FROM average",
        "SELECT blob FROM parameters_update",
        "SELECT blob FROM parameters_version",
        "SELECT blob FROM parameters_state",
        "SELECT DISTINCT blob FROM layer_variable",
        "SELECT blob FROM layer_update",
    ]
)


def check_files(server: Server) -> None:
    """Checks the accounts of the files: every blob is referred to, and every block is free or in use, once."""
    store = server.store
    referred = sorted(blob for (blob,) in store.rows(_REFERENCES))
    stored = sorted(number for (number,) in store.rows("SELECT id FROM blob"))
    check(referred == stored == sorted(store.blobs), f"blobs {stored} are there, but {referred} are referred to")
    used = sum(whole_blocks(each.num_bytes) for blob in store._blobs.values() for each in blob.extents)
    of_parameters = server.parameters_journals._journals.values()
    spaces = [each._space for each in [*server.journals._journals.values(), *of_parameters]]
    spaces += [each._state_space for each in of_parameters]
    reserved = sum(each.num_bytes for space in spaces if space is not None for each in space.extents)
    free, there = store.segments.num_free, store.segments.num_bytes
    check(free + used + reserved == there, f"of {there} bytes {used} are used, {reserved} reserved, {free} free")


def check_memory(server: Server) -> None:
    """Checks, while the server works on no call, that what is in use belongs to something that is there."""
    accumulators = [each for _, each in server.accumulators._directory]
    parameters = [each for _, each in server.parameters._directory]
    layers = [each for _, each in server.layers._layers]
    tensors = list(server.tensors._entries.values())
    num_forwards = sum(len(each.forwards) for each in layers)
    num_bytes = {
        "accumulators": sum(each.state.num_bytes for each in accumulators),
        "parameters": sum(each.state.num_bytes for each in parameters),
        "layers": sum(each.num_bytes for each in layers),
        "tensors": sum(each.memory.used for each in tensors),
    }
    expected = {
        "bytes": (sum(num_bytes.values()), server.memory.used),
        "handles": (len(tensors) + num_forwards, server.handles.used),
        "waiting calls": (0, server.accumulators.factory.waiters.used),
        "accumulators and parameters": (len(accumulators) + len(parameters), server.accumulators.factory.count.used),
        "layers": (len(layers), server.layers.count.used),
    }
    settled = [each for each in parameters if not each._changes.is_under_way]
    kept = [{version.round_number: version.nbytes for version in each._versions.all_kept} for each in settled]
    expected["bytes of sums and states of parameters"] = (
        sum(each._changes.sum.summation.nbytes for each in settled),
        sum(each._changes.sum.nbytes for each in settled),
    )
    expected["bytes of versions"] = (
        sum(sum(each.values()) for each in kept),
        sum(each._versions.nbytes for each in settled),
    )
    for what, (there, counted) in expected.items():
        check(there == counted, f"{there} {what} are there, {counted} are counted; bytes of {num_bytes}")
