"""How the numbers of a part travel: one file for each codec."""

from __future__ import annotations

from trainer.rounds.codec.base import Codec
from trainer.rounds.codec.bf16 import Bf16
from trainer.rounds.codec.e3m0 import E3M0
from trainer.rounds.codec.fp32 import Fp32
from trainer.rounds.codec.int8 import Int8
from trainer.rounds.codec.ternary import Ternary
from trainer.rounds.settings import CodecName

CODECS: dict[CodecName, Codec] = {
    "fp32": Fp32(),
    "bf16": Bf16(),
    "int8": Int8(),
    "e3m0": E3M0(),
    "ternary": Ternary(),
}


def codec_named(name: CodecName) -> Codec:
    return CODECS[name]
