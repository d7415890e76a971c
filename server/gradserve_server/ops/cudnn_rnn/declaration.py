"""CudnnRNN and CudnnRNNBackprop as ops, and their interface on a device."""

from typing import Protocol

from gradserve_server.ops.cudnn_rnn.checks import plan_backprop, plan_forward
from gradserve_server.ops.cudnn_rnn.scratch import backprop_scratch_bytes, forward_scratch_bytes
from gradserve_server.ops.cudnn_rnn.spec import (
    BackpropInputs,
    BackpropOutputs,
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Plan,
    Problem,
    RnnAttributes,
)
from gradserve_server.ops.operation import Family, Op


class CudnnRnn(Family, Protocol):
    """CudnnRNN on one device. Inputs are checked and in its memory, where outputs are, too."""

    def forward(self, inputs: ForwardInputs, problem: Problem) -> ForwardOutputs:
        """Computes CudnnRNN.

        Raises:
            InvalidArgumentError: A sequence length is not from 1 to T.
        """
        ...

    def backprop(self, inputs: BackpropInputs, problem: Problem) -> BackpropOutputs:
        """Computes CudnnRNNBackprop.

        Raises:
            InvalidArgumentError: reserve_space or host_reserved are not from a forward call for this problem on this
                device, or not from the same one; or a sequence length is not from 1 to T.
        """
        ...


FAMILY = "cudnn_rnn"


def _forward(family: CudnnRnn, inputs: ForwardInputs, attributes: ForwardAttributes, plan: Plan) -> ForwardOutputs:
    return family.forward(inputs, plan.problem)


def _backprop(family: CudnnRnn, inputs: BackpropInputs, attributes: RnnAttributes, plan: Plan) -> BackpropOutputs:
    return family.backprop(inputs, plan.problem)


CUDNN_RNN = Op(
    name="CudnnRNN",
    family=FAMILY,
    inputs=ForwardInputs,
    attributes=ForwardAttributes,
    outputs=ForwardOutputs,
    plan=plan_forward,
    compute=_forward,
    scratch_bytes=forward_scratch_bytes,
    is_quick=False,
)

CUDNN_RNN_BACKPROP = Op(
    name="CudnnRNNBackprop",
    family=FAMILY,
    inputs=BackpropInputs,
    attributes=RnnAttributes,
    outputs=BackpropOutputs,
    plan=plan_backprop,
    compute=_backprop,
    scratch_bytes=backprop_scratch_bytes,
    is_quick=False,
)
