"""How tensors look on the wire; used by the client and the server alike."""
