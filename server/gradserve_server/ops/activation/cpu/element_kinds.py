"""The values of `kind` in kernels that compute with float32: how the elements of their arrays are stored."""

FLOAT32_ELEMENTS, FLOAT16_ELEMENTS, BFLOAT16_ELEMENTS = range(3)
