"""Every op that the contract has is served, with the fields that its declaration names."""

from dataclasses import fields

import pytest

from gradserve_server.ops.operation import AnyOp
from gradserve_server.ops.registry import OPS
from gradserve_server.rpc.gradient_ops.service import SERVICE


def test_the_contract_has_the_ops_of_the_table() -> None:
    assert [method.name for method in SERVICE.methods] == list(OPS)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_messages_have_the_fields_of_the_declaration(op: AnyOp) -> None:
    method = SERVICE.methods_by_name[op.name]
    inputs, attributes, outputs = (
        [field.name for field in fields(each)] for each in (op.inputs, op.attributes, op.outputs)
    )
    assert sorted([*inputs, *attributes, "placement"]) == sorted(method.input_type.fields_by_name)
    assert sorted(outputs) == sorted(method.output_type.fields_by_name)
    for name in (*inputs, *outputs):
        message = method.input_type if name in inputs else method.output_type
        type_of_field = message.fields_by_name[name].message_type
        assert type_of_field is not None
        assert type_of_field.full_name == "gradserve.v1.Tensor"
