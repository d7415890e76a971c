#!/usr/bin/env bash
# Fails when the protos break what the newest release has promised: check_breaking.sh COMMAND_OF_BUF...
set -euo pipefail
cd "$(dirname "$0")/.."
newest=$(git for-each-ref --count=1 --sort=-version:refname --format='%(refname:short)' 'refs/tags/v*' 2> /dev/null) || true
if [ -z "$newest" ]; then
	echo "buf breaking: not run, as there is no release to compare with (no tag v* in git)"
	exit
fi
echo "buf breaking: compared with $newest"
"$@" breaking --against "$(git rev-parse --path-format=absolute --git-common-dir)#tag=$newest"
