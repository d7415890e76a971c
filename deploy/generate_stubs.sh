#!/usr/bin/env bash
# Makes the Python stubs of all protos: generate_stubs.sh PYTHON OUTPUT_FOLDER
set -euo pipefail
python=$1
output=$2
cd "$(dirname "$0")/.."
made=$output/gradserve/v1
stubs=$output/gradserve_protocol/v1
mkdir -p "$made" "$stubs"
rm -f "$stubs"/*_pb2.py "$stubs"/*_pb2.pyi "$stubs"/*_pb2_grpc.py "$made"/*_pb2.py "$made"/*_pb2_grpc.py
"$python" -m grpc_tools.protoc -Iproto --python_out="$output" --pyi_out="$output" proto/gradserve/v1/*.proto
# Only the files with services: the others' would be empty.
"$python" -m grpc_tools.protoc -Iproto --grpc_python_out="$output" proto/gradserve/v1/*_service.proto
# The stubs belong to gradserve_protocol; gradserve.v1, whose place they would have, has the same names.
mv "$made"/*_pb2.py "$made"/*_pb2.pyi "$made"/*_pb2_grpc.py "$stubs"
sed -i -E "s/^from gradserve\.v1 import/from gradserve_protocol.v1 import/; s/'gradserve\.v1\.(\w+_pb2)'/'gradserve_protocol.v1.\1'/" "$stubs"/*_pb2*.py*
for stub in "$stubs"/*.py; do
	name=$(basename "$stub" .py)
	[ "$name" = __init__ ] || printf '"""The same as gradserve_protocol.v1.%s."""\n\nfrom gradserve_protocol.v1.%s import *  # noqa: F403\n' "$name" "$name" > "$made/$name.py"
done
