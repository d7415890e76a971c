"""The demo: several processes train one network, averaging through an accumulator.

Kept empty of imports on purpose: every worker process imports this package, and only the
coordinator needs the plotting and data libraries.
"""
