"""What optimizers and schedulers remember arrives at a worker that joins as it was, or is refused by name."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import gradserve
from gradserve.torch import average_gradients, broadcast_parameters
from gradserve.torch.state import TrainingState, put_together, taken_apart
from gradserve.training import State
from gradserve.training.state import Arrived, Carried
from tests.torch.seeds import seeded


class Marked(torch.Tensor):
    """A tensor of a class of its own, with memory of its own."""


class Scaled(torch.Tensor):
    """A tensor that is made of others: codes and their scale, as those of 8-bit optimizers are."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "Scaled":
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"signed": True}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], more: Any, size: Any, stride: Any) -> "Scaled":
        assert more == {"signed": True}
        assert (size, stride) == (inner["codes"].shape, inner["codes"].stride())
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Knows nothing but to pass itself on."""
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(function))


@dataclass
class Preconditioner:
    """What Shampoo remembers of a dimension."""

    factor: torch.Tensor
    order: int


def passed_on(state: State) -> State:
    return Arrived.of(Carried.of(state).gradient()).state


def shown(value: Any) -> Any:
    """Returns a value so that it can be compared: with classes and dtypes, tensors as bytes."""
    if isinstance(value, Scaled):
        return "Scaled", shown(value.codes), shown(value.scale)
    if isinstance(value, torch.Tensor):
        plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        bits = plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()
        return type(value).__name__, plain.dtype, tuple(plain.shape), bits
    if isinstance(value, torch.Generator):
        return "Generator", shown(value.get_state())
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.tolist()
    if isinstance(value, dict):
        return type(value).__name__, [(shown(key), shown(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [shown(each) for each in value]
    if isinstance(value, Preconditioner):
        return "Preconditioner", shown(value.factor), value.order
    return type(value).__name__, repr(value)


VALUES: dict[str, Callable[[], Any]] = {
    "lists of tensors": lambda: {"GG": [torch.eye(2), torch.eye(3)], "Q": [None, torch.ones(2, 2)]},
    "dicts of tensors": lambda: {"step": torch.tensor(3.0), "block": {"q": {0: torch.arange(3)}, "a/b": torch.ones(1)}},
    "names that become one": lambda: {"a": {"b": torch.zeros(1)}, "a/b": torch.ones(1), "a b": torch.full((1,), 2.0)},
    "a dataclass with tensors": lambda: {"left": Preconditioner(torch.eye(2), 2)},
    "complex numbers": lambda: {
        "phase": torch.tensor([1 + 2j, float("nan")]),
        "d": torch.zeros(2, dtype=torch.complex128),
    },
    "conjugates": lambda: {"phase": torch.tensor([1 + 2j]).conj(), "imag": torch.tensor([1 + 2j]).conj().imag},
    "bfloat16": lambda: {"m": torch.tensor([1.5, -0.0]).bfloat16()},
    "fp8": lambda: {"m": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn), "v": torch.ones(()).to(torch.float8_e5m2)},
    "integers": lambda: {"n": torch.tensor([(1 << 62) + 1, -1]), "code": torch.arange(256).to(torch.uint8)},
    "unsigned integers": lambda: {"n": torch.tensor([1, 2]).to(torch.uint16)},
    "flags": lambda: {"frozen": torch.tensor([True, False])},
    "tensors that are views": lambda: {"m": torch.arange(6.0).reshape(2, 3).T, "one": torch.ones(1).expand(3)},
    "no elements": lambda: {"m": torch.zeros(0, 3)},
    "a class of tensors": lambda: {"m": torch.ones(2).as_subclass(Marked)},
    "a parameter": lambda: {"z": torch.nn.Parameter(torch.ones(2), requires_grad=False)},
    "tensors made of others": lambda: {"m": Scaled(torch.tensor([3, -4], dtype=torch.int8), torch.tensor(0.5))},
    "a generator": lambda: {"noise": torch.Generator().manual_seed(7)},
    "texts as keys": lambda: {"global": {"loss": 0.25}, 0: {"m": torch.ones(1)}},
    "types of PyTorch": lambda: {"shape": torch.Size([2, 3]), "dtype": torch.bfloat16, "layout": torch.strided},
    "arrays of NumPy": lambda: {"history": np.arange(4)},
    "what is no tensor": lambda: {"betas": (0.9, 0.999), "milestones": Counter({4: 1}), "order": OrderedDict(a=1)},
}


@pytest.mark.parametrize("made", list(VALUES.values()), ids=list(VALUES))
def test_values_with_tensors(made: Callable[[], Any]) -> None:
    arrays: dict[str, Any] = {}
    encoded = taken_apart(made(), "optimizer", arrays)
    assert all(each.startswith("optimizer/") for each in arrays)
    received = passed_on(State(arrays, {"x": encoded}))
    assert shown(put_together(received.metadata["x"], received.tensors)) == shown(made())


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a function": (lambda: {0: {"f": print}}, r"optimizer\[0\]\['f'\] is <built-in function print>"),
    "sparse tensors": (
        lambda: {0: {"m": torch.eye(2).to_sparse()}},
        r"optimizer\[0\]\['m'\].* layout torch.sparse_coo",
    ),
    "tensors without memory": (lambda: {"m": torch.ones(2, device="meta")}, r"optimizer\['m'\].* device meta"),
    "half complex numbers": (lambda: {"m": torch.zeros(1, dtype=torch.chalf)}, r"optimizer\['m'\].* torch.complex32"),
    "tensors as keys": (lambda: {torch.ones(1): 1}, "key tensor.* of optimizer"),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("made", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_values_that_cannot_travel(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=message):
        taken_apart(made(), "optimizer", {})


def test_classes_of_tensors_that_are_not_loaded() -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="class 'Popen' of module 'subprocess'"):
        put_together({"": ["subclass", ["subprocess", "Popen", "x"]]}, {"x": np.zeros(1)})


class Remembering(torch.optim.SGD):
    """An optimizer that remembers, from its first step on, what a test wants of each parameter."""

    def __init__(self, parameters: Any, made: Callable[[], Any]) -> None:
        super().__init__(parameters, lr=0.1)
        self.made = made

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = self.made()


# Of these, PyTorch itself changes the types of others when it loads them.
@pytest.mark.parametrize(
    "title", ["lists of tensors", "dicts of tensors", "complex numbers", "bfloat16", "fp8", "integers"]
)
def test_an_optimizer_remembers_the_same_types(title: str) -> None:
    """PyTorch alone would convert what is floating point to the dtype of the parameter."""
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    mine, theirs = (Remembering(model.parameters(), VALUES[title]) for model in models)
    models[0](torch.ones(1, 2)).sum().backward()
    mine.step()
    TrainingState(models[1], theirs).load(passed_on(TrainingState(models[0], mine).captured()))
    assert shown(theirs.state_dict()) == shown(mine.state_dict())


Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Schedule] = {
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [4, 4, 7]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=4),
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": schedulers.PolynomialLR,
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.5, 20),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 0.2, 2),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.95),
    "SWALR": lambda o: SWALR(o, 0.05),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=2), schedulers.MultiStepLR(o, [2, 4])], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(o, 0.9), schedulers.MultiStepLR(o, [4])]
    ),
}


@pytest.mark.parametrize("schedule", list(SCHEDULES.values()), ids=list(SCHEDULES))
def test_a_joiner_has_the_learning_rates_of_the_others(schedule: Schedule) -> None:
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    both = [schedule(optimizer) for optimizer in optimizers]
    states = [TrainingState(*each) for each in zip(models, optimizers, both, strict=True)]

    def rates(which: int, number: int) -> list[float]:
        seen = []
        for _ in range(number):
            optimizers[which].step()
            both[which].step()
            seen.append(float(optimizers[which].param_groups[0]["lr"]))
        return seen

    first = rates(0, 2)
    states[1].load(passed_on(states[0].captured()))
    then = rates(0, 8)
    assert rates(1, 8) == then
    assert len({*first, *then}) > 1


def test_a_schedule_that_cannot_travel_is_named() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedulers.StepLR(optimizer, 3)
    scheduler.warm_up = lambda: 0.5
    with pytest.raises(gradserve.InvalidArgumentError, match=r"scheduler\['warm_up'\] is <function"):
        TrainingState(model, optimizer, scheduler).captured()


def test_buffers_of_another_dtype_are_named() -> None:
    models = [torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)]
    models[1].num_batches_tracked = torch.zeros(())
    with pytest.raises(gradserve.InvalidArgumentError, match=r"dtype of 'buffers/num_batches_tracked'.*float32.*int64"):
        TrainingState(models[1]).load(passed_on(TrainingState(models[0]).captured()))


def test_frozen_weights_of_any_kind() -> None:
    def made(value: int) -> torch.nn.Module:
        model = torch.nn.Linear(2, 1)
        model.base = torch.nn.Parameter(torch.full((2,), float(value)).to(torch.float8_e4m3fn), requires_grad=False)
        codes = torch.full((2,), value, dtype=torch.int8)
        model.quantized = torch.nn.Parameter(Scaled(codes, torch.tensor(0.5)), requires_grad=False)
        model.register_buffer("phase", torch.full((2,), value * 1j))
        return model

    first, second = made(1), made(2)
    TrainingState(second).load(passed_on(TrainingState(first).captured()))
    for name, each in first.state_dict().items():
        assert shown(second.state_dict()[name]) == shown(each)


class Adapted(torch.nn.Module):
    """A model with a frozen base, a trained part, and buffers of several kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.base = torch.nn.Linear(4, 3).requires_grad_(False)
            self.lora = torch.nn.Linear(4, 3)
        self.register_buffer("freqs_cis", torch.full((4,), seed * 1j), persistent=False)
        self.register_buffer("seen", torch.full((1 + seed,), float(seed)))
        self.register_buffer("scale", torch.full((2,), float(seed)))
        self.cache = torch.nn.Module()
        self.cache.register_buffer("keys", torch.full((1 + seed,), float(seed)), persistent=False)
        self.cache.register_buffer("length", torch.tensor(seed))


LORA = {"parameters/lora.weight", "parameters/lora.bias"}
BASE = {"parameters/base.weight", "parameters/base.bias"}
PERSISTENT = {"buffers/seen", "buffers/scale", "buffers/cache.length"}
LEFT_OUT: dict[str, tuple[dict[str, Any], set[str]]] = {
    "buffers that are not persistent": ({}, LORA | BASE | PERSISTENT),
    "a buffer": ({"leave_out": ["seen"]}, LORA | BASE | PERSISTENT - {"buffers/seen"}),
    "frozen parameters": ({"send_frozen": False}, LORA | PERSISTENT),
    "patterns": ({"leave_out": ["base.*", "cache.*"]}, LORA | {"buffers/seen", "buffers/scale"}),
    "both": ({"send_frozen": False, "leave_out": ("s*", "cache.length")}, LORA),
}


@pytest.mark.parametrize(("options", "expected"), list(LEFT_OUT.values()), ids=list(LEFT_OUT))
def test_what_travels(options: dict[str, Any], expected: set[str]) -> None:
    """What does not stays as it is at the worker that joins."""
    first, second, unchanged = Adapted(1), Adapted(1), Adapted(2)
    second.load_state_dict(Adapted(2).state_dict() | {"seen": torch.tensor([2.0, 2.0])})
    state = TrainingState(first, **options).captured()
    assert set(state.tensors) == expected
    TrainingState(second, **options).load(passed_on(state))
    for prefix, mine, theirs, own in (
        ("parameters/", first.named_parameters(), second.named_parameters(), dict(unchanged.named_parameters())),
        ("buffers/", first.named_buffers(), second.named_buffers(), {}),
    ):
        for (name, one), (_, other) in zip(mine, theirs, strict=True):
            if prefix + name in expected:
                assert torch.equal(one, other), name
            elif name in own:
                assert torch.equal(other, own[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leave_out": ["lora.*"]}, r"'lora.\*', which fits trained parameter 'lora.bias'"),
        ({"leave_out": ["cach"]}, "'cach', which fits nothing of the model"),
        ({"leave_out": "seen"}, "expected names of frozen parameters and buffers for leave_out, got 'seen'"),
        ({"leave_out": [1]}, "for leave_out, got"),
        ({"send_frozen": "no"}, "send_frozen"),
    ],
)
def test_mistakes_in_what_is_left_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=message):
        TrainingState(Adapted(1), **options)


def test_workers_that_leave_out_different_tensors() -> None:
    state = passed_on(TrainingState(Adapted(1), leave_out=["seen"]).captured())
    with pytest.raises(
        gradserve.InvalidArgumentError, match=r"expected \[\], got \['buffers/scale'\].* the same .*leave_out"
    ):
        TrainingState(Adapted(1), leave_out=["scale", "seen"]).load(state)


def test_a_run_with_buffers_that_stay_with_their_workers(server_address: str, name: str) -> None:
    """They differ in shape and dtype, and the second worker joins."""
    trained: list[Adapted] = []
    for seed in (1, 2):
        model = Adapted(seed)
        optimizer = torch.optim.AdamW(model.lora.parameters())
        with (
            gradserve.connect(server_address) as client,
            average_gradients(
                client, model, optimizer, num_required=1, name=name, send_frozen=False, leave_out=["seen"]
            ) as averaging,
        ):
            assert (averaging.step == 0) is (seed == 1)
            if averaging.step:
                assert all(map(torch.equal, trained[0].lora.parameters(), model.lora.parameters()))
                assert torch.equal(model.scale, torch.ones(2))
                assert torch.equal(model.base.weight, Adapted(2).base.weight)
            model.lora(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            trained.append(model)


def test_broadcast_parameters_leaves_out_the_same(server_address: str, name: str) -> None:
    with gradserve.connect(server_address) as client:
        for seed in (1, 2):
            model = Adapted(seed)
            received = broadcast_parameters(client, model, name=name, send_frozen=False, leave_out=["seen"])
            assert received is (seed == 2)
        assert torch.equal(model.lora.weight, Adapted(1).lora.weight)
        assert torch.equal(model.base.weight, Adapted(2).base.weight)
