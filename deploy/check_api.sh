#!/usr/bin/env bash
# Fails when the client breaks the API of the newest release: check_api.sh COMMAND_OF_GRIFFE...
set -euo pipefail
cd "$(dirname "$0")/.."
newest=$(git for-each-ref --count=1 --sort=-version:refname --format='%(refname:short)' 'refs/tags/v*' 2> /dev/null) || true
if [ -z "$newest" ]; then
	echo "griffe check: not run, as there is no release to compare with (no tag v* in git)"
	exit
fi
echo "griffe check: compared with $newest"
for package in client/gradserve server/gradserve_testing; do # the latter is gradserve.testing for users
	if git cat-file -e "$newest:$package" 2> /dev/null; then
		"$@" check "${package#*/}" --search "${package%/*}" --against "$newest"
	fi
done
