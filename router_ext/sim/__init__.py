"""The router's scheduler in virtual time, in front of modelled TGI servers.

    suites -> workloads --arrivals--> engine --events--> core.scheduler.Scheduler (or raw: no router at all)
    (traces)                            |  ^--actions--'
                                        v
                                     server (one per backend: queue, reservation, iterations, prefix cache)
                                        |
                                        v
                        recorder --> recording --> metrics --> results (table, JSON), report

One run is one suite, one policy and one seed; ``runs`` spreads runs over processes. A run reads no clock but to state
its own speed, and draws its random numbers from streams named by suite, seed, client and purpose, so that every policy
meets the same arrivals and the same seed always gives the same recording.
"""
