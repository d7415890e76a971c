"""The parameter server process."""

from benchmarks.peers.driver import run_server
from benchmarks.peers.tensorflow.cluster import serve_parameters

if __name__ == "__main__":
    run_server(serve_parameters)
