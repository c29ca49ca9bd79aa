"""gunicorn's configuration. Threads, not processes, carry the routers' long polls: a waiting one costs a stack only."""

from controlplane.environment import read_environment

_environment = read_environment()

bind = f"{_environment.console_host}:{_environment.console_port}"
worker_class = "gthread"
workers = 1
threads = _environment.console_threads
# Above the longest poll (25 s), so that a restart lets every waiting router finish with a clean 304.
graceful_timeout = 30
timeout = 60
keepalive = 30
accesslog = None
