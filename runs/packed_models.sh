# Sourced by scripts that hand weights on: models.tar, by xz where there is one, in pieces of 15 MiB.

pack_models() { # where to, then arguments of tar: the pieces there are replaced when all are written
    local to=$1
    shift
    rm -rf "$work/packed" && mkdir -p "$work/packed" "$to"
    if command -v xz >/dev/null; then
        tar -cf - "$@" | xz -1 -T4 | split -b 15M -d - "$work/packed/models.tar.xz."
    else
        tar -cf - "$@" | split -b 15M -d - "$work/packed/models.tar."
    fi
    rm -f "$to"/models.tar.*
    mv "$work"/packed/models.tar.* "$to/"
}

unpack() { # folder with models.tar in pieces, where to
    mkdir -p "$2"
    if ls "$1"/models.tar.xz.* >/dev/null 2>&1; then
        cat "$1"/models.tar.xz.* | xz -dc | tar -x -C "$2"
    else
        cat "$1"/models.tar.* | tar -x -C "$2"
    fi
}
