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
# What gradserve has from other packages, griffe does not follow: the test kit, and modules of the protocol.
of_users=(client/gradserve server/gradserve_testing client/gradserve_protocol/{errors.py,server_status.py,tls.py,v1})
failed=0
for each in "${of_users[@]}"; do
	if git cat-file -e "$newest:$each" 2> /dev/null; then
		module=${each#*/} module=${module%.py}
		"$@" check "${module//\//.}" --search "${each%%/*}" --against "$newest" || failed=1
	fi
done
exit "$failed"
