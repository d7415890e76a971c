#!/usr/bin/env bash
# Asks which locked versions have known vulnerabilities.
#
#     deploy/audit.sh PIP_AUDIT FILE...
#
# Exits with 0 if none has, with 1 if some have, with 2 if that is not known: because the service that knows does not
# answer, or does not know a package.
set -uo pipefail

audit=$1
shift
status=0
for file in "$@"; do
  if said=$("$audit" --strict --progress-spinner off --disable-pip --require-hashes --requirement "$file" 2>&1); then
    echo "$file: no known vulnerabilities"
  elif grep -qE '^Found [0-9]+ known vulnerabilit' <<<"$said"; then
    printf '%s: VULNERABLE\n%s\n' "$file" "$said" >&2
    ((status)) || status=1
  else
    printf '%s: NOT AUDITED, which says nothing about its versions: %s\n' "$file" "$(tail -n 1 <<<"$said")" >&2
    status=2
  fi
done
exit "$status"
