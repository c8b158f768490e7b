#!/usr/bin/env bash
# Finds Chromium and its driver, which the dashboard's tests need; root on Debian gets them by apt.
set -euo pipefail

packages="chromium chromium-driver"
there() { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }

if there; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "browser: Chromium is not there; installing it: apt-get install $packages"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $packages >/dev/null
fi
there || {
    echo "browser: the dashboard's tests need chromium and chromedriver. On Debian: apt-get install $packages" >&2
    exit 1
}
