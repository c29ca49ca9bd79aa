"""WSGI entry point: ``gunicorn -c controlplane/gunicorn_conf.py controlplane.wsgi:application``."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

application = get_wsgi_application()
