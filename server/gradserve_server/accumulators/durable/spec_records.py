"""Specs, lifetimes and averages as records."""

from dataclasses import asdict
from typing import Any

import numpy as np

from gradserve_server.accumulators.events import Record
from gradserve_server.accumulators.gradient import Array, Average, RoundParts, SparseSlices, Value
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.pieces import Piece
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, Layout, PartialShape, Reduction
from gradserve_server.state.durability import Durability

_HOST = "cpu"


def spec_record(spec: AccumulatorSpec) -> Record:
    """Returns a spec in types that JSON has; the reverse of `spec_of`."""
    assert spec.durability is not None, "the registry has chosen one"
    return {
        "components": [
            {
                "name": each.name,
                "dtype": each.dtype.name,
                "shape": None if each.shape.dims is None else list(each.shape.dims),
                "layout": each.layout.value,
                "pieces": [list(piece) for piece in each.pieces],
            }
            for each in spec.components
        ],
        "reduction": spec.reduction.value,
        "accumulate_dtype": None if spec.accumulate_dtype is None else spec.accumulate_dtype.name,
        "deterministic": spec.deterministic,
        "keep_averages": spec.keep_averages,
        "one_per_worker": spec.one_per_worker,
        "refuse_non_finite": spec.refuse_non_finite,
        "durability": spec.durability.value,
        "device": spec.device,
        "agreement": dict(spec.agreement),
        "num_shards": spec.num_shards,
    }


def spec_of(record: Record) -> AccumulatorSpec:
    """Returns the spec of a record.

    Raises:
        ServiceError, ValueError, TypeError, KeyError: It is no such record.
    """
    return AccumulatorSpec(
        components=tuple(
            ComponentSpec(
                each["name"],
                np.dtype(each["dtype"]),
                PartialShape(None if each["shape"] is None else tuple(each["shape"])),
                Layout(each["layout"]),
                tuple(Piece(*piece) for piece in each.get("pieces", ())),
            )
            for each in record["components"]
        ),
        reduction=Reduction(record["reduction"]),
        accumulate_dtype=None if record["accumulate_dtype"] is None else np.dtype(record["accumulate_dtype"]),
        deterministic=record["deterministic"],
        keep_averages=record["keep_averages"],
        one_per_worker=record["one_per_worker"],
        refuse_non_finite=record["refuse_non_finite"],
        durability=Durability(record["durability"]),
        device=record.get("device", _HOST),  # servers that had no other place wrote none
        agreement=record.get("agreement", {}),  # nor did those that had no agreements
        num_shards=record.get("num_shards", 0),  # nor those that had no sharded accumulators
    )


def average_record(average: Average, answered: list[RequestId]) -> Record:
    """Returns an average without its values, and the calls that it answered; the reverse of `average_of`."""
    record = {name: value for name, value in vars(average).items() if name in _AVERAGE}
    if average.parts is not None:
        record["parts"] = {name: value for name, value in asdict(average.parts).items() if name != "sums" or value}
    return {**record, "answered": [[each.client_id, each.sequence, each.fingerprint.hex()] for each in answered]}


_AVERAGE = ("step", "round_number", "num_gradients", "total_weight", "worker_ids")


def average_of(record: Record, values: dict[str, Value]) -> tuple[Average, list[RequestId]]:
    """Returns the average of a record, and the calls that it answered.

    Raises:
        ServiceError, ValueError, TypeError, KeyError: It is no such record.
    """
    fields: dict[str, Any] = {name: record[name] for name in _AVERAGE}
    fields["worker_ids"] = tuple(fields["worker_ids"])
    if "parts" in record:
        parts: dict[str, Any] = record["parts"]
        lists = {name: tuple(value) for name, value in parts.items() if isinstance(value, list)}
        fields["parts"] = RoundParts(**{**parts, **lists})
    answered = [RequestId(client, sequence, bytes.fromhex(digest)) for client, sequence, digest in record["answered"]]
    for value in values.values():
        for array in _arrays(value):
            array.flags.writeable = False
    return Average(values=values, **fields), answered


def split(values: dict[str, Value]) -> tuple[list[Any], list[Array]]:
    """Returns the layout of values, in types that JSON has, and their arrays; the reverse of `joined`."""
    layout = [
        [name, None if not isinstance(value, SparseSlices) else {"dense_shape": value.dense_shape}]
        for name, value in values.items()
    ]
    return layout, [array for value in values.values() for array in _arrays(value)]


def joined(layout: list[Any], arrays: list[Array]) -> dict[str, Value]:
    """Returns values, given their layout and their arrays.

    Raises:
        ValueError, TypeError, KeyError: They do not belong together.
    """
    left = list(reversed(arrays))
    values: dict[str, Value] = {}
    for name, sparse in layout:
        if len(left) < (1 if sparse is None else 2):
            raise ValueError(f"expected more than {len(arrays)} arrays")
        if sparse is None:
            values[name] = left.pop()
        else:
            shape = sparse["dense_shape"]
            values[name] = SparseSlices(left.pop(), left.pop(), None if shape is None else tuple(shape))
    if left:
        raise ValueError(f"expected {len(arrays) - len(left)} arrays, got {len(arrays)}")
    return values


def _arrays(value: Value) -> list[Array]:
    return [value.indices, value.values] if isinstance(value, SparseSlices) else [value]
