set -e
P=../.venv/bin/python
$P gen.py 0 36 base,more,a64,a32,b64,c64 0.88
$P gen.py 36 100 base,a64 0.88
$P gen.py 0 36 drafts 0.88
$P gen.py 0 60 base,a64 1.05
$P gen.py 100 200 base,a64 0.88
$P gen.py 60 200 base,a64 1.05
