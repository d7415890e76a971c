"""What runs inside a peer's own environment: one folder per peer, one module per kind of process.

These modules import nothing of the project but the standard-library-only ones `benchmarks.peers.driver`
and `benchmarks.workloads.resnet50`, because the other packages are not there.
"""
