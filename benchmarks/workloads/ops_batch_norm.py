"""`python -m benchmarks.workloads.ops_batch_norm`: the batch normalisation case alone, like `--only ops_batch_norm`."""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["--only", "ops_batch_norm"]
    main()
