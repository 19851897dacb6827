#!/bin/bash
# Installs the distribution's packages that WriteScope is built from: Debian 12 or Ubuntu 24.04.
#   deploy/install_packages.sh [--tests] [--dry-run]
# --tests adds what tests/run.sh needs. Installs nothing, and needs no network, when all is there.
set -euo pipefail

tests=0
dry_run=0
for argument in "$@"; do
  case "$argument" in
    --tests) tests=1 ;;
    --dry-run) dry_run=1 ;;
    -h | --help)
      sed -n '2,4s/^# //p' "$0"
      exit 0
      ;;
    *)
      echo "install_packages.sh: unknown argument '$argument'; see --help" >&2
      exit 2
      ;;
  esac
done

packages=(
  build-essential cmake ninja-build pkg-config
  libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev
  libabsl-dev libtbb-dev libopenblas-pthread-dev libicu-dev
  prometheus-cpp-dev nlohmann-json3-dev libcli11-dev
)

# PRETTY_NAME, ID and VERSION_ID of this system.
if [[ ! -r /etc/os-release ]]; then
  echo "install_packages.sh: no /etc/os-release: this is neither Debian 12 nor Ubuntu 24.04." >&2
  exit 1
fi
. /etc/os-release
system="${ID:-unknown} ${VERSION_ID:-}"
case "$system" in
  "debian 12") clang_version=14 ;;
  # The code is formatted by clang-format 14, which Ubuntu 24.04 still carries. Not tried by us.
  "ubuntu 24.04") clang_version=14 ;;
  *)
    echo "install_packages.sh: this is ${PRETTY_NAME:-$system}; the packages are known for Debian 12 and" \
      "Ubuntu 24.04 only." >&2
    echo "Elsewhere install the equivalents of: ${packages[*]}" >&2
    echo "then run cmake --preset release && cmake --build --preset release." >&2
    exit 1
    ;;
esac
if ((tests)); then
  packages+=(
    libgtest-dev libgmock-dev libbenchmark-dev libpcre2-dev
    "clang-format-$clang_version" "clang-tidy-$clang_version"
    git python3 python3-venv sentencepiece xz-utils
  )
fi

# dpkg-query fails for names that it has never heard of: they are missing too.
installed=" $(dpkg-query -W -f '${Package} ${Status}\n' "${packages[@]}" 2>/dev/null |
  awk '$NF == "installed" { printf "%s ", $1 }' || true)"
missing=()
for package in "${packages[@]}"; do
  [[ "$installed" == *" $package "* ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "packages: all ${#packages[@]} are there"
  exit 0
fi

sudo=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "install_packages.sh: not root and no sudo. As root, run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  sudo=(sudo)
fi
echo "packages: installing ${#missing[@]} from $system${sudo:+, with sudo}: ${missing[*]}"
if ((dry_run)); then exit 0; fi
export DEBIAN_FRONTEND=noninteractive
"${sudo[@]}" apt-get update -qq
# "sudo" drops the environment.
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
echo "packages: done"
