"""What ties a router to its control plane, and the books it keeps on its own disk.

    engine --begin/words/finish--> Ledger = InflightTable (mmap, running) + Spool (segments, ended)
                                     |  read_batch / ack
    control plane <--UsageClient-----+
    control plane --ConfigClient--> apply(snapshot), on_artifact(pool, record, data)
    control plane <--HeartbeatClient-- build_heartbeat()

Ownership: one process owns the router's folder (a lock file says so). ``Ledger`` is used from the event loop's thread
only; what blocks (fsync) runs in a worker thread. Files: ``inflight.bin``, ``spool/``, ``snapshot.json``,
``artifacts/``.

Use by the gateway::

    from router_ext.sync.inflight import FIRST_DISPATCH_US, FIRST_TOKEN_US, OUTPUT_TOKENS, PROMPT_TOKENS, RequestStart
    from router_ext.sync.ledger import Ledger, new_event_id
    from router_ext.sync.link import ControlPlaneLink

    ledger = Ledger.open(router_dir, now_us=now_us())       # closes what a killed predecessor left open (aborted)
    link = ControlPlaneLink(
        url=settings.controlplane_url, token=token, directory=router_dir, ledger=ledger, router=router_id,
        apply=engine.apply_snapshot,            # sync or async; raises SnapshotRefused to keep the last good one
        on_artifact=engine.load_artifact,       # (pool_id, ArtifactRecord, bytes); raises ArtifactRefused
        build_heartbeat=engine.heartbeat,       # () -> Heartbeat; see link.config.applied_revision, .refused_reason,
    )                                           #               ledger.pending_events, ledger.pending_bytes
    async with asyncio.TaskGroup() as tasks:
        await link.start()                      # opens the session, applies snapshot.json if there is a good one
        tasks.create_task(link.run())           # until cancelled: long poll, usage, heartbeats, fsync
        ...
    await link.close()                          # flushes usage for a moment, closes session
    ledger.close()

    # one request
    slot = ledger.begin(RequestStart(event=new_event_id(now_us()), request=..., ...))   # LedgerFull -> 503
    words = slot.words
    words[FIRST_DISPATCH_US] = now_us()         # from here on a kill leaves an ``aborted`` event
    words[PROMPT_TOKENS] = details_input_length
    words[FIRST_TOKEN_US] = now_us()
    words[OUTPUT_TOKENS] = kept_so_far          # per event, BEFORE its bytes are written to the client
    ledger.finish(slot, outcome="completed", ended_at_us=now_us(), finish_reason="eos_token", backends=[...])
    ledger.discard(slot)                        # instead, for a request refused before any backend was used

Every slot ends by exactly one of ``finish`` and ``discard`` (``slot.is_open`` tells).
"""
