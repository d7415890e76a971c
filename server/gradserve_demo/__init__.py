"""The demo: several processes train one network, averaging through an accumulator.

It has no imports on purpose: every worker process imports this package, but only the coordinator needs the plotting
and data libraries.
"""
