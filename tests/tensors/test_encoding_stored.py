"""The reply of PutTensors, which is serialized piece by piece."""

import numpy as np

from gradserve.v1 import tensor_messages_pb2, tensor_pb2
from gradserve_server.rpc.tensors.service import _encode_stored
from gradserve_server.tensors.spec import TensorSpec


def test_pieces_are_one_message() -> None:
    dtype = np.dtype(np.float32)
    specs = [TensorSpec(dtype, (number, 3)) for number in range(300)]
    handles = [f"{number}" * (number + 1) for number in range(300)]
    expected = tensor_messages_pb2.PutTensorsResponse(
        tensors=[
            tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=spec.shape, handle=handle)
            for spec, handle in zip(specs, handles, strict=True)
        ]
    )
    assert tensor_messages_pb2.PutTensorsResponse.FromString(_encode_stored(specs, handles)) == expected
