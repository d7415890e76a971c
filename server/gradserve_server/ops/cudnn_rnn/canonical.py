"""The ops CudnnRNNParamsSize, -ParamsToCanonical and -CanonicalToParams (V2), their checks and their computation.

The canonical form of a parameter vector is a list of matrices and a list of biases. For each pseudo-layer: the matrices
W of all gates, each [H, columns], R of all gates, each [H, H'], and with a projection P, [P, H]; and the biases bW of
all gates and bR of all gates, each [H]. With skip_input the matrices W of the first layer, which are not part of the
vector, are in the list without columns: [H, 0].

V1 has one number of params for both lists, and no projection. num_layers, num_units and input_size, which TensorFlow
takes as tensors of one element, are attributes here, because the shapes of the outputs depend on them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradserve_server.devices.device import Array, Device
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_NETWORK_PARTS
from gradserve_server.ops.cudnn_rnn.declaration import (
    check_floats,
    check_int32,
    check_network_attributes,
    check_params,
    description,
    make_network,
)
from gradserve_server.ops.cudnn_rnn.spec import Network, NetworkAttributes, split_params
from gradserve_server.ops.operation import Op
from gradserve_server.tensors.spec import TensorSpec, shape_text

FAMILY = "cudnn_rnn_params"


_SIZE_DTYPES = ("int32", "int64")


@dataclass(frozen=True)
class ParamsSizeInputs:
    """CudnnRNNParamsSize has no inputs: TensorFlow's are attributes here."""


@dataclass(frozen=True)
class ParamsSizeAttributes(NetworkAttributes):
    """Attributes of CudnnRNNParamsSize. The size does not depend on the dtype of the parameters.

    Attributes:
        s: The dtype of the size, "int32" or "int64".
    """

    s: str = "int32"


@dataclass(frozen=True)
class ParamsSizeOutputs:
    """Outputs of CudnnRNNParamsSize.

    Attributes:
        params_size: S, [1]: the length of the parameter vector.
    """

    params_size: Array


@dataclass(frozen=True)
class ParamsToCanonicalInputs:
    """Inputs of CudnnRNNParamsToCanonical.

    Attributes:
        params: [number of parameters].
    """

    params: Array


@dataclass(frozen=True)
class ParamsToCanonicalAttributes(NetworkAttributes):
    """Attributes of CudnnRNNParamsToCanonical.

    Attributes:
        num_params_weights: The length of `weights`.
        num_params_biases: The length of `biases`.
    """

    num_params_weights: int = 0
    num_params_biases: int = 0


@dataclass(frozen=True)
class CanonicalParams:
    """Inputs of CudnnRNNCanonicalToParams and outputs of CudnnRNNParamsToCanonical.

    Attributes:
        weights: The matrices. As inputs, matrices and biases may have any other shape with as many elements, as in
            TensorFlow, whose own converter passes vectors.
        biases: The biases, each [H].
    """

    weights: tuple[Array, ...]
    biases: tuple[Array, ...]


@dataclass(frozen=True)
class CanonicalToParamsOutputs:
    """Outputs of CudnnRNNCanonicalToParams.

    Attributes:
        params: [number of parameters].
    """

    params: Array


@dataclass(frozen=True)
class ParamsPlan:
    """A checked call.

    Attributes:
        network: The network that the parameters are for.
        output_specs: The specs of all outputs, in their order; for lists, one after another.
    """

    network: Network
    output_specs: tuple[TensorSpec, ...]


def network_of(attributes: NetworkAttributes) -> Network:
    """Returns the network that the parameters are for.

    Raises:
        InvalidArgumentError: Such a network cannot exist.
    """
    check_network_attributes(attributes)
    for name in ("num_layers", "num_units", "input_size"):
        check_int32(attributes, name)
        if getattr(attributes, name) < 1:
            raise InvalidArgumentError(f"{name} must be at least 1, got {getattr(attributes, name)}", field=name)
    network = make_network(
        attributes,
        num_layers=attributes.num_layers,
        input_size=attributes.input_size,
        num_units=attributes.num_units,
    )
    if not 0 <= network.num_proj <= network.num_units:
        raise InvalidArgumentError(
            f"num_proj must be from 0 to num_units, {network.num_units}, got {network.num_proj}", field="num_proj"
        )
    return network


def plan_params_size(inputs: ParamsSizeInputs, attributes: ParamsSizeAttributes) -> ParamsPlan:
    """Checks a call of CudnnRNNParamsSize.

    Raises:
        InvalidArgumentError: Such a network cannot exist, or S cannot hold the size.
    """
    network = network_of(attributes)
    if attributes.s not in _SIZE_DTYPES:
        raise InvalidArgumentError(
            f"Value for attr 'S' of {attributes.s} is not in the list of allowed values: {', '.join(_SIZE_DTYPES)}",
            field="s",
        )
    dtype = np.dtype(attributes.s)
    if network.num_params > np.iinfo(dtype).max:
        raise InvalidArgumentError(f"{dtype} cannot hold the params size, {network.num_params}", field="s")
    return ParamsPlan(network, (TensorSpec(dtype, (1,)),))


def plan_params_to_canonical(inputs: ParamsToCanonicalInputs, attributes: ParamsToCanonicalAttributes) -> ParamsPlan:
    """Checks a call of CudnnRNNParamsToCanonical.

    Raises:
        InvalidArgumentError: An argument is not valid; the message names it, what was given and what was expected.
    """
    network = network_of(attributes)
    for name in ("num_params_weights", "num_params_biases"):
        count = getattr(attributes, name)
        if count < 1:
            raise InvalidArgumentError(f"Value for attr '{name}' of {count} must be at least minimum 1", field=name)
        if count > MAX_NETWORK_PARTS:
            raise InvalidArgumentError(f"expected at most {MAX_NETWORK_PARTS} tensors, got {count}", field=name)
    check_floats(inputs.params, "params", {})
    _check_counts(network, attributes.num_params_weights, attributes.num_params_biases)
    given = math.prod(inputs.params.shape)
    if given != network.num_params:
        raise InvalidArgumentError(
            f"Params size mismatch. Expected {network.num_params}, got {given}, for {description(network)}",
            field="params",
        )
    check_params(inputs.params, network)
    shapes = _matrix_shapes(network) + _bias_shapes(network)
    return ParamsPlan(network, tuple(TensorSpec(inputs.params.dtype, shape) for shape in shapes))


def plan_canonical_to_params(inputs: CanonicalParams, attributes: NetworkAttributes) -> ParamsPlan:
    """Checks a call of CudnnRNNCanonicalToParams.

    Raises:
        InvalidArgumentError: An argument is not valid; the message names it, what was given and what was expected.
    """
    network = network_of(attributes)
    for name, expected in (("weights", _num_matrices(network)), ("biases", _num_biases(network))):
        given = len(getattr(inputs, name))
        if given != expected:
            raise InvalidArgumentError(
                f"{name} must be a list of {expected} for {description(network)}, got {given}", field=name
            )
    arrays = {f"weights[{index}]": array for index, array in enumerate(inputs.weights)}
    arrays |= {f"biases[{index}]": array for index, array in enumerate(inputs.biases)}
    check_floats(inputs.weights[0], "weights[0]", arrays)
    for (name, array), shape in zip(arrays.items(), _matrix_shapes(network) + _bias_shapes(network), strict=True):
        expected = math.prod(shape)
        if math.prod(array.shape) != expected:
            raise InvalidArgumentError(
                f"{name} must have {expected} elements, as many as shape {shape_text(shape)}, "
                f"got shape {shape_text(array.shape)}",
                field=name,
            )
    return ParamsPlan(network, (TensorSpec(inputs.weights[0].dtype, (network.num_params,)),))


def _check_counts(network: Network, num_weights: int, num_biases: int) -> None:
    """Makes TensorFlow's checks, with its messages."""
    for kind, count in (("weights", num_weights), ("biases", num_biases)):
        if count % network.num_pseudo_layers:
            raise InvalidArgumentError(
                f"Number of params ({kind}) is not a multipleof num_layers * num_dirs.", field=f"num_params_{kind}"
            )
    is_odd = num_weights // network.num_pseudo_layers % 2
    if is_odd != bool(network.num_proj):
        wanted = "odl number with projection" if network.num_proj else "even number with no projection"
        raise InvalidArgumentError(
            f"Number of params (weights) per layer is notan {wanted}.", field="num_params_weights"
        )
    for letter, kind, given, expected in (
        ("C", "weights", num_weights, _num_matrices(network)),
        ("A", "biases", num_biases, _num_biases(network)),
    ):
        if given != expected:
            raise InvalidArgumentError(
                f"{letter} Number of params mismatch. Expected {given}, got {expected}", field=f"num_params_{kind}"
            )


def _num_matrices(network: Network) -> int:
    return _num_biases(network) + (network.num_pseudo_layers if network.num_proj else 0)


def _num_biases(network: Network) -> int:
    return 2 * network.mode.num_gates * network.num_pseudo_layers


def _matrix_shapes(network: Network) -> list[tuple[int, ...]]:
    gates, units, hidden = network.mode.num_gates, network.num_units, network.hidden_size
    shapes: list[tuple[int, ...]] = []
    for layer in range(network.num_layers):
        pseudo_layer = [(units, network.matrix_columns(layer))] * gates + [(units, hidden)] * gates
        if network.num_proj:
            pseudo_layer.append((network.num_proj, units))
        shapes += pseudo_layer * network.num_directions
    return shapes


def _bias_shapes(network: Network) -> list[tuple[int, ...]]:
    return [(network.num_units,)] * _num_biases(network)


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
