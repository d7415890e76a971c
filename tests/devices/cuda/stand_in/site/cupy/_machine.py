"""The GPUs of this process."""

from tests.devices.cuda.stand_in.gpu.ipc import Ipc
from tests.devices.cuda.stand_in.gpu.machine import Machine
from tests.devices.cuda.stand_in.gpu.settings import settings_of_process

MACHINE = Machine(settings_of_process())
IPC = Ipc(MACHINE)
