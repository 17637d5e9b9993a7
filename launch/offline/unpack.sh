#!/usr/bin/env bash
# Unpack what pack.py wrote: unpack.sh FOLDER TARGET NAME...   -> TARGET/NAME, a folder for PYTHONPATH, for each name.
set -euo pipefail
folder=$1 target=$2
shift 2
jobs=()
for name in "$@"; do
    mkdir -p "$target/$name"
    cat "$folder/$name".tar.xz.* | tar xJ -C "$target/$name" &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done  # each, or the status of an incomplete archive would be lost
