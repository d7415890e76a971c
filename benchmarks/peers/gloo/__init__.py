"""torch.distributed with gloo: an all-reduce without a server."""
