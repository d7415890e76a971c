"""The most that plain sockets can do: sendall on one side, recv_into the same memory each time on the other."""
