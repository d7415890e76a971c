"""Assembles what MkDocs makes the site from.

    python -m deploy.site build/site-pages build/protos.bin

The second file is what protoc makes of the protos, with `--include_source_info`.
"""

import shutil
import sys
from pathlib import Path

from deploy.site.pages import write_pages
from deploy.site.performance.measurements import newest_measurements
from deploy.site.performance.page import write_performance
from deploy.site.reference.commands import write_commands
from deploy.site.reference.python.pages import write_python_reference
from deploy.site.reference.rpc import write_rpc_reference
from deploy.site.reference.settings import write_settings


def main(folder: Path, protos: Path) -> None:
    """Writes all pages into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    write_pages(folder, also=[measurement.file for measurement in newest_measurements()])
    write_performance(folder / "performance.md")
    write_settings(folder / "reference")
    write_commands(folder / "reference")
    write_python_reference(folder / "reference")
    write_rpc_reference(protos, folder / "reference")
    shutil.copytree(Path(__file__).with_name("assets"), folder / "assets")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
