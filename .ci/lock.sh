# Writes deploy/requirements.lock, every package of the image with the hashes of its files, and deploy/onesweep.cdx.json,
# the bill of materials that a wheel carries. In .venv, which gets uv and cyclonedx-bom.
set -eu
.venv/bin/python -m pip install -q uv cyclonedx-bom
# torch comes from the index of its CPU builds, which needs nothing of CUDA
echo hatchling | .venv/bin/uv pip compile -q pyproject.toml - --python-version 3.12 --generate-hashes --no-annotate \
    --no-header --extra etcd --extra http --extra schema --extra tls --no-emit-package torch |
    awk '/^[a-z]/ { kept = !/^(cuda|nvidia|triton)/ } kept' >deploy/requirements.lock
{ sed -n 's/^\([a-z].*\) \\$/\1/p' deploy/requirements.lock; sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml; } |
    .venv/bin/cyclonedx-py requirements - --pyproject pyproject.toml --output-reproducible -o deploy/onesweep.cdx.json
