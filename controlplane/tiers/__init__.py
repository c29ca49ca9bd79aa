"""SLO tiers: a tier buys a latency target and a rank; it never buys share."""
