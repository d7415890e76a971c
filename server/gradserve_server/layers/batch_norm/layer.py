"""A layer: variables, and what becomes of them when many workers call it at once."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Array
from gradserve_server.errors import AbortedError, InvalidArgumentError, NotFoundError
from gradserve_server.layers.batch_norm.adjustment import draw_adjustment
from gradserve_server.layers.batch_norm.calls import BackwardCall, ForwardCall, ForwardResult
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.declaration import BACKWARD, FORWARD, UPDATE
from gradserve_server.layers.batch_norm.forwards import Forwards, Moments, Saved
from gradserve_server.layers.batch_norm.implementation import CallKind, choose_implementation
from gradserve_server.layers.batch_norm.spec import (
    BackwardAttributes,
    BackwardInputs,
    BackwardOutputs,
    CallInputs,
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    ForwardPlan,
    channel_axis,
    channel_shape,
    check_dtype,
    check_rank,
    plan_forward,
)
from gradserve_server.layers.batch_norm.updates import UpdateAttributes, UpdateInputs, UpdateOutputs
from gradserve_server.layers.batch_norm.variables import Variables, initial_variables, variable_bytes
from gradserve_server.ops.dtypes import widened
from gradserve_server.ops.runner import CheckedCall, Computed, OpRunner, check_call
from gradserve_server.tensors.quotas import Account, Quota

_VARIABLES = tuple(field.name for field in fields(ForwardInputs) if field.name in Variables.__dataclass_fields__)
"""What a forward uses of the variables."""
_SAVED = ("mean", "variance", "r", "d", "activation_saved")
_LOSSES = ("beta_regularization_loss", "gamma_regularization_loss")

_MAX_ID_BYTES = 128


def _ignore(_results: object) -> None:
    pass


class BatchNormLayer:
    """One layer.

    Its variables are values of one moment, replaced as a whole: whoever computes with them goes on with those it began
    with. Changes wait for each other, in order of arrival.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        name: str,
        config: BatchNormConfig,
        *,
        incarnation: str,
        creation_id: str,
        runner: OpRunner,
        compute: Compute,
        memory: Quota,
        handles: Quota,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        on_presence: Callable[[bool], object] = _ignore,
    ) -> None:
        """Takes a configuration that was checked, with all its seeds; `on_presence` as `Forwards` does.

        Raises:
            ResourceExhaustedError: There is no memory for the values in it.
        """
        self.name = name
        self.config = config
        self.incarnation = incarnation
        self.creation_id = creation_id
        self.variables: Variables | None = None
        self.num_updates = 0
        self.forwards = Forwards(memory, handles, clock, on_presence)
        self._runner = runner
        self._compute = compute
        self._account = Account(memory)
        self._account.grow(config.num_bytes)
        self._new_id = new_id
        self._num_draws = 0
        self._closed = False
        self._changing = asyncio.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory of the configuration, of the variables and of what forwards keep."""
        return self._account.used + self.forwards.num_bytes

    async def build(self, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        """Creates the variables for inputs like these, or checks that they fit; sizes other than C may be -1.

        Raises:
            InvalidArgumentError: The layer does not take such inputs.
            ResourceExhaustedError: There is no memory for them.
        """
        check_dtype(dtype, "input_dtype")
        check_rank(shape, "input_shape")
        if any(size < -1 for size in shape):
            raise InvalidArgumentError(
                f"expected sizes of at least 0, or -1 for any, got {list(shape)}", field="input_shape"
            )
        axis = channel_axis(len(shape), self.config.data_format)
        if shape[axis] < 0:
            raise InvalidArgumentError(
                f"expected the number of channels as size {axis} of input_shape, got {list(shape)}", field="input_shape"
            )
        kind = CallKind(len(shape), dtype, True, False, self.config.adjustment is not None)
        implementation = choose_implementation(self.config, kind)
        await self._ready(shape[axis], implementation.variable_dtype(dtype))

    async def forward(
        self,
        given: CallInputs,
        call: ForwardCall,
        *,
        on_host: bool,
        deliver: Callable[[Array], object] = _ignore,
        room: Account | None = None,
    ) -> ForwardResult:
        """Normalises inputs; updates the moving averages if the configuration says so.

        Args:
            given: In host memory or the device's.
            call: How.
            on_host: Whether the outputs are wanted in host memory.
            deliver: Gets the outputs before anything changes; may raise.
            room: As `OpRunner.run` takes it; what is kept for a backward takes memory over from it, too.

        Raises:
            InvalidArgumentError: Something does not fit.
            ResourceExhaustedError: Outputs, or what is kept, do not fit.
            MemoryError: The device has no memory left.
        """
        if len(call.forward_id.encode()) > _MAX_ID_BYTES:
            raise InvalidArgumentError(
                f"expected at most {_MAX_ID_BYTES} bytes, got {len(call.forward_id.encode())}", field="forward_id"
            )
        saves = call.is_training if call.keep_for_backward is None else call.keep_for_backward
        attributes = ForwardAttributes(self.config, call.is_training, saves)
        forward_id = call.forward_id or self._new_id()
        plan = plan_forward(given, attributes)
        if self.config.adjustment is not None and given.adjustment_scale is not None:
            raise InvalidArgumentError(
                "expected no adjustment, as the layer draws one itself; got one", field="adjustment_scale"
            )
        try:
            variables = await self._ready(plan.geometry.channels, plan.variable_dtype)
        except InvalidArgumentError as error:
            # Whatever they do not agree with: the request has nothing else that could be wrong.
            raise InvalidArgumentError(error.message, field="inputs") from None
        drawn = self._drawn(given, call, forward_id)
        if drawn is not None:
            given = replace(given, adjustment_scale=drawn[0], adjustment_bias=drawn[1])
            plan = plan_forward(given, attributes)
        inputs = ForwardInputs(**vars(given), **{name: getattr(variables, name) for name in _VARIABLES})
        checked = CheckedCall(FORWARD, inputs, attributes, plan)
        computed = await self._runner.run(checked, on_host={"outputs", *_LOSSES} if on_host else _LOSSES, room=room)
        self._adopt(variables, computed.moved)
        outputs = computed.outputs
        saved = None
        if saves:
            arrays = _saved_arrays(vars(inputs) | dict(computed.moved), outputs, plan)
            saved = Saved(arrays, BackwardAttributes(self.config, call.is_training, plan.implementation))
        deliver(outputs.outputs)
        moments = Moments(outputs.batch_mean, outputs.batch_variance, plan.implementation) if plan.has_updates else None
        has_pending = await self._keep(forward_id, saved, moments, call.lease, room)
        self.forwards.release(call.released, with_updates=False)
        losses = {name: getattr(outputs, f"{name}_regularization_loss") for name in ("beta", "gamma")}
        return ForwardResult(
            outputs=outputs.outputs,
            moved={name: array for name, array in computed.moved.items() if name in vars(given)},
            forward_id=forward_id if saves or has_pending else "",
            has_pending_updates=has_pending,
            implementation=plan.implementation,
            regularization_losses={name: float(loss) for name, loss in losses.items() if loss is not None},
            ignored=plan.ignored,
            drawn=drawn if plan.uses_adjustment else None,
        )

    def check_backward(self, forward_id: str, outputs_gradient: Array) -> BackwardCall:
        """Checks a backward; to be computed before anything else happens.

        Args:
            forward_id: Of the forward.
            outputs_gradient: The gradient with respect to its outputs, in host memory or the device's.

        Raises:
            NotFoundError: The forward is not kept.
            AbortedError: Its gradients were computed already.
            InvalidArgumentError: The gradient is not like the outputs.
        """
        forward = self.forwards.get(forward_id)
        saved = forward.saved
        assert saved is not None
        inputs = BackwardInputs(outputs_gradient=outputs_gradient, **saved.arrays)
        return BackwardCall(forward, check_call(BACKWARD, inputs, saved.attributes))

    async def backward(
        self,
        call: BackwardCall,
        *,
        retain: bool,
        on_host: bool,
        deliver: Callable[[BackwardOutputs], object] = _ignore,
        room: Account | None = None,
    ) -> Computed[BackwardOutputs]:
        """Computes the gradients of a forward, which is kept if this fails.

        Args:
            call: What was checked.
            retain: Whether another backward of it may follow.
            on_host: Whether the gradients are wanted in host memory.
            deliver: Gets the gradients while the forward is still kept; may raise.
            room: As `OpRunner.run` takes it.

        Raises:
            ResourceExhaustedError: The gradients do not fit.
            MemoryError: The device has no memory left.
        """
        with self.forwards.use(call.forward, retain=retain):
            computed = await self._runner.run(call.checked, on_host=on_host, room=room)
            deliver(computed.outputs)
        return computed

    async def run_updates(self, forward_ids: Sequence[str]) -> int:
        """Moves the averages by forwards, each once; by all whose updates wait if none are named.

        Returns:
            How many were run now.
        """
        count = 0
        async with self._changing:
            for forward in self.forwards.pending(forward_ids):
                # Many small updates in a row must not keep others waiting.
                await asyncio.sleep(0)
                # It may have been released meanwhile.
                if forward.pending is not None:
                    with self.forwards.hold(forward):
                        await self._update(forward.pending)
                    self.forwards.settle(forward)
                    count += 1
        return count

    def get_variables(self, names: Collection[str]) -> dict[str, Array]:
        """Returns variables of one moment, all if none are named.

        Raises:
            NotFoundError: The layer has no variable of a name, or not yet.
        """
        found = {} if self.variables is None else self.variables.by_name()
        for index, name in enumerate(names):
            self._check_name(name, found, f"names[{index}]")
        return {name: found[name] for name in names} or found

    async def set_variables(self, values: Mapping[str, Array]) -> None:
        """Sets variables, all at once.

        Args:
            values: By name; nobody may write to them afterwards.

        Raises:
            NotFoundError: The layer has no variable of a name, or not yet.
            InvalidArgumentError: A value has another dtype or shape than its variable.
        """
        found = {} if self.variables is None else self.variables.by_name()
        for index, (name, value) in enumerate(values.items()):
            self._check_name(name, found, f"variables[{index}].name")
            expected = found[name]
            if value.dtype != expected.dtype or tuple(value.shape) != tuple(expected.shape):
                raise InvalidArgumentError(
                    f"expected {expected.dtype} of shape {list(expected.shape)} for {name}, "
                    f"got {value.dtype} of shape {list(value.shape)}",
                    field=f"variables[{index}].tensor",
                )
        async with self._changing:
            assert self.variables is not None
            self.variables = self.variables.with_values(values)

    def close(self) -> None:
        """Lets go of everything. Calls under way end as if it were still there."""
        self._closed = True
        self.forwards.close()
        self._account.settle(0)

    async def _ready(self, channels: int, dtype: np.dtype[Any]) -> Variables:
        """Returns the variables, created if they are not there yet."""
        if self.variables is None:
            async with self._changing:
                if self._closed:
                    raise AbortedError(f"layer {self.name!r} was deleted")
                if self.variables is None:
                    num_bytes = variable_bytes(self.config, channels, dtype)
                    self._account.grow(num_bytes)
                    try:
                        self.variables = await self._compute.run(
                            num_bytes, initial_variables, self.config, channels, dtype
                        )
                    except BaseException:
                        self._account.settle(self.config.num_bytes)
                        raise
        variables = self.variables
        shared = f"Trying to share variable {self.name}/{next(iter(variables.by_name()))}, but specified"
        if variables.num_channels != channels:
            raise InvalidArgumentError(
                f"{shared} shape ({channels},) and found shape ({variables.num_channels},). "
                f"Expected {variables.num_channels} channels",
                field="inputs",
            )
        if variables.dtype != dtype:
            raise InvalidArgumentError(
                f"{shared} dtype {dtype} and found dtype {variables.dtype}. "
                f"Such inputs need variables of {dtype}, and the layer has {variables.dtype}",
                field="inputs",
            )
        return variables

    def _drawn(self, given: CallInputs, call: ForwardCall, forward_id: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Returns the adjustment of a forward where the layer draws it: the same one for a retry."""
        adjustment = self.config.adjustment
        if adjustment is None or not call.is_training:
            return None
        fate = self.forwards.fate(forward_id)
        if fate.draw is None:
            fate.draw = self._num_draws
            self._num_draws += 1
        x, data_format = given.inputs, self.config.data_format
        channels = x.shape[channel_axis(len(x.shape), data_format)]
        shape = channel_shape(len(x.shape), data_format, channels)
        return draw_adjustment(adjustment, fate.draw, shape, widened(x.dtype))

    def _adopt(self, variables: Variables, moved: Mapping[str, Array]) -> None:
        """Keeps copies of variables in the device's memory, unless there are newer values."""
        copies: Any = {name: moved[name] for name in _VARIABLES if name in moved}
        if copies and self.variables is variables:
            self.variables = replace(variables, **copies)

    async def _keep(
        self, forward_id: str, saved: Saved | None, moments: Moments | None, lease: float, reserved: Account | None
    ) -> bool:
        """Keeps a forward, and updates the averages in place; tells whether its updates wait to be run."""
        if saved is not None or moments is not None:
            await self._leave(forward_id, saved, moments, lease, reserved)
        kept = self.forwards.find(forward_id)
        return kept is not None and kept.pending is not None

    async def _leave(
        self, forward_id: str, saved: Saved | None, moments: Moments | None, lease: float, reserved: Account | None
    ) -> None:
        fate = self.forwards.fate(forward_id)
        is_new = moments is not None and not fate.was_counted
        pending = None if self.config.in_place_updates or not is_new else moments
        with self.forwards.room(saved, pending, reserved) as room:
            if moments is not None and self.config.in_place_updates:
                async with self._changing:
                    # A call with the same id may have come first.
                    if not fate.was_counted:
                        await self._update(moments)
                        fate.was_counted = True
            fate.was_counted |= is_new
            self.forwards.add(forward_id, room, lease)

    async def _update(self, moments: Moments) -> None:
        """Moves the averages; nobody else changes the variables meanwhile."""
        variables = self.variables
        assert variables is not None
        averages = {name: getattr(variables, name) for name in UpdateOutputs.__dataclass_fields__}
        inputs = UpdateInputs(**averages, batch_mean=moments.mean, batch_variance=moments.variance)
        computed = await self._runner.run(
            check_call(UPDATE, inputs, UpdateAttributes(self.config, moments.implementation)), on_host=False
        )
        changes: Any = {name: array for name, array in vars(computed.outputs).items() if array is not None}
        self.variables = replace(variables, **changes)
        self.num_updates += 1

    def _check_name(self, name: str, found: Collection[str], field: str) -> None:
        if name not in found:
            has = f"it has {', '.join(found)}" if found else "its variables are created by the first forward"
            raise NotFoundError(f"layer {self.name!r} has no variable {name!r}; {has}", field=field)


def _saved_arrays(inputs: Mapping[str, Array | None], outputs: ForwardOutputs, plan: ForwardPlan) -> dict[str, Array]:
    """Returns what a backward needs, by the names of BackwardInputs."""
    names = ["inputs", "beta", "gamma"]
    names += ["batch_weights"] if plan.uses_weights else []
    names += ["adjustment_scale", "adjustment_bias"] if plan.uses_adjustment else []
    arrays = {name: inputs[name] for name in names} | {name: getattr(outputs, name) for name in _SAVED}
    return {name: array for name, array in arrays.items() if array is not None}
