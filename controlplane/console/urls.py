"""Addresses of the web console."""

from __future__ import annotations

from django.urls import URLPattern

app_name = "console"
urlpatterns: list[URLPattern] = []
