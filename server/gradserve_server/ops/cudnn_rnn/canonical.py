"""CudnnRNNParamsSize, CudnnRNNParamsToCanonical and CudnnRNNCanonicalToParams as ops, and their computation."""

from collections.abc import Callable

from gradserve_server.devices.device import Array, Device
from gradserve_server.ops.cudnn_rnn.canonical_spec import (
    CanonicalParams,
    CanonicalToParamsOutputs,
    ParamsPlan,
    ParamsSizeAttributes,
    ParamsSizeInputs,
    ParamsSizeOutputs,
    ParamsToCanonicalAttributes,
    ParamsToCanonicalInputs,
    plan_canonical_to_params,
    plan_params_size,
    plan_params_to_canonical,
)
from gradserve_server.ops.cudnn_rnn.network import Network, split_params
from gradserve_server.ops.cudnn_rnn.spec import NetworkAttributes
from gradserve_server.ops.operation import Op


class CudnnRnnParams:
    """The ops on parameters on any device: copies. Inputs are in its memory, where outputs are, too."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Does nothing, because there are no kernels."""

    def params_size(self, plan: ParamsPlan) -> ParamsSizeOutputs:
        """Computes CudnnRNNParamsSize."""
        (spec,) = plan.output_specs
        size = self._device.empty(spec.shape, spec.dtype)
        size[...] = plan.network.num_params
        return ParamsSizeOutputs(size)

    def params_to_canonical(self, inputs: ParamsToCanonicalInputs, plan: ParamsPlan) -> CanonicalParams:
        """Computes CudnnRNNParamsToCanonical."""
        views = _canonical_views(plan.network, inputs.params)
        return CanonicalParams(tuple(map(self._copy, views.weights)), tuple(map(self._copy, views.biases)))

    def canonical_to_params(self, inputs: CanonicalParams, plan: ParamsPlan) -> CanonicalToParamsOutputs:
        """Computes CudnnRNNCanonicalToParams."""
        (spec,) = plan.output_specs
        params = self._device.empty(spec.shape, spec.dtype)
        views = _canonical_views(plan.network, params)
        for view, given in zip(views.weights + views.biases, inputs.weights + inputs.biases, strict=True):
            view[...] = given.reshape(view.shape)
        return CanonicalToParamsOutputs(params)

    def _copy(self, view: Array) -> Array:
        copy = self._device.empty(view.shape, view.dtype)
        copy[...] = view
        return copy


def _canonical_views(network: Network, params: Array) -> CanonicalParams:
    """Returns views of a parameter vector, NumPy's or CuPy's."""
    gates, units = network.mode.num_gates, network.num_units

    def by_gate(of_all_gates: Array) -> list[Array]:
        return [of_all_gates[gate * units : (gate + 1) * units] for gate in range(gates)]

    weights: list[Array] = []
    biases: list[Array] = []
    for pseudo_layer in split_params(network, params):
        weights += by_gate(pseudo_layer.input_weights) + by_gate(pseudo_layer.recurrent_weights)
        if pseudo_layer.projection is not None:
            weights.append(pseudo_layer.projection)
        biases += by_gate(pseudo_layer.input_bias) + by_gate(pseudo_layer.recurrent_bias)
    return CanonicalParams(tuple(weights), tuple(biases))


FAMILY = "cudnn_rnn_params"


def _params_size(
    family: CudnnRnnParams, inputs: ParamsSizeInputs, attributes: ParamsSizeAttributes, plan: ParamsPlan
) -> ParamsSizeOutputs:
    return family.params_size(plan)


def _params_to_canonical(
    family: CudnnRnnParams, inputs: ParamsToCanonicalInputs, attributes: ParamsToCanonicalAttributes, plan: ParamsPlan
) -> CanonicalParams:
    return family.params_to_canonical(inputs, plan)


def _canonical_to_params(
    family: CudnnRnnParams, inputs: CanonicalParams, attributes: NetworkAttributes, plan: ParamsPlan
) -> CanonicalToParamsOutputs:
    return family.canonical_to_params(inputs, plan)


CUDNN_RNN_PARAMS_SIZE = Op(
    name="CudnnRNNParamsSize",
    family=FAMILY,
    inputs=ParamsSizeInputs,
    attributes=ParamsSizeAttributes,
    outputs=ParamsSizeOutputs,
    plan=plan_params_size,
    compute=_params_size,
)

CUDNN_RNN_PARAMS_TO_CANONICAL = Op(
    name="CudnnRNNParamsToCanonical",
    family=FAMILY,
    inputs=ParamsToCanonicalInputs,
    attributes=ParamsToCanonicalAttributes,
    outputs=CanonicalParams,
    plan=plan_params_to_canonical,
    compute=_params_to_canonical,
    is_quick=False,
)

CUDNN_RNN_CANONICAL_TO_PARAMS = Op(
    name="CudnnRNNCanonicalToParams",
    family=FAMILY,
    inputs=CanonicalParams,
    attributes=NetworkAttributes,
    outputs=CanonicalToParamsOutputs,
    plan=plan_canonical_to_params,
    compute=_canonical_to_params,
    is_quick=False,
)
