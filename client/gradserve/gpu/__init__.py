"""Arrays in the memory of a GPU, through the driver of NVIDIA alone: no library of arrays is imported."""
