"""The rule of every method: which role it needs, and where the request names the container."""

from collections.abc import Mapping
from dataclasses import dataclass

from gradserve_server.security.roles import Role


@dataclass(frozen=True)
class Rule:
    """The rule of one method.

    Attributes:
        role: The role that its caller needs; None: anybody may call it, without credentials too.
        containers: The paths of the fields of the request that may name the container: the first whose message is set
            counts. Without any, the role in any container is enough.
        opening: The role that is enough to open what exists, for a method that creates what does not; for creations and
            takes, also for what belongs to another: `AccumulatorRegistry.belongs_to_another`. None: `role`.
        for_unknown_users: Whether somebody at a Unix socket, whose user is not known yet, may call it.
    """

    role: Role | None
    containers: tuple[str, ...] = ()
    opening: Role | None = None
    for_unknown_users: bool = False


_ANYBODY = Rule(None)
_WORKER_ANYWHERE = Rule(Role.WORKER)
_ACCUMULATOR = ("accumulator.container",)
_LAYER = ("layer.container",)
_LIST = ("container",)

RULES: Mapping[str, Rule] = {
    "grpc.health.v1.Health.Check": _ANYBODY,
    "grpc.health.v1.Health.List": _ANYBODY,
    "grpc.health.v1.Health.Watch": _ANYBODY,
    "grpc.reflection.v1.ServerReflection.ServerReflectionInfo": _WORKER_ANYWHERE,
    "grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo": _WORKER_ANYWHERE,
    "gradserve.v1.AccumulatorService.ApplyGradient": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.CreateAccumulator": Rule(Role.CHIEF, _ACCUMULATOR, opening=Role.WORKER),
    "gradserve.v1.AccumulatorService.DeleteAccumulator": Rule(Role.CHIEF, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.EndEpoch": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.ForgetGradients": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.GetAccumulator": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.GetNumAccumulated": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.ListAccumulators": Rule(Role.WORKER, _LIST),
    "gradserve.v1.AccumulatorService.PushPull": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.ReadAverage": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.ReduceGradients": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.SetGlobalStep": Rule(Role.CHIEF, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.StageGradient": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.TakeGradient": Rule(Role.CHIEF, _ACCUMULATOR, opening=Role.WORKER),
    "gradserve.v1.BatchNormLayerService.BatchNormBackward": Rule(Role.WORKER, _LAYER),
    "gradserve.v1.BatchNormLayerService.BatchNormForward": Rule(Role.WORKER, _LAYER),
    "gradserve.v1.BatchNormLayerService.CreateBatchNormLayer": Rule(Role.CHIEF, _LAYER, opening=Role.WORKER),
    "gradserve.v1.BatchNormLayerService.DeleteBatchNormLayer": Rule(Role.CHIEF, _LAYER),
    "gradserve.v1.BatchNormLayerService.DescribeBatchNormLayer": Rule(Role.WORKER, _LAYER),
    "gradserve.v1.BatchNormLayerService.GetBatchNormVariables": Rule(Role.WORKER, _LAYER),
    "gradserve.v1.BatchNormLayerService.ListBatchNormLayers": Rule(Role.WORKER, _LIST),
    "gradserve.v1.BatchNormLayerService.ReleaseBatchNormForwards": Rule(Role.WORKER, _LAYER),
    "gradserve.v1.BatchNormLayerService.RunBatchNormUpdates": Rule(
        Role.CHIEF, ("layer.container", "collection.container")
    ),
    "gradserve.v1.BatchNormLayerService.SetBatchNormVariables": Rule(Role.CHIEF, _LAYER),
    "gradserve.v1.GradientOpsService.CudnnRNN": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.CudnnRNNBackprop": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.CudnnRNNCanonicalToParams": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.CudnnRNNParamsSize": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.CudnnRNNParamsToCanonical": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.FusedBatchNorm": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.FusedBatchNormGrad": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.GRUBlockCell": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.GRUBlockCellGrad": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.LayerNorm": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.LayerNormGrad": _WORKER_ANYWHERE,
    "gradserve.v1.LeaseService.EndClientLease": _WORKER_ANYWHERE,
    "gradserve.v1.LeaseService.HoldClientLease": _WORKER_ANYWHERE,
    "gradserve.v1.ServerService.GetServerInfo": _WORKER_ANYWHERE,
    "gradserve.v1.ServerService.GetServerStatus": _WORKER_ANYWHERE,
    "gradserve.v1.SocketService.IssueTicket": Rule(Role.WORKER, for_unknown_users=True),
    "gradserve.v1.TensorService.DeleteTensors": _WORKER_ANYWHERE,
    "gradserve.v1.TensorService.GetTensors": _WORKER_ANYWHERE,
    "gradserve.v1.TensorService.ListTensors": _WORKER_ANYWHERE,
    "gradserve.v1.TensorService.PutTensors": _WORKER_ANYWHERE,
    "gradserve.v1.TensorService.ReadTensors": _WORKER_ANYWHERE,
    "gradserve.v1.TensorService.StoreTensors": _WORKER_ANYWHERE,
}
"""The rules by the full names of methods. A method without a rule is refused.

Tensors have no container: each identity reaches its own. ListTensors lists those that its caller reaches, which are all
tensors of the server for an admin of all containers.
"""
