"""Pure scheduling: events in, actions out, time passed as an argument.

Nothing here awaits, sleeps, logs, draws random numbers or reads a clock. One ``Scheduler`` serves one pool;
in a running router one task owns it, the simulator drives the same class in virtual time.

    events --> Scheduler.handle(event, now) --> actions
                 |-- books       one request's life: queued, dispatched, delivered, charged, ended   (lifecycle, cost)
                 |-- limits      who may not wait, or not any longer
                 |-- tenants     who has which share                                  (queues, fairness.counters)
                 |-- fleet       which backends there are, what is closing, since when none is up      (kv)
                 `-- decision    candidates x placement, until nobody can start
                       |-- fairness    whose turn                                     (one policy per file)
                       |-- admission   may it start here, now (KV, prefill gate, slots)
                       |-- slicing     how many tokens to ask for
                       `-- placement   which backend; what those ahead claim
    reading: explain, snapshot (stats), invariants (audit)

Each part owns its state and is changed by the events only; names in brackets are what a part is built from.
"""
