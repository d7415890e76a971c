"""The example of the documentation is a test that passes."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.servers.polling import PATIENCE_SECONDS

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"

OF_OUR_TESTS = ("GRADSERVE_RESTART_PATIENCE", "PYTEST_PLUGINS")


def test_the_example_passes(tmp_path: Path) -> None:
    for name, block in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(block)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    plugins = ("asyncio", "xdist", "timeout", "hypothesispytest")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(f"-pno:{each}" for each in plugins), "-pno:cacheprovider", tmp_path],
        env={key: value for key, value in os.environ.items() if key not in OF_OUR_TESTS}
        | {"GRADSERVE_WARM_UP": "false"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert "6 passed" in done.stdout, done.stdout + done.stderr
