"""What the kernels that compute with float32 take for `kind`: how the elements of their arrays are stored."""

FLOAT32_ELEMENTS, FLOAT16_ELEMENTS, BFLOAT16_ELEMENTS = range(3)
