"""Pure scheduling: events in, actions out, time passed as an argument.

Nothing here awaits, sleeps, logs, draws random numbers or reads a clock. One ``Scheduler`` serves one pool;
in a running router one task owns it, the simulator drives the same class in virtual time.

    events --> Scheduler.handle(event, now) --> actions
                 |-- queues      who waits
                 |-- fairness    whose turn
                 |-- kv          what is reserved on which backend
                 |-- admission   may it start here, now (KV, prefill gate, slots)
                 `-- placement   which backend
"""
