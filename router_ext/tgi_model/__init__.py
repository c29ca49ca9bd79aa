"""What a TGI server does with its queue and its memory, in pure code: no clock, no sockets, no threads.

    append(entry) --> [FIFO queue] --next_step(now)--> Step --(the engine's forward)--> complete(step, finished)
                          |                              |
                     dead entries                 blocks reserved up front, given back when an entry leaves

``Batcher`` owns the queue and the running batch. The model server drives it with the real clock and a real or
modelled forward; a simulator drives the same class in virtual time. Rules and their sources: ``next_batch`` and the
batching loop of TGI's v3 backend, its block allocator and radix cache.
"""

from router_ext.tgi_model.batcher import Batcher, BatchRules, Entry, Step, StepKind
from router_ext.tgi_model.blocks import Allocation, BlockAllocator
from router_ext.tgi_model.reservation import MAX_PIECE_TOKENS, piece_tokens, reserved_tokens
from router_ext.tgi_model.steptime import StepTime

__all__ = [
    "MAX_PIECE_TOKENS",
    "Allocation",
    "BatchRules",
    "Batcher",
    "BlockAllocator",
    "Entry",
    "Step",
    "StepKind",
    "StepTime",
    "piece_tokens",
    "reserved_tokens",
]
