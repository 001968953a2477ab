"""Late work comes on top of the open round's: each update moves the weights by an M-th, whenever it comes.

A mean over those that came lets a single update move the weights as far as all together, and a late one take weight
from those of its new round. Here all updates of a run add up to what they would have in time. *Idea* of ours; it is
also what the eager correction takes for granted.
"""

from __future__ import annotations

from trainer.rounds.late.keep import Keep


class Add(Keep):
    shares_of_all = True
