"""Sums of packed updates, made block by block straight from their bytes.

`adder` decides and shares the work; `loops` are its kernels. Nothing ever has a whole update unpacked.
"""
