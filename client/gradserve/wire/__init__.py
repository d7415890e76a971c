"""The wire format of tensors, for the client and the server alike."""
