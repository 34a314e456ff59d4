#!/usr/bin/env bash
# Run a command with a Docker daemon and the image: `scripts/with_docker.sh pytest -m containers`.
#
# Takes the daemon that answers. Where none does, and this is Debian and we are root, it installs one and starts it
# with a socket and folder of its own below build/docker, without network bridge and firewall rules; it ends with us.
# Where no registry answers, the base image is made from Debian's packages. Variables that matter to the build:
#   PIP_FIND_LINKS, PIP_INDEX_URL, TORCH_INDEX   where packages come from; a folder is served on the loopback
#   TORCH                                        the build of torch; empty: the plain wheel of the package index
#   PIP_CERT                                     certificates to trust, for a proxy that re-signs
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${SEQREC_DOCKER_ROOT:-$PWD/build/docker}
image=${SEQREC_IMAGE:-seqrec:test}
ended=()
trap 'for one in "${ended[@]}"; do eval "$one" || true; done' EXIT

docker=$(command -v /usr/bin/docker docker | head -1 || true)

start_daemon() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
        echo "no Docker daemon answers: start one, or run this as root on Debian, where it is installed" >&2
        exit 1
    fi
    missing=()
    for package in docker.io containerd runc mmdebstrap; do
        dpkg-query --show --showformat '${Status}' "$package" 2> /dev/null | grep -q "ok installed" || missing+=("$package")
    done
    if [ "${#missing[@]}" -gt 0 ]; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
            apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
    fi
    docker=/usr/bin/docker
    mkdir -p "$folder"
    cat > "$folder/daemon.json" << END
{"data-root": "$folder/data", "exec-root": "$folder/exec", "pidfile": "$folder/docker.pid",
 "hosts": ["unix://$folder/docker.sock"], "bridge": "none", "iptables": false, "ip-forward": false, "ip-masq": false}
END
    dockerd --config-file "$folder/daemon.json" > "$folder/daemon.log" 2>&1 &
    ended+=("kill \$(cat '$folder/docker.pid')")
    export DOCKER_HOST=unix://$folder/docker.sock
    for _ in $(seq 60); do
        "$docker" info > /dev/null 2>&1 && return
        sleep 1
    done
    echo "the Docker daemon does not come up:" >&2
    tail -5 "$folder/daemon.log" >&2
    exit 1
}

make_base() {
    "$docker" image inspect python:3.11-slim > /dev/null 2>&1 && return
    "$docker" pull --quiet python:3.11-slim > /dev/null 2>&1 && return
    echo "no registry answers: the base image is made from Debian's packages"
    mmdebstrap --quiet --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates,passwd,tini \
        bookworm "$folder/base.tar"
    "$docker" import "$folder/base.tar" python:3.11-slim > /dev/null
    rm "$folder/base.tar"
}

build() {
    arguments=(--tag "$image" --network host --build-arg "REVISION=$(git rev-parse HEAD 2> /dev/null || echo unknown)")
    if [ -d "${PIP_FIND_LINKS:-}" ]; then
        python3 -m http.server --bind 127.0.0.1 --directory "$PIP_FIND_LINKS" 8976 > /dev/null 2>&1 &
        ended+=("kill $!")
        arguments+=(--build-arg PIP_FIND_LINKS=http://127.0.0.1:8976)
        TORCH_INDEX=${TORCH_INDEX-}
    elif [ -n "${PIP_FIND_LINKS:-}" ]; then
        arguments+=(--build-arg "PIP_FIND_LINKS=$PIP_FIND_LINKS")
    fi
    [ -n "${TORCH+set}" ] && arguments+=(--build-arg "TORCH=$TORCH")
    [ -n "${TORCH_INDEX+set}" ] && arguments+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
    [ -n "${PIP_INDEX_URL:-}" ] && arguments+=(--build-arg "PIP_INDEX_URL=$PIP_INDEX_URL")
    [ -f "${PIP_CERT:-}" ] && arguments+=(--secret "id=ca,src=$PIP_CERT")
    DOCKER_BUILDKIT=1 "$docker" build "${arguments[@]}" .
}

if [ -z "$docker" ] || ! "$docker" info > /dev/null 2>&1; then
    start_daemon
fi
make_base
build
export SEQREC_IMAGE=$image
"$@"
