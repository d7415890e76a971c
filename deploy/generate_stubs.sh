#!/usr/bin/env bash
# Makes the Python stubs of all protos: generate_stubs.sh PYTHON OUTPUT_FOLDER
set -euo pipefail
python=$1
output=$2
cd "$(dirname "$0")/.."
rm -f "$output"/gradserve/v1/*_pb2.py "$output"/gradserve/v1/*_pb2.pyi "$output"/gradserve/v1/*_pb2_grpc.py
"$python" -m grpc_tools.protoc -Iproto --python_out="$output" --pyi_out="$output" proto/gradserve/v1/*.proto
# Only the files with services: the others' would be empty.
"$python" -m grpc_tools.protoc -Iproto --grpc_python_out="$output" proto/gradserve/v1/*_service.proto
