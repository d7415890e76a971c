"""Element-wise sums, products and quotients of lists of arrays, on all cores."""
