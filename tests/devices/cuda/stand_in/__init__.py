"""A stand-in for CuPy and the GPU below it, stricter than both, on which the whole service runs.

`site` goes first on `sys.path` and has the package `cupy`; `gpu` is the machine below it. Work is queued and runs late,
in an order that nobody can rely on; a missing synchronisation, a use after free, an overrun, a host buffer that is
reused too early and a thread that has not chosen its GPU are faults, which end the test.
"""
