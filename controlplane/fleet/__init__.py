"""What serves: pools of TGI servers with their policy, the routers in front of them, and what those report.

``actions`` holds the use cases of pools and backends, ``routers`` those of routers; ``machine`` frames the endpoints
that only routers call.
"""
