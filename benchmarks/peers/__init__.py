"""The modules that run inside a peer's own environment: one folder per peer, one module per kind of process.

Of the project they import only `benchmarks.peers.driver` and `benchmarks.workloads.resnet50`, which need nothing but
the standard library, because the other packages are not installed there.
"""
