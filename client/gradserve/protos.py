"""The protos, the contract for every language: their folder on this machine.

`python -m gradserve.protos` prints the folder:

    protoc --proto_path="$(python -m gradserve.protos)" --cpp_out=. gradserve/v1/accumulator_service.proto
"""

import sys
from pathlib import Path

_INSTALLED = Path(__file__).with_name("proto")
_CHECKOUT = Path(__file__).parents[2] / "proto"


def folder() -> Path:
    """Returns the import path for protoc, buf and grpcurl: the folder with the protos as `gradserve/v1/*.proto`."""
    return _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


if __name__ == "__main__":
    sys.stdout.write(f"{folder()}\n")
