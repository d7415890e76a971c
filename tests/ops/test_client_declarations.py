"""What the client declares of each op is what the contract and the server have."""

import dataclasses

import pytest
from google.protobuf.descriptor import Descriptor

from gradserve.ops import OPS
from gradserve.ops.declaration import Op, Required, SingleOutput, docstring_of, fields_of
from gradserve_server.ops.registry import OPS as SERVED
from gradserve_server.rpc.gradient_ops.service import SERVICE

IDS = [op.name for op in OPS]
NEWEST = [op for op in OPS if op.newer is None]


def sent_fields(op: Op) -> list[str]:
    inputs = [each.name for each in op.inputs]
    sent = [(each.name,) if each.fields is None else each.fields for each in op.attributes if not each.no_effect]
    return [*inputs, *(field for fields in sent for field in fields)]


def returned_fields(op: Op) -> set[str]:
    if isinstance(op.outputs, SingleOutput):
        return {op.outputs.field}
    return {field for outputs in op.output_tuples for field in fields_of(outputs).values()}


def response_of(op: Op) -> Descriptor:
    return SERVICE.methods_by_name[op.rpc].output_type


def test_every_op_of_the_contract_is_declared_once() -> None:
    assert sorted(op.rpc for op in NEWEST) == sorted(method.name for method in SERVICE.methods)
    assert len({op.name for op in OPS}) == len(OPS)


@pytest.mark.parametrize("op", NEWEST, ids=lambda op: op.name)
def test_the_newest_version_sends_and_returns_all_fields(op: Op) -> None:
    assert sorted([*sent_fields(op), "placement"]) == sorted(op.request.DESCRIPTOR.fields_by_name)
    assert returned_fields(op) == set(response_of(op).fields_by_name)


@pytest.mark.parametrize("op", OPS, ids=IDS)
def test_every_version_knows_fields_of_the_contract_only(op: Op) -> None:
    fields = sent_fields(op)
    assert len(set(fields)) == len(fields)
    assert set(fields) <= set(op.request.DESCRIPTOR.fields_by_name)
    assert returned_fields(op) <= set(response_of(op).fields_by_name)
    for tensor in op.inputs:
        assert op.request.DESCRIPTOR.fields_by_name[tensor.name].is_repeated == tensor.is_list


@pytest.mark.parametrize("op", OPS, ids=IDS)
def test_defaults_are_the_servers(op: Op) -> None:
    """So a call from another language, which leaves a field unset, computes the same."""
    defaults = {field.name: field.default for field in dataclasses.fields(SERVED[op.rpc].attributes)}
    for each in op.attributes:
        if each.fields is None and not each.no_effect and not isinstance(each.default, Required):
            assert each.default == defaults[each.name], each.name


@pytest.mark.parametrize("op", OPS, ids=IDS)
def test_inputs_that_may_be_missing_may_be_missing_on_the_server(op: Op) -> None:
    optional = {each.name for each in dataclasses.fields(SERVED[op.rpc].inputs) if each.default is None}
    assert {each.name for each in op.inputs if each.is_optional} <= optional


@pytest.mark.parametrize("op", OPS, ids=IDS)
def test_everything_is_described(op: Op) -> None:
    assert all(each.doc.endswith(".") for each in op.arguments)
    for outputs in op.output_tuples:
        assert all(op.output_doc(name) for name in fields_of(outputs))
    text = docstring_of(op)
    assert all(len(line) <= 112 for line in text.splitlines())
