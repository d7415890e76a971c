"""The gradient ops as data: all that the client, its types and its documentation know about each op."""
