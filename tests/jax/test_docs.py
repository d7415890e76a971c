"""The programs in docs/jax.md run as printed."""

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.servers.polling import PATIENCE_SECONDS

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"
ADDRESS = "server:50051"
PROGRAMS = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if ADDRESS in block]
PRINTED = ["step: 20 loss is small: True\n", "gradient of scale: (3,) moving mean: (3,)\n"]


@pytest.mark.parametrize(("program", "printed"), list(zip(PROGRAMS, PRINTED, strict=True)), ids=range(len(PRINTED)))
def test_programs_run(server_address: str, program: str, printed: str) -> None:
    program = re.sub(r'name="\w+"', f'name="{uuid.uuid4().hex}"', program)  # others use such names, too
    command = [sys.executable, "-c", program.replace(ADDRESS, server_address)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed
