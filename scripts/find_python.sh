#!/usr/bin/env bash
# Print the path of a Python >= 3.12 interpreter that really runs, or say exactly what to install.
#
# Looks at $PYTHON, at PATH (where a pyenv shim may be found that only answers "command not found"),
# then at pyenv's own versions folder, oldest supported version first.
set -u

works() {
    "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    works "$PYTHON" && { "$PYTHON" -c 'import sys; print(sys.executable)'; exit 0; }
    echo "PYTHON=$PYTHON is not a working Python >= 3.12 with the venv module." >&2
    exit 1
fi
for name in python3.12 python3.13 python3.14 python3 python; do
    path=$(command -v "$name") || continue
    works "$path" && { "$path" -c 'import sys; print(sys.executable)'; exit 0; }
done
root=${PYENV_ROOT:-$HOME/.pyenv}
for path in "$root"/versions/3.1[2-9]*/bin/python3; do
    [ -x "$path" ] && works "$path" && { echo "$path"; exit 0; }
done
cat >&2 <<'TXT'
No Python >= 3.12 found; Megatron-LM 0.19 needs one. Any of these helps:
  Debian/Ubuntu:  apt-get install python3.12 python3.12-venv   (or python3 on Debian 13)
  pyenv:          pyenv install 3.12
  conda:          conda create -n dynmo python=3.12, then PYTHON=.../bin/python make setup
TXT
exit 1
