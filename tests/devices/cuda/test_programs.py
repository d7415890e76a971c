"""What the CUDA kernels of all families have in common."""

from pathlib import Path

import numpy as np
import pytest

from gradserve_server.devices.cuda.programs import (
    CompiledProgram,
    Launch,
    Limits,
    Program,
    Programs,
    Struct,
    element_launch,
    instance,
)
from tests.devices.cuda.emulation.device import EmulatedDevice

LIMITS = Limits(num_multiprocessors=2, shared_bytes=0)


def test_an_instance_of_a_template() -> None:
    assert instance("add_float32", "256, 2", "Arguments<float>", "add<float, 4>") == (
        'extern "C" __global__ void __launch_bounds__(256, 2) add_float32'
        "(const __grid_constant__ Arguments<float> arguments) { add<float, 4>(arguments); }"
    )


@pytest.mark.parametrize(
    ("count", "width", "blocks"), [(1, 1, 1), (256, 1, 1), (257, 1, 2), (257, 2, 1), (1 << 40, 8, 32)]
)
def test_blocks_for_elements(count: int, width: int, blocks: int) -> None:
    assert element_launch("add", count, LIMITS, width=width) == Launch("add", (blocks, 1), 256, 0)


def test_a_struct_has_addresses_then_numbers() -> None:
    struct = Struct(("x", "out"), ("count",))
    argument = struct.of({"out": 2, "x": 1, "other": 7}, {"count": -3, "rows": 9})
    assert argument.tobytes() == np.array([1, 2, -3], np.int64).tobytes()


def test_floats_of_a_struct_come_last() -> None:
    struct = Struct(("x",), ("count",), ("epsilon",))
    argument = struct.of({"x": 1}, {"epsilon": 0.1, "count": 2})
    assert argument.tobytes() == np.array([1, 2], np.int64).tobytes() + np.array([0.1]).tobytes()


class Device(EmulatedDevice):
    """Notes what it compiles."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.names: list[str] = []

    def compiled(self, program: Program) -> CompiledProgram:
        return _Compiled(program.name, self.names)


class _Compiled:
    def __init__(self, program: str, names: list[str]) -> None:
        self._program = program
        self._names = names

    def prepare(self, kernel: str) -> None:
        self._names.append(f"{self._program}.{kernel}")

    def launch(self, launch: Launch, arguments: object) -> None:
        raise AssertionError("nothing is launched here")


def programs(device: Device) -> Programs[str]:
    return Programs(device, lambda key: Program(key, "", ("x", "y")), ("a", "b"))


def test_a_program_compiles_nothing_before_it_is_asked_for() -> None:
    device = Device()
    own = programs(device)
    assert own["b"] is own["b"]
    assert device.names == []
    own.make_ready("b")
    assert device.names == ["b.x", "b.y"]


@pytest.mark.parametrize("most", range(5))
def test_preparing_ends_between_two_kernels(most: int) -> None:
    device = Device()
    programs(device).prepare(lambda: len(device.names) == most)
    assert device.names == ["a.x", "a.y", "b.x", "b.y"][:most]


def test_a_kernel_is_compiled_without_the_others_of_its_program() -> None:
    instances = {name: instance(name, "256", "Arguments", f"{name}_of") for name in ("add", "add_more")}
    program = Program("sums", "\n".join(["struct Arguments {};", *instances.values()]), tuple(instances))
    for name, definition in instances.items():
        assert program.source_of(name) == f"struct Arguments {{}};\n{definition}"
