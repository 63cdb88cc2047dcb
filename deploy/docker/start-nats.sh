#!/bin/sh
# Becomes a nats-server that asks for a token: PENSTOCK_NATS_TOKEN, or where that is empty, one that is drawn at the
# first start. It is kept in /secrets, which the services that need it mount.
set -eu

for path in /data /data/jetstream /secrets /secrets/nats-token; do
    if [ -e "$path" ] && [ ! -w "$path" ]; then
        echo "error: $path belongs to user $(stat -c %u "$path"), not to PENSTOCK_UID $(id -u); set PENSTOCK_UID to that" \
            'one, or chown the volumes (docs/operation/deploy.md, "When something is red")' >&2
        exit 2
    fi
done

token=${PENSTOCK_NATS_TOKEN:-}
if [ -z "$token" ] && [ -s /secrets/nats-token ]; then
    token=$(cat /secrets/nats-token)
fi
if [ -z "$token" ]; then
    token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
fi
umask 077
printf '%s' "$token" >/secrets/nats-token.new
mv /secrets/nats-token.new /secrets/nats-token
{
    cat /etc/nats/nats.conf
    printf 'authorization { token: "%s" }\n' "$token"
} >/tmp/nats.conf
unset PENSTOCK_NATS_TOKEN
exec nats-server --config /tmp/nats.conf "$@"
