"""Reads what the home of a sharded accumulator has decided, from requests to the servers that have the values."""

from collections.abc import Iterable

from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import accumulator_pb2
from gradserve_server.accumulators.gradient import Average, RoundParts
from gradserve_server.accumulators.sharding.part_ids import NUM_BYTES
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_WORKER_ID_BYTES, check_length

_FIELD = "average.parts"


def decode_counted(request: messages_pb2.ForgetGradientsRequest) -> frozenset[str]:
    """Returns the ids of the gradients that a home has counted.

    Raises:
        InvalidArgumentError: They are no such ids.
    """
    _check_ids(request.part_ids, "part_ids")
    return frozenset([each.hex() for each in request.part_ids])


def decode_decided(average: accumulator_pb2.Average) -> Average:
    """Returns an average of a sharded accumulator as its home has answered it: without values.

    Raises:
        InvalidArgumentError: It is not such an average.
    """
    if not average.HasField("parts"):
        raise InvalidArgumentError("expected what the home has answered, got no parts", field=_FIELD)
    parts = average.parts
    ids = tuple([each.hex() for each in parts.part_ids])
    if not ids or len(ids) != len(parts.weights) or len(set(ids)) < len(ids):
        raise InvalidArgumentError(
            f"expected different ids with a weight each, got {len(ids)} ids, {len(set(ids))} different ones, and "
            f"{len(parts.weights)} weights",
            field=f"{_FIELD}.part_ids",
        )
    _check_ids(parts.part_ids, f"{_FIELD}.part_ids")
    if any(not 0 <= place < len(ids) for place in parts.sums) or len(set(parts.sums)) < len(parts.sums):
        raise InvalidArgumentError(
            f"expected different places of {len(ids)} ids, got {list(parts.sums)[:10]}", field=f"{_FIELD}.sums"
        )
    for weight in parts.weights:
        if not 0 < weight < float("inf"):
            raise InvalidArgumentError(f"expected positive, finite weights, got {weight:g}", field=f"{_FIELD}.weights")
    for worker_id in average.worker_ids:
        check_length(worker_id, MAX_WORKER_ID_BYTES, "average.worker_ids")
    return Average(
        values={},
        step=average.step,
        round_number=average.round - 1,
        num_gradients=average.num_gradients,
        total_weight=average.total_weight,
        worker_ids=tuple(average.worker_ids),
        parts=RoundParts(
            parts.home_incarnation,
            ids,
            tuple(parts.weights),
            oldest_round=parts.oldest_round - 1,
            oldest_step=parts.oldest_step,
            sums=tuple(parts.sums),
            epoch=parts.epoch,
            oldest_epoch=parts.oldest_epoch,
        ),
    )


def _check_ids(ids: Iterable[bytes], field: str) -> None:
    for each in ids:
        if len(each) != NUM_BYTES:
            raise InvalidArgumentError(f"expected ids of {NUM_BYTES} bytes, got one of {len(each)}", field=field)
