"""Plain streaming relays with a key check and nothing else: what the machine allows at best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

_NGINX = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr warn;
worker_rlimit_nofile 20000;
events {{ worker_connections 9000; multi_accept on; }}
http {{
  access_log off;
  client_body_temp_path {folder}/nginx-body;
  proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi;
  uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  keepalive_requests 1000000;
  client_body_buffer_size 128k;
  upstream servers {{ server 127.0.0.1:{server}; keepalive 4096; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      if ($http_authorization != "Bearer {key}") {{ return 401; }}
      proxy_pass http://servers;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600;
    }}
  }}
}}
"""

_HAPROXY = """
global
  maxconn 9000
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  option http-keep-alive
  http-reuse always
frontend clients
  bind 127.0.0.1:{port} backlog 4096
  http-request deny deny_status 401 unless {{ req.hdr(authorization) -m str "Bearer {key}" }}
  default_backend servers
backend servers
  server only 127.0.0.1:{server} maxconn 9000
"""


def _nginx(program: str, folder: Path, port: int, server: int, key: str) -> list[str]:
    file = folder / "nginx.conf"
    file.write_text(_NGINX.format(folder=folder, port=port, server=server, key=key))
    return [program, "-p", str(folder), "-e", "stderr", "-c", str(file)]


def _haproxy(program: str, folder: Path, port: int, server: int, key: str) -> list[str]:
    file = folder / "haproxy.cfg"
    file.write_text(_HAPROXY.format(port=port, server=server, key=key))
    return [program, "-db", "-f", str(file)]


Command = Callable[[str, Path, int, int, str], list[str]]

PEERS: Mapping[str, Command] = {"nginx": _nginx, "haproxy": _haproxy}
"""By name of the program: (program, folder, own port, server's port, key) to its command line."""
