#!/bin/sh
# Installs Consilium into a new virtual environment from the files beside this script, without any network.
#   ./install.sh /opt/consilium          PYTHON=/usr/bin/python3.11 ./install.sh /opt/consilium
# First compare SHA256SUMS with the hub's signature, as the page for administrators says: a changed script checks nothing.
set -eu
unset PYTHONPATH PYTHONHOME  # what lies there would be imported before what is installed
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
fail() { echo "install.sh: $1" >&2; exit 1; }

[ $# -eq 1 ] || fail "give the folder of the new virtual environment, such as /opt/consilium"
case $1 in /*) target=$1 ;; *) target=./$1 ;; esac
[ ! -e "$target" ] || fail "$target: exists; give a new folder, and remove the old one when the new one runs"
python=${PYTHON:-python3}
found=$("$python" -c 'import platform, sys; print(sys.platform, platform.machine(), "%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
  fail "$python: cannot be run; set PYTHON to the path of a Python @PYTHON@"
[ "$found" = "@TARGET@" ] || fail "these wheels are for @TARGET@, $python is $found; ask the hub for others, or set PYTHON"
if ! (cd -- "$here" && sha256sum --strict --status --check SHA256SUMS 2>/dev/null); then
  bad=$(cd -- "$here" && LC_ALL=C sha256sum --check SHA256SUMS 2>/dev/null | grep -v ': OK$' | head -n 1) || true
  fail "${bad:-SHA256SUMS: damaged or missing}: not as the hub made it; copy the folder again, or ask the hub"
fi
mkdir -p -- "$(dirname -- "$target")" && "$python" -m venv "$target" || fail "$target: cannot be made; is its folder yours to write?"
"$target/bin/python3" -m pip --isolated --disable-pip-version-check install --quiet --no-index --no-cache-dir \
  --only-binary :all: -f "$here/wheels" --require-hashes --requirement "$here/requirements.lock" ||
  fail "$target: incomplete, see above; remove it"
"$target/bin/consilium" --version
