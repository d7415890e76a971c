"""The gradient ops as data: everything that the client, its types and its documentation know of each."""
