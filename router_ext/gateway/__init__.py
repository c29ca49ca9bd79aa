"""The router's HTTP side: authentication, dialects, streams, and the one writer of the scheduler.

client bytes -> app -> auth -> dialects.decode -> GenerationRequest -> engine (Scheduler) -> Dispatch
client bytes <- encoder (dialect) <- continuation (one stream out of many slices) <- backends (SSE events)
"""
