#!/bin/sh
# Becomes a nats-server that asks for a token: the one in the file that PENSTOCK_NATS_TOKEN_FILE names, as in the Helm
# chart, or PENSTOCK_NATS_TOKEN, or where both are empty, one that is drawn at the first start. Without a file of its own
# it is kept in /secrets, which the services that need it mount.
set -eu

# The services ignore whitespace around the token in a file, too.
read_token() {
    tr -s '[:space:]' ' ' <"$1" | sed 's/^ //; s/ $//'
}

file=${PENSTOCK_NATS_TOKEN_FILE:-}
token=${PENSTOCK_NATS_TOKEN:-}
if [ -n "$file" ]; then
    token=
    [ -r "$file" ] && token=$(read_token "$file")
    if [ -z "$token" ]; then
        echo "error: PENSTOCK_NATS_TOKEN_FILE = '$file' cannot be read or is empty; name a file with the token" >&2
        exit 2
    fi
fi
# No character that the services allow ends the quoted text in nats.conf.
case $token in
    *[!A-Za-z0-9._~+/=-]*)
        echo 'error: PENSTOCK_NATS_TOKEN has characters that a token cannot have; use letters, digits and . _ ~ + / = -' \
            'only, for example what `openssl rand -hex 32` prints' >&2
        exit 2
        ;;
esac
written='/data /data/jetstream'
[ -n "$file" ] || written="$written /secrets /secrets/nats-token"
for path in $written; do
    if [ -e "$path" ] && [ ! -w "$path" ]; then
        echo "error: $path belongs to user $(stat -c %u "$path"), not to PENSTOCK_UID $(id -u); set PENSTOCK_UID to that" \
            'one, or chown the volumes (docs/operation/deploy.md, "When something is red")' >&2
        exit 2
    fi
done

if [ -z "$token" ] && [ -s /secrets/nats-token ]; then
    token=$(read_token /secrets/nats-token)
fi
if [ -z "$token" ]; then
    token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
fi
umask 077
if [ -z "$file" ]; then
    printf '%s' "$token" >/secrets/nats-token.new
    mv /secrets/nats-token.new /secrets/nats-token
fi
{
    cat /etc/nats/nats.conf
    printf 'authorization { token: "%s" }\n' "$token"
} >/tmp/nats.conf
unset PENSTOCK_NATS_TOKEN
exec nats-server --config /tmp/nats.conf "$@"
