"""Trains one model with five workers: in JavaScript, in C++, with NumPy, with JAX and with PyTorch.

From the top folder of a checkout, with a server running (`make serve`):

    pip install '.[jax,torch]'
    npm install --prefix examples/javascript
    make cpp
    python examples/five_workers/run.py localhost:50051

The server holds the parameters and takes the steps of Adam; each worker has messages of its own, and pushes gradients.
At the end all must have the same parameters: the digests and the bytes that they have saved are compared. The workers
can also be started one by one, on any machines.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import gradserve

HERE = Path(__file__).parent
TOP = HERE.parents[1]
COMMANDS: dict[str, list[str | Path]] = {
    "javascript": ["node", TOP / "examples" / "javascript" / "parameters_worker.js"],
    "cpp": [TOP / "build" / "cpp" / "parameters_worker"],
    "numpy": [sys.executable, HERE / "numpy_worker.py"],
    "jax": [sys.executable, HERE / "jax_worker.py"],
    "pytorch": [sys.executable, HERE / "pytorch_worker.py"],
}


def main() -> None:
    """Runs the workers, and compares what they end with."""
    parser = argparse.ArgumentParser(description="workers in several languages train one model")
    parser.add_argument("address", metavar="HOST:PORT", nargs="?", default="localhost:50051")
    parser.add_argument(
        "--workers", default=",".join(COMMANDS), help="which of them, with commas (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=40, help="the step to stop at")
    told = parser.parse_args()
    languages = told.workers.split(",")
    run = f"words-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as folder, gradserve.connect(told.address, timeout=60) as client:
        files = [Path(folder) / language for language in languages]
        processes = []
        for language, file in zip(languages, files, strict=True):
            options = ["--run", run, "--worker", language, "--required", len(languages), "--steps", told.steps]
            command = [*COMMANDS[language], told.address, *options, "--output", file]
            processes.append(subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True))
        printed = [process.communicate()[0] for process in processes]
        print("".join(printed), end="")
        if any(process.returncode for process in processes):
            sys.exit("a worker has failed")
        client.delete_parameters(run)
        digests = set(re.findall(r"digest (\w+)", "".join(printed)))
        saved = {file.read_bytes() for file in files}
    if len(digests) != 1 or len(saved) != 1:
        sys.exit(f"the workers have ended with {len(digests)} digests and {len(saved)} sets of parameters")
    print(f"all {len(languages)} workers have ended with the same parameters, digest {digests.pop()}")


if __name__ == "__main__":
    main()
