"""Imports a folder of a Hugging Face model in float32 with a copy of itself in 3 bits as drafter.

    python docs/research/scripts/three_bits.py SOURCE DIR

A group's codes have 8 levels in place of 16, fitted in the same way; they are stored as codes of 4 bits are.
"""

import inspect
import sys

from onesweep.__main__ import main
from stages.model import few_bits

MOST = 7
for name in ("_codes", "_quantised"):
    exec(inspect.getsource(getattr(few_bits, name)).replace("LARGEST", str(MOST)), vars(few_bits))

source, directory = sys.argv[1:]
sys.exit(main(["import", source, "--out", directory, "--weights", "float32", "--drafter", "copy:q4"]))
