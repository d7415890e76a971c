"""The protocol between clients and servers of gradserve: messages, and how they travel.

`v1` has the stubs of the protos, as generated. `frames`, `messages`, `tensors`, `arrays` and `placement` are the
codecs that carry bulk bytes without protobuf's copies. `address` and `tls` let both sides find and trust each other,
`memory` and `gpu` are memory that both map, and `errors` are the errors that travel. The package imports neither the
client nor the server, nor gRPC.
"""
