"""`python -m benchmarks.workloads.ops_rnn`: the case of the recurrent ops alone, like `--only ops_rnn`."""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["--only", "ops_rnn"]
    main()
