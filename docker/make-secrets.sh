#!/bin/sh
# Makes the secrets of compose.yaml in ./secrets, once; an existing file is never touched.
# The folder is closed to other users. The files in it are readable, because compose mounts them into containers whose
# processes run under another user id.
set -eu
cd "$(dirname "$0")"
mkdir -p secrets
chmod 0700 secrets
cd secrets

random() { head -c "$1" /dev/urandom | od -An -tx1 | tr -d ' \n'; }
once() {
    [ -e "$1" ] || { printf '%s' "$2" > "$1.new"; chmod 0644 "$1.new"; mv "$1.new" "$1"; echo "made secrets/$1"; }
}

once postgres_password "$(random 24)"
once database_url "postgresql://fairlane:$(cat postgres_password)@postgres:5432/fairlane"
once program_password "$(random 24)"
once program_database_url "postgresql://fairlane_app:$(cat program_password)@postgres:5432/fairlane"
once valkey_password "$(random 24)"
once redis_url "redis://:$(cat valkey_password)@valkey:6379/0"
once secret_key "$(random 32)"
once key_pepper "$(random 32)"
once admin_token "$(random 24)"
once grafana_password "$(random 12)"
# Filled in once the control plane runs (README.md); compose wants the file to exist.
once router_token ""
