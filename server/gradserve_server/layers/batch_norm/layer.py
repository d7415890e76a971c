"""A batch normalization layer, which many workers call concurrently."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Array
from gradserve_server.errors import AbortedError, InvalidArgumentError
from gradserve_server.layers.batch_norm.computation import BACKWARD, FORWARD, UPDATE, UpdateAttributes, UpdateInputs
from gradserve_server.layers.batch_norm.config import BatchNormConfig, IgnoredArgument
from gradserve_server.layers.batch_norm.events import Event, Moments, Saved
from gradserve_server.layers.batch_norm.forwards import REMEMBERED_FORWARDS, Forward, Forwards
from gradserve_server.layers.batch_norm.journal import LayerJournal, LayerJournals
from gradserve_server.layers.batch_norm.spec import (
    BackwardAttributes,
    BackwardInputs,
    BackwardOutputs,
    BackwardPlan,
    CallInputs,
    ForwardAttributes,
    ForwardInputs,
    Implementation,
    channel_axis,
    channel_shape,
    plan_forward,
    variables_for,
)
from gradserve_server.layers.batch_norm.state import LayerChanges, LayerState
from gradserve_server.layers.batch_norm.variables import (
    MovingAverages,
    Variables,
    check_name,
    check_shared,
    check_values,
    initial_variables,
    variable_bytes,
)
from gradserve_server.limits import MAX_ID_BYTES, check_length
from gradserve_server.ops.runner import CheckedCall, Computed, OpRunner, arrays_of, check_call, with_arrays
from gradserve_server.resources.budget import Budget, Purpose
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.memory import Memory, Room, Sizes
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.tensors.spec import widened

_LOSSES = ("beta_regularization_loss", "gamma_regularization_loss")
_LOSS_BYTES = 8
"""The most bytes of one."""


async def _ignore(_results: object) -> None:
    pass


@dataclass(frozen=True)
class ForwardCall:
    """The options of a forward.

    Attributes:
        forward_id: The id of the forward; empty to have the layer make one.
        keep_for_backward: Whether to keep what a backward needs; None for the value of is_training.
        lease: Seconds without use after which the kept data is dropped.
        released: Earlier forwards that need no backward any more.
    """

    is_training: bool = True
    forward_id: str = ""
    keep_for_backward: bool | None = None
    lease: float = 600.0
    released: Sequence[str] = ()


@dataclass(frozen=True)
class ForwardResult:
    """The result of a forward.

    Attributes:
        outputs: The outputs, in host memory if requested, else in the device's. Read-only, as the layer may keep them.
        moved: The inputs that were copied to the device's memory, by name.
        forward_id: The id of the forward; empty if neither backward nor update can follow.
        regularization_losses: The losses by variable.
        drawn: Scale and bias of the adjustment, if it was drawn.
    """

    outputs: Array
    moved: Mapping[str, Array]
    forward_id: str
    has_pending_updates: bool
    implementation: Implementation
    regularization_losses: Mapping[str, float]
    ignored: tuple[IgnoredArgument, ...]
    drawn: tuple[NDArray[Any], NDArray[Any]] | None


@dataclass(frozen=True)
class BackwardCall:
    """A checked backward of a forward that is kept."""

    forward: Forward
    checked: CheckedCall[BackwardInputs, BackwardAttributes, BackwardOutputs, BackwardPlan]


@dataclass(kw_only=True, eq=False)
class LayerEnvironment:
    """Parts that all layers of a server share.

    Attributes:
        runner: Runs their computations.
        compute: Runs their initializers.
        memory: The memory of the server.
        handles: The budget of forwards that they keep.
        clock: A monotonic clock, in seconds.
        new_id: A source of unique ids.
        new_seed: A source of seeds.
        journals: Creates the journals of durable layers; None without a state directory.
        remembered: The number of latest forwards whose outcome each layer remembers.
    """

    runner: OpRunner
    compute: Compute
    memory: Memory
    handles: Budget
    clock: Callable[[], float]
    new_id: Callable[[], str]
    new_seed: Callable[[], int]
    journals: LayerJournals | None = None
    remembered: int = REMEMBERED_FORWARDS


class BatchNormLayer:
    """A batch normalization layer.

    Its variables are a snapshot that is replaced as a whole: a computation keeps the one that it began with. Changes
    of the variables wait for each other, in order of arrival.

    Every change is an event: it is computed, which can fail; then `LayerChanges` decides it, the journal takes the
    event, and the state applies it, which cannot fail.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        environment: LayerEnvironment,
        key: ResourceKey,
        config: BatchNormConfig,
        *,
        incarnation: str,
        creation_id: str,
        journal: LayerJournal | None,
        on_presence: Callable[[bool], object],
    ) -> None:
        """Creates a layer without variables.

        Args:
            environment: What the layer shares with the other layers of the server.
            key: The name of the layer, the container in which everything counts, and the owner of the variables.
            config: A checked configuration, with all its seeds.
            incarnation: The id that tells the layer from others of the same name.
            creation_id: The id of the call that created the layer.
            journal: Takes every change before it takes effect; None if nothing is durable.
            on_presence: See `Forwards`.

        Raises:
            ResourceExhaustedError: There is no memory for the values in the configuration.
        """
        self.name = key.name
        self.config = config
        self.incarnation = incarnation
        self.creation_id = creation_id
        self.forwards = Forwards(
            environment.memory,
            environment.handles,
            environment.clock,
            remembered=environment.remembered,
            on_presence=on_presence,
            container=key.container,
        )
        self._environment = environment
        self._state = LayerState(self.forwards)
        self._journal = journal
        self._changes = LayerChanges(self._state, None if journal is None else journal.append)
        self._memory = environment.memory
        self._room = self._memory.room(Purpose.LAYERS, key.user, key.container)
        self._room.grow(Sizes(config.num_bytes))
        self._closed = False
        self._changing = asyncio.Lock()
        """Held while a change of the variables is computed from them and applied."""

    @property
    def variables(self) -> Variables | None:
        """The variables as they are now; None until they are created."""
        return self._state.variables

    @property
    def num_updates(self) -> int:
        """The number of updates of the moving averages."""
        return self._state.num_updates

    @property
    def num_bytes(self) -> int:
        """The bytes of the configuration, the variables and what forwards keep."""
        return self._room.used + self.forwards.num_bytes

    async def build(self, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        """Creates the variables for such inputs, or checks that they fit; sizes other than C may be -1.

        Raises:
            InvalidArgumentError: The layer does not accept such inputs.
            ResourceExhaustedError: There is no memory for the variables.
        """
        await self._ready(*variables_for(self.config, dtype, shape))

    async def forward(
        self,
        given: CallInputs,
        call: ForwardCall,
        *,
        on_host: bool,
        deliver: Callable[[Array], Awaitable[object]] = _ignore,
        room: Room | None = None,
    ) -> ForwardResult:
        """Normalises inputs; updates the moving averages if the configuration says so.

        Args:
            given: The inputs, in host or device memory.
            call: The options of the forward.
            on_host: Whether to return the outputs in host memory.
            deliver: A function that gets the outputs before anything changes; may raise.
            room: See `OpRunner.run`; the data kept for a backward also takes its memory from it.

        Raises:
            InvalidArgumentError: An argument is invalid.
            ResourceExhaustedError: There is no memory for the outputs or for the kept data.
            MemoryError: The device has no memory left.
        """
        check_length(call.forward_id, MAX_ID_BYTES, "forward_id")
        saves = call.is_training if call.keep_for_backward is None else call.keep_for_backward
        attributes = ForwardAttributes(self.config, call.is_training, saves)
        forward_id = call.forward_id or self._environment.new_id()
        plan = plan_forward(given, attributes)
        if self.config.adjustment is not None and given.adjustment_scale is not None:
            raise InvalidArgumentError(
                "expected no adjustment, as the layer draws one itself; got one", field="adjustment_scale"
            )
        try:
            variables = await self._ready(plan.geometry.channels, plan.variable_dtype)
        except InvalidArgumentError as error:
            # The request has only inputs that the variables could disagree with.
            raise InvalidArgumentError(error.message, field="inputs") from None
        drawn = await self._drawn(given.inputs, forward_id) if call.is_training else None
        if drawn is not None:
            given = replace(given, adjustment_scale=drawn[0], adjustment_bias=drawn[1])
            plan = plan_forward(given, attributes)
        inputs = ForwardInputs.of(given, variables)
        checked = CheckedCall(FORWARD, inputs, attributes, plan)
        wanted, host_bytes = (("outputs", *_LOSSES), given.inputs.nbytes) if on_host else (_LOSSES, 0)
        host_bytes += len(_LOSSES) * _LOSS_BYTES
        computed = await self._environment.runner.run(checked, on_host=wanted, host_bytes=host_bytes, room=room)
        self._adopt(variables, computed.moved)
        outputs = computed.outputs
        saved = None
        if saves:
            on_device = with_arrays(inputs, computed.moved)
            saved = Saved.of(on_device, outputs, plan, is_training=call.is_training)
        await deliver(outputs.outputs)
        moments = Moments(outputs.batch_mean, outputs.batch_variance, plan.implementation) if plan.has_updates else None
        has_pending = await self._end_forward(forward_id, saved, moments, call, room)
        given_names = arrays_of(given)
        return ForwardResult(
            outputs=outputs.outputs,
            moved={name: array for name, array in computed.moved.items() if name in given_names},
            forward_id=forward_id if saves or has_pending else "",
            has_pending_updates=has_pending,
            implementation=plan.implementation,
            regularization_losses=outputs.regularization_losses,
            ignored=plan.ignored,
            drawn=drawn if plan.uses_adjustment else None,
        )

    def check_backward(self, forward_id: str, outputs_gradient: Array) -> BackwardCall:
        """Checks a backward, which must be computed before anything else happens.

        Args:
            forward_id: The id of the forward.
            outputs_gradient: The gradient with respect to its outputs, in host or device memory.

        Raises:
            NotFoundError: The forward is not kept.
            AbortedError: The gradients of the forward were computed already, or it was released.
            InvalidArgumentError: The gradient does not have the dtype and shape of the outputs.
        """
        forward = self.forwards.get(forward_id)
        saved = forward.saved
        assert saved is not None
        inputs, attributes = saved.backward_inputs(outputs_gradient), saved.backward_attributes(self.config)
        return BackwardCall(forward, check_call(BACKWARD, inputs, attributes))

    async def backward(
        self,
        call: BackwardCall,
        *,
        retain: bool,
        on_host: bool,
        deliver: Callable[[BackwardOutputs], Awaitable[object]] = _ignore,
        room: Room | None = None,
    ) -> Computed[BackwardOutputs]:
        """Computes the gradients of a forward, which is kept if this fails.

        Args:
            call: The checked backward.
            retain: Whether another backward of the forward may follow.
            on_host: Whether to return the gradients in host memory.
            deliver: A function that gets the gradients while the forward is still kept; may raise.
            room: See `OpRunner.run`.

        Raises:
            ResourceExhaustedError: There is no memory for the gradients.
            MemoryError: The device has no memory left.
        """
        forward = call.forward
        saved = forward.saved
        with self.forwards.use(forward, retain=retain):
            computed = await self._environment.runner.run(call.checked, on_host=on_host, room=room)
            await deliver(computed.outputs)
            if not retain:
                await self._changes.end_backward(forward, saved)
        return computed

    async def run_updates(self, forward_ids: Sequence[str]) -> int:
        """Runs the pending updates of these forwards, or of all if none are named, each once.

        Returns:
            The number of updates that were run.
        """
        count = 0
        async with self._changing:
            for forward in self.forwards.pending(forward_ids):
                # Many small updates in a row must not block other tasks.
                await asyncio.sleep(0)
                # The forward may have been released in the meantime.
                if forward.pending is not None:
                    with self.forwards.hold(forward):
                        averages = await self._moved(forward.pending)
                        count += await self._changes.run_updates(forward.forward_id, averages)
                        self._follow_variables()
        return count

    async def release(self, forward_ids: Sequence[str], *, with_updates: bool) -> int:
        """Drops the data for the backwards of forwards, and maybe for their updates; returns how many were kept."""
        return await self._changes.release(forward_ids, with_updates=with_updates)

    async def expire(self) -> int:
        """Forgets unused forwards whose lease has expired; returns how many."""
        return await self._changes.expire()

    def replay(self, event: Event) -> None:
        """Applies an event decided earlier, without the journal; for layers that are not used yet."""
        self._state.replay(event)
        self._settle_memory()

    def restore(self, fill: Callable[[LayerState], object]) -> None:
        """Restores the state from before a restart; for layers that are not used yet.

        Raises:
            ResourceExhaustedError: There is no memory for its variables.
        """
        fill(self._state)
        if self.variables is not None:
            self._room.grow(self._memory.sizes(self.variables.by_name().values()))

    def get_variables(self, names: Collection[str]) -> dict[str, Array]:
        """Returns a snapshot of variables, of all if none are named.

        Raises:
            NotFoundError: The layer has no variable of this name, or not yet.
        """
        found = {} if self.variables is None else self.variables.by_name()
        for index, name in enumerate(names):
            check_name(self.name, name, found, f"names[{index}]")
        return {name: found[name] for name in names} or found

    async def set_variables(self, values: Mapping[str, Array]) -> None:
        """Sets variables, all at once.

        Args:
            values: The values by name, which must not be written to afterwards.

        Raises:
            NotFoundError: The layer has no variable of this name, or not yet.
            InvalidArgumentError: A value has another dtype or shape than its variable.
        """
        check_values(self.name, self.variables, values)
        async with self._changing:
            await self._changes.set_variables(values)
        self._follow_variables()

    def begin(self, lifetime: Lifetime) -> None:
        """Called when the layer becomes visible under its name; `lifetime` is what will end it."""
        if self._journal is not None:
            self._journal.begin(lifetime)

    def close(self) -> None:
        """Releases everything. Calls in flight end as if the layer still existed."""
        self._closed = True
        if self._journal is not None:
            self._journal.close()
        self._changes.close()
        self.forwards.close()
        self._room.settle()

    async def _ready(self, channels: int, dtype: np.dtype[Any]) -> Variables:
        """Returns the variables, and creates them if necessary."""
        if self.variables is None:
            async with self._changing:
                if self._closed:
                    raise AbortedError(f"layer {self.name!r} was deleted", code="GS_DELETED")
                if self.variables is None:
                    num_bytes = variable_bytes(self.config, channels, dtype)
                    self._room.grow(Sizes(num_bytes))
                    try:
                        created = await self._environment.compute.run(
                            num_bytes, initial_variables, self.config, channels, dtype
                        )
                        await self._changes.create_variables(created)
                    except BaseException:
                        self._room.settle(Sizes(0 if self._closed else self.config.num_bytes))
                        raise
        variables = self.variables
        assert variables is not None
        check_shared(self.name, variables, channels, dtype)
        return variables

    async def _drawn(self, x: Array, forward_id: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Returns the adjustment of a training forward if the layer draws it; a retry gets the same one."""
        adjustment, data_format = self.config.adjustment, self.config.data_format
        if adjustment is None:
            return None
        number = await self._changes.draw(forward_id)
        channels = x.shape[channel_axis(x.ndim, data_format)]
        return adjustment.draw(number, channel_shape(x.ndim, data_format, channels), widened(x.dtype))

    def _adopt(self, variables: Variables, moved: Mapping[str, Array]) -> None:
        """Keeps copies of variables in the device's memory, unless the variables have newer values."""
        copies = {name: moved[name] for name in variables.by_name() if name in moved}
        if copies and self.variables is variables:
            self._state.relocate_variables(copies)
            self._follow_variables()

    def _follow_variables(self) -> None:
        """Updates the memory reservations if variables can be on a device."""
        if self._memory.device is not None and not self._closed:
            self._settle_memory()

    def _settle_memory(self) -> None:
        """Updates the memory reservations of the configuration and the variables."""
        variables = () if self.variables is None else self.variables.by_name().values()
        host, device = self._memory.sizes(variables)
        self._room.settle(Sizes(self.config.num_bytes + host, device))

    async def _end_forward(
        self, forward_id: str, saved: Saved | None, moments: Moments | None, call: ForwardCall, reserved: Room | None
    ) -> bool:
        """Keeps the data of a forward, and updates averages in place; returns whether its update is pending."""
        if saved is None and moments is None:
            await self.release(call.released, with_updates=False)
            kept = self.forwards.find(forward_id)
            return kept is not None and kept.pending is not None
        moves = moments if self.config.in_place_updates else None
        waits = None if self.config.in_place_updates or self.forwards.outcome(forward_id).was_counted else moments
        with self.forwards.room(forward_id, saved, waits, reserved):
            async with nullcontext() if moves is None else self._changing:
                averages = None
                # A call with the same id may have come first.
                if moves is not None and not self.forwards.outcome(forward_id).was_counted:
                    averages = await self._moved(moves)
                has_pending = await self._changes.end_forward(
                    forward_id,
                    lease=call.lease,
                    saved=saved,
                    pending=waits,
                    averages=averages,
                    released=call.released,
                )
                self._follow_variables()
                return has_pending

    async def _moved(self, moments: Moments) -> MovingAverages:
        """Returns the moving averages after an update. Called with `_changing` held."""
        assert self.variables is not None
        inputs = UpdateInputs.of(self.variables.averages, moments.mean, moments.variance)
        checked = check_call(UPDATE, inputs, UpdateAttributes(self.config, moments.implementation))
        return (await self._environment.runner.run(checked, on_host=False)).outputs
