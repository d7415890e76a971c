#!/usr/bin/env bash
# Builds the container image and really runs it: the server has to become healthy, must not be root, and has to
# leave with status 0 on SIGTERM.
#
#     deploy/image.sh          the server
#     deploy/image.sh demo     the server and the demo's workers, together as in compose.yaml
#
# A Docker engine does it where one answers. Elsewhere buildah does, as root, on a base image made of Debian's
# packages: no daemon, no image registry. Settings, all optional:
#
#     EXTRAS         what the image holds: server (the default), "server,demo", cuda12, cuda13
#     IMAGE          the image's name; by default gradserve:latest for the server, else gradserve:EXTRAS
#     ENGINE         docker or buildah
#     PYTHON_IMAGE   the base image: Debian or Ubuntu with Python 3.11 or newer and its venv module
#     RELEASE        1 refuses a base image that is named by a tag, which may stand for another one tomorrow
#     DEBIAN_MIRROR  where debootstrap finds its packages
#     BUILD_TIMEOUT  seconds that the build may take; by default 1800
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly DEBIAN_SUITE=trixie # its Python is that of the Dockerfile's own base image
readonly BUILD_TIMEOUT=${BUILD_TIMEOUT:-1800} START_TIMEOUT=60 STOP_TIMEOUT=30 DEMO_TIMEOUT=900

say() { printf '==> %s\n' "$*" >&2; }

die() {
  printf 'image.sh: %s\n' "$*" >&2
  exit 1
}

# Repeats a command until it succeeds; gives up after some seconds.
wait_until() { # seconds, command...
  local deadline=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < deadline)) || return 1
    sleep 0.5
  done
}

# --- What the build needs of this machine ---------------------------------------------------------------------

# Leaves pip's index settings and the certificates of this machine where the build takes them as secrets.
# Indexes and wheels in local folders are left out: the build does not see those.
collect_secrets() {
  local python name
  if python=$(command -v python3); then
    "$python" - "$scratch" <<'PYTHON'
import ast, os, pathlib, subprocess, sys

PASSED_ON = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries")

listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60)
settings = {}
for line in sorted(listed.stdout.splitlines(), key=lambda line: line.startswith(":env:")):  # these win
    name, _, value = line.partition("=")
    section, _, key = name.rpartition(".")
    if section in ("global", "install", ":env:"):
        settings[key] = ast.literal_eval(value)

lines = ["[global]"]
for key in PASSED_ON:
    words = [word for word in settings.get(key, "").split() if not word.startswith(("/", "file:"))]
    if words:
        lines.append(f"{key} = {' '.join(words)}")
scratch = pathlib.Path(sys.argv[1])
(scratch / "pip-config").write_text("\n".join(lines) + "\n")

bundles = (settings.get("cert"), os.environ.get("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt")
bundle = next((path for path in bundles if path and os.path.isfile(path)), None)
if bundle:
    (scratch / "certificates").write_bytes(pathlib.Path(bundle).read_bytes())
PYTHON
  fi
  for name in pip-config certificates; do
    [[ ! -s $scratch/$name ]] || secrets+=(--secret "id=$name,src=$scratch/$name")
  done
}

# Says if the base image is not pinned; refuses it for a release. What this machine has made itself is as it is.
check_base() { # image
  [[ ! $1 =~ @sha256:[0-9a-f]{64}$ && $1 != localhost/* ]] || return 0
  local advice="expected PYTHON_IMAGE=NAME@sha256:DIGEST; docker buildx imagetools inspect $1 prints the digest"
  [[ ${RELEASE:-} != 1 ]] || die "RELEASE=1: the base image $1 is not pinned: $advice"
  say "The base image $1 is not pinned, so it may be another one tomorrow; for a release, $advice"
}

choose_engine() {
  if [[ -n ${ENGINE:-} ]]; then
    [[ $ENGINE == docker || $ENGINE == buildah ]] || die "ENGINE is docker or buildah, not '$ENGINE'"
    engine=$ENGINE
  elif timeout 20 docker info >/dev/null 2>&1; then
    engine=docker
  else
    engine=buildah
  fi
}

# --- Docker ---------------------------------------------------------------------------------------------------

docker_prepare() {
  timeout 20 docker info >/dev/null || die "no Docker engine answers"
  check_base "${PYTHON_IMAGE:-$(sed -n 's/^ARG PYTHON_IMAGE=//p' Dockerfile)}"
}

docker_build() {
  DOCKER_BUILDKIT=1 timeout "$BUILD_TIMEOUT" docker build --tag "$image" --build-arg "EXTRAS=$extras" \
    ${PYTHON_IMAGE:+--build-arg "PYTHON_IMAGE=$PYTHON_IMAGE"} "${secrets[@]}" . >&2
}

docker_size() { docker images --format '{{.Size}}' "$image"; }

docker_start() {
  container=$(timeout 60 docker run --detach --publish 127.0.0.1::50051 --health-interval 1s "$image")
  address=127.0.0.1:50051
}

docker_running() { [[ $(docker inspect --format '{{.State.Running}}' "$container") == true ]]; }

docker_healthy() { [[ $(docker inspect --format '{{.State.Health.Status}}' "$container") == healthy ]]; }

docker_user() { timeout 60 docker exec "$container" stat --format %u /proc/1; }

docker_demo() {
  timeout "$DEMO_TIMEOUT" docker run --rm --network "container:$container" "$image" \
    demo --address "$address" --output /output
}

# Says with which status the server left.
docker_stop() {
  timeout $((STOP_TIMEOUT + 30)) docker stop -t "$STOP_TIMEOUT" "$container" >/dev/null
  status=$(docker inspect --format '{{.State.ExitCode}}' "$container")
}

docker_logs() { docker logs "$container" >&2; }

docker_cleanup() {
  if [[ -n $container ]]; then
    timeout 60 docker rm --force "$container" >/dev/null
  fi
}

# --- buildah: containers are chroots on this machine's network, so the server listens on loopback only -------------

# Installs the tools where that takes nobody's decision: as root, with apt-get.
buildah_prepare() {
  local missing=() tool
  for tool in buildah debootstrap; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  if ((EUID != 0)); then
    die "no Docker engine answers; building without one takes root${missing[*]:+ and the packages: ${missing[*]}}"
  fi
  if ((${#missing[@]})); then
    missing+=(debian-archive-keyring)
    command -v apt-get >/dev/null || die "no Docker engine answers; install one, or the packages: ${missing[*]}"
    say "Installing ${missing[*]}"
    timeout 300 apt-get update -qq
    DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null
  fi
  [[ -z ${PYTHON_IMAGE:-} ]] || check_base "$PYTHON_IMAGE" # otherwise it is made of Debian's signed packages
  export BUILDAH_ISOLATION=chroot
  if ! timeout 60 buildah info >/dev/null 2>&1; then # no overlay file system here
    storage=(--storage-driver vfs)
  fi
}

in_buildah() { timeout "$1" buildah "${storage[@]}" "${@:2}"; }

# Makes the base image once: Debian with Python, less what Python's own slim image leaves out too.
buildah_base() {
  base=${PYTHON_IMAGE:-localhost/gradserve-base:$DEBIAN_SUITE}
  if [[ -n ${PYTHON_IMAGE:-} || -n $(in_buildah 60 images --quiet "$base" 2>/dev/null) ]]; then
    return
  fi
  say "Making the base image $base of Debian's packages, once"
  local root
  base_container=$(in_buildah 60 from scratch)
  root=$(in_buildah 60 mount "$base_container")
  timeout 900 debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv \
    "$DEBIAN_SUITE" "$root" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$scratch/debootstrap.log" 2>&1 || {
    tail -n 20 "$scratch/debootstrap.log" >&2
    die "debootstrap failed"
  }
  rm -rf "${root:?}"/var/{cache/apt,lib/apt/lists,log}/* "$root"/usr/share/{doc,info,locale,man}/*
  rm -f "$root"/etc/{hostname,resolv.conf} # this machine's
  in_buildah 60 umount "$base_container" >/dev/null
  in_buildah 60 config --cmd python3 \
    --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$base_container"
  in_buildah 300 commit --quiet --format docker "$base_container" "$base" >/dev/null
}

buildah_build() {
  local previous
  buildah_base
  previous=$(in_buildah 60 images --quiet "$image" 2>/dev/null) || true
  # Docker's format, for OCI's knows no health check.
  in_buildah "$BUILD_TIMEOUT" build --format docker --pull=false --tag "$image" --build-arg "EXTRAS=$extras" \
    --build-arg "PYTHON_IMAGE=$base" "${secrets[@]}" . >&2
  if [[ -n $previous && $previous != "$(in_buildah 60 images --quiet "$image")" ]]; then # nameless now
    in_buildah 60 rmi "$previous" >/dev/null 2>&1 || true # not if it is in use
  fi
}

buildah_size() { in_buildah 60 images --format '{{.Size}}' "$image"; }

# buildah runs what it is told, not the image's entrypoint; so that is read from the image.
buildah_start() {
  container=$(in_buildah 300 from --pull-never "$image")
  root=$(in_buildah 60 mount "$container")
  mapfile -t entrypoint < <(in_buildah 60 inspect --type image \
    --format '{{range .Docker.Config.Entrypoint}}{{println .}}{{end}}' "$image" | sed '/^$/d')
  # shellcheck disable=SC2016  # for the shell inside
  timeout $((START_TIMEOUT + DEMO_TIMEOUT + STOP_TIMEOUT)) buildah "${storage[@]}" run "$container" -- \
    sh -c 'echo $$ >/tmp/server.pid; exec "$@"' sh \
    "${entrypoint[@]}" serve --listen 127.0.0.1:0 --address-file /tmp/server.address >"$scratch/log" 2>&1 &
  runner=$!
}

buildah_running() { kill -0 "$runner" 2>/dev/null; }

buildah_healthy() {
  [[ -s $root/tmp/server.address ]] || return 1
  server=$(<"$root/tmp/server.pid")
  address=$(head -n 1 "$root/tmp/server.address")
  in_buildah 30 run "$container" -- "${entrypoint[@]}" health "$address" >/dev/null 2>&1
}

buildah_user() { stat --format %u "/proc/$server"; }

buildah_demo() {
  in_buildah "$DEMO_TIMEOUT" run "$container" -- "${entrypoint[@]}" demo --address "$address" --output /output
}

buildah_stopped() { ! buildah_running; }

buildah_stop() {
  kill -TERM "$server"
  wait_until "$STOP_TIMEOUT" buildah_stopped || die "the server did not stop within $STOP_TIMEOUT s of SIGTERM"
  status=0
  wait "$runner" || status=$?
  runner=
}

buildah_logs() { cat "$scratch/log" >&2; }

buildah_cleanup() {
  local leftover
  if [[ -n $runner ]]; then
    [[ ! -s $root/tmp/server.pid ]] || server=$(<"$root/tmp/server.pid")
    # the same program still, not another that was given its number
    [[ ! /proc/$server/root/tmp/server.pid -ef $root/tmp/server.pid ]] || kill -KILL "$server"
    kill -TERM "$runner" 2>/dev/null
    wait "$runner" 2>/dev/null
  fi
  for leftover in $container $base_container; do
    in_buildah 60 umount "$leftover" >/dev/null 2>&1
    in_buildah 60 rm "$leftover" >/dev/null
  done
}

# --- Build, run, check ----------------------------------------------------------------------------------------

engine='' container='' base_container='' root='' runner='' server='' address='' status=''
secrets=() storage=() entrypoint=()
scratch=$(mktemp -d)

cleanup() {
  set +e
  [[ -z $engine ]] || "${engine}_cleanup"
  rm -rf "$scratch"
}
trap cleanup EXIT

healthy_or_gone() { "${engine}_healthy" || ! "${engine}_running"; }

check() {
  say "Starting $image"
  "${engine}_start"
  if ! wait_until "$START_TIMEOUT" healthy_or_gone || ! "${engine}_healthy"; then
    "${engine}_logs"
    die "the server was not healthy within $START_TIMEOUT s"
  fi
  say "Healthy: gradserve health says so inside the container"

  local user
  user=$("${engine}_user")
  ((user != 0)) || die "the server runs as root"
  say "Not root: user id $user"

  if $demo; then
    say "Running the demo's workers against $address"
    "${engine}_demo"
  fi

  "${engine}_stop"
  if ((status != 0)); then
    "${engine}_logs"
    die "the server left with status $status on SIGTERM"
  fi
  say "Stopped: status 0 on SIGTERM"
}

case ${1-} in
  '') demo=false extras=${EXTRAS:-server} ;;
  demo) demo=true extras=${EXTRAS:-server,demo} ;;
  *) die "usage: deploy/image.sh [demo]" ;;
esac
tag=${extras#server,}
tag=${tag//,/-}
image=${IMAGE:-gradserve:${tag/#server/latest}}

choose_engine
"${engine}_prepare"
collect_secrets
say "Building $image with $engine: gradserve[$extras]"
"${engine}_build"
check
say "$image: $("${engine}_size")"
