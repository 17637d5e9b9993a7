#!/usr/bin/env bash
# Unpack what pack.py wrote: unpack.sh FOLDER TARGET NAME...   -> TARGET/NAME, a folder for PYTHONPATH, for each name.
set -euo pipefail
folder=$1 target=$2
shift 2
for name in "$@"; do
    mkdir -p "$target/$name"
    cat "$folder/$name".tar.xz.* | tar xJ -C "$target/$name" &
done
wait
