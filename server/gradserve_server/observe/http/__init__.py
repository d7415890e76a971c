"""The HTTP port: metrics, status and page. Only this package imports h11, and the server imports it late.

It has a separate thread and event loop, which shares the interpreter with training: everything that it does for
strangers is small and bounded. Between the two threads pass only values that never change. `status.snapshot` takes a
snapshot of all accumulators and layers on the server's event loop, in turns, for all viewers together and at a bounded
rate (`views.Latest`); what a viewer may see, order, descriptions, JSON and Prometheus's text are made in the port's
thread. `exchange` is HTTP/1.1 through h11, without I/O.
"""
