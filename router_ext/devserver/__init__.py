"""TGI's HTTP API on a CPU, for development, demos and tests.

    connection --> App (routes, validation) --> Runner --> Batcher (TGI's queue and KV rules)
        ^                                         |
        '------------- sinks <--- tokens ---------'--> Engine: torch (a real small model) or model (a fake)

One event loop owns everything; only the torch engine's forwards and long tokenisations run in threads. A request
exists as a ``Generation`` from its permit to its last event; whoever sees its client leave marks it closed, and the
batcher takes it out where TGI would.
"""
