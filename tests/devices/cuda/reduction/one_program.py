"""All kernels of the reduction in one program: compilers take most of their time to begin."""

import functools

from gradserve_server.devices.cuda.programs import CompiledProgram, Program
from gradserve_server.devices.cuda.reduction import KEYS, program
from tests.devices.cuda.emulation.device import EmulatedDevice


@functools.cache
def all_kernels() -> Program:
    programs = [program(key) for key in KEYS]
    instances = [line for each in programs for line in each.source.splitlines() if line.startswith('extern "C"')]
    common = programs[0].source.partition('extern "C"')[0]
    kernels = tuple(name for each in programs for name in each.kernels)
    assert len(instances) == len(kernels)
    return Program("all sums", "\n".join([common, *instances]), kernels)


class ReductionDevice(EmulatedDevice):
    """An emulated device that has the kernels of the reduction compiled at once."""

    def compiled(self, program: Program) -> CompiledProgram:
        assert set(program.kernels) < set(all_kernels().kernels)
        return super().compiled(all_kernels())
